"""What one agent would write next, situation by situation; `test_rendezvous_world.py` has what always holds."""

from __future__ import annotations

from dataclasses import replace

from everstep.contract.document import Document, JoinRequest, Loss, Member, Sizes
from everstep.membership.commands import Join, Waited
from everstep.membership.machine import join_all
from everstep.membership.proposals import Barred, Proposal, propose_join

OLD, NEW = Sizes(2, 2), Sizes(1, 1)


def document(round: int, members: str, joining: str, sizes: Sizes = OLD) -> Document:
    """Agents by letters; the place of each is its index."""
    everyone = [Member(i, name) for i, name in enumerate(members or joining)]
    seated, _ = join_all(Document(sizes), [Join(member, sizes) for member in everyone])
    if not members:
        return seated
    return replace(seated, round=round, members=tuple(everyone), joining=())


def join_requests(names: str, after: int, sizes: Sizes) -> dict[str, JoinRequest]:
    return {name: JoinRequest(Member(i, name), after, sizes) for i, name in enumerate(names)}


def test_first_agent_of_a_job_that_was_suspended_is_not_barred_by_sizes_of_those_who_expired() -> None:
    before = document(3, "ab", "")
    proposal = propose_join(before, JoinRequest(Member(0, "c"), 0, NEW), join_requests("c", 0, NEW), Waited.NOTHING)
    assert isinstance(proposal, Proposal)
    assert (proposal.document.round, proposal.document.sizes) == (4, NEW)
    assert [m.agent for m in proposal.document.members] == ["c"]


def test_first_agent_of_other_sizes_is_not_barred_by_those_who_waited_and_expired() -> None:
    before = document(0, "", "ab")
    proposal = propose_join(before, JoinRequest(Member(0, "c"), 0, NEW), join_requests("c", 0, NEW), Waited.NOTHING)
    assert isinstance(proposal, Proposal)
    assert [m.agent for m in proposal.document.members] == ["c"]


def test_agent_of_other_sizes_is_barred_while_one_that_asked_for_these_is_present() -> None:
    before = document(3, "ab", "")
    present = {**join_requests("ab", 2, OLD), **join_requests("c", 0, NEW)}
    del present["a"]
    step = propose_join(before, JoinRequest(Member(0, "c"), 0, NEW), present, Waited.NOTHING)
    assert isinstance(step, Barred)
    assert "asks for sizes 1:1, and this job has 2:2" in step.why


def test_joiner_without_an_index_takes_the_one_of_who_expired() -> None:
    before = document(3, "ab", "")
    present = {"b": JoinRequest(Member(1, "b"), 3, OLD), "c": JoinRequest(Member(-1, "c"), 0, OLD)}
    proposal = propose_join(before, present["c"], present, Waited.NOTHING)
    assert isinstance(proposal, Proposal)
    assert [(m.index, m.agent) for m in proposal.document.members] == [(0, "c"), (1, "b")]


def test_member_that_lapsed_is_recorded_as_lost_by_its_lease() -> None:
    before = document(3, "ab", "")
    present = {"b": JoinRequest(Member(1, "b"), 3, OLD)}
    proposal = propose_join(before, present["b"], present, Waited.NOTHING)
    assert isinstance(proposal, Proposal)
    assert proposal.document.gone == (Loss("a", "its lease expired"),)
