"""Any interleaving of agents that die at any point, see old documents and lose answers (failures 38, 46, 65).

The oracle in `world.py` judges every document that any agent ever writes, and whether the world comes to rest once
faults stop. The same walks must find each of the seeded mistakes below: an oracle that sees none proves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from everstep.contract.document import FINISHED, Document, Member, Sizes
from everstep.membership import draining, machine, proposals
from everstep.membership.commands import Stop, Waited
from everstep.membership.draining import Staying
from everstep.membership.formation import selection
from everstep.membership.machine import IndexAssignment
from support.rendezvous.walks import SIZES, events, walk
from support.rendezvous.world import Agent, Violation, World

WALKS = int(os.environ.get("EVERSTEP_WALKS", "500"))
MUTANT_WALKS = 3000  # at most: a mistake must show in so many


class Job(RuleBasedStateMachine):
    """One rule, one store call at most; so an agent may die between any two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(SIZES[0])

    def agent(self, data: st.DataObject) -> Agent:
        return data.draw(st.sampled_from(list(self.world.agents.values())), label="agent")

    @precondition(lambda self: not self.world.agents)
    @rule(sizes=st.sampled_from(SIZES))
    def begin(self, sizes: Sizes) -> None:
        self.world = World(sizes)
        self.world.start(-1, 0)

    @rule(index=st.sampled_from([-1, -1, 0, 1]), incarnation=st.integers(0, 2))
    def start(self, index: int, incarnation: int) -> None:
        self.world.start(index, incarnation if index >= 0 else 0)

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data())
    def announce(self, data: st.DataObject) -> None:
        self.world.announce(self.agent(data))

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data(), age=st.sampled_from([0, 0, 1, 3]))
    def look(self, data: st.DataObject, age: int) -> None:
        self.world.look(self.agent(data), age)

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data())
    def read_presence(self, data: st.DataObject) -> None:
        self.world.read_presence(self.agent(data))

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data(), waited=st.sampled_from(Waited), answer_lost=st.booleans(), shrink=st.booleans())
    def join(self, data: st.DataObject, waited: Waited, answer_lost: bool, shrink: bool) -> None:
        self.world.join(self.agent(data), waited, answer_lost, shrink)

    @precondition(lambda self: self.world.agents)
    @rule(sizes=st.sampled_from(SIZES))
    def resize(self, sizes: Sizes) -> None:
        self.world.rule(sizes)

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        self.world.again(self.agent(data))

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data(), number=st.integers(0, 4))
    def act(self, data: st.DataObject, number: int) -> None:
        agent, target = self.agent(data), self.agent(data)
        self.world.act(agent, data.draw(st.sampled_from(list(events(self.world, agent, target, number)))))

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        agent = self.agent(data)
        self.world.act(agent, Stop(agent.name))

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data(), number=st.integers(0, 4))
    def stray(self, data: st.DataObject, number: int) -> None:
        agent, target = self.agent(data), self.agent(data)
        for event in events(self.world, agent, target, number):
            self.world.stray(agent, event, number)

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data(), expirations=st.booleans())
    def crash(self, data: st.DataObject, expirations: bool) -> None:
        agent = self.agent(data)
        self.world.crash(agent)
        if expirations:
            self.world.expire(agent)

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        self.world.expire(self.agent(data))

    @rule(age=st.sampled_from([0, 0, 1, 2]))
    def write_join_requests(self, age: int) -> None:
        self.world.write_join_requests(age)

    def teardown(self) -> None:
        self.world.settle()


def test_any_interleaving_of_crashes_stale_reads_and_lost_answers_keeps_one_membership_a_round() -> None:
    run_state_machine_as_test(
        Job,
        settings=settings(
            max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.long
def test_random_lives_of_a_job_break_no_rule_and_come_to_rest() -> None:
    formed = sum(len(walk(seed).formed) for seed in range(WALKS))
    assert formed > WALKS  # the walks do what they are for


# --- seeded mistakes

Patch = Callable[[pytest.MonkeyPatch], None]


def _patched(module: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    return lambda patch: patch.setattr(module, name, make(getattr(module, name)))


def _form_over_missing(form: Any) -> Any:
    return lambda document, event: form(document, replace(event, waited=Waited.REJOIN))


def _form_with_same_number(form: Any) -> Any:
    def wrong(document: Document, event: Any) -> Any:
        after = form(document, event)
        return replace(after, round=max(1, document.round)) if isinstance(after, Document) else after

    return wrong


def _form_any_running_round(form: Any) -> Any:
    # The members are forgotten before the machine looks whether they are missed.
    def wrong(document: Document, event: Any) -> Any:
        return form(replace(document, members=()), event)

    return wrong


def _lose_from_waiting_only(lose: Any) -> Any:
    def wrong(document: Document, agent: str, why: str) -> Any:
        after = lose(document, agent, why)
        return None if after is None else replace(after, gone=document.gone)

    return wrong


def _forget_who_is_gone(document: Any) -> Any:
    return lambda assignment: replace(document(assignment), gone=())


def _ranks_by_name(_assign: Any) -> Any:
    return lambda _previous, chosen, _group: tuple(sorted(chosen, key=lambda m: m.agent, reverse=True))


def _ranks_packed(_assign: Any) -> Any:
    # Keeps the order, but not the ranks: everyone behind a lost member moves up.
    def wrong(previous: tuple[Member, ...], chosen: Any, _group: int) -> tuple[Member, ...]:
        pool = {m.agent: m for m in chosen}
        kept = [pool.pop(m.agent) for m in previous if m.agent in pool]
        return (*kept, *sorted(pool.values()))

    return wrong


def _groups_do_not_count(close: Any) -> Any:
    def wrong(document: Document, event: Any) -> Any:
        sizes = document.sizes
        any_goes = Sizes(1, sizes.maximum, (1, *sizes.allowed)) if sizes.allowed else sizes
        after = close(replace(document, sizes=any_goes), event)
        fits = isinstance(after, Document) and sizes.largest(len(after.members)) == len(after.members)
        return replace(after, sizes=sizes) if fits else close(document, event)

    return wrong


def _seat_for_anyone(older: Any) -> Any:
    def wrong(assignment: Any, member: Member) -> Any:
        seat = assignment._seats.get(member.index)
        refused = older(assignment, member)
        if refused is not None:
            assignment._seats[member.index] = replace(seat, incarnation=0, past=())
        return None if refused is not None else refused

    return wrong


def _everyone_reaches_everyone(_largest: Any) -> Any:
    return lambda members, _reports: tuple(members)


def _too_many(close: Any) -> Any:
    def wrong(document: Document, event: Any) -> Any:
        sizes = document.sizes
        after = close(replace(document, sizes=Sizes(1, sizes.maximum)), event)
        return replace(after, sizes=sizes) if isinstance(after, Document) else after

    return wrong


def _nobody_is_evicted(without: Any) -> Any:
    return lambda document, by, present: (document, [])


def _old_join_requests_count(fold: Any) -> Any:
    def wrong(document: Document, me: str, present: Any) -> Any:
        return fold(
            document,
            me,
            {agent: replace(join_request, after=document.round) for agent, join_request in present.items()},
        )

    return wrong


def _finished_by_one(_done: Any) -> Any:
    return lambda document, agent: replace(document, done=(*document.done, agent), closed=FINISHED)


def _mark_takes_out(stop: Any) -> Any:
    def wrong(document: Document, agent: str) -> Any:
        after = stop(document, agent)
        return machine._lose(after, agent, "stops") if isinstance(after, Document) else after

    return wrong


def _whoever_stopped_joins(join: Any) -> Any:
    def wrong(assignment: Any, member: Member, sizes: Sizes) -> Any:
        assignment._stopping = frozenset()
        return join(assignment, member, sizes)

    return wrong


MISTAKES: dict[str, Patch] = {
    "no fence": _patched(machine, "_fence", lambda _: lambda document, by, number: None),
    "fence forgets the round's number": _patched(
        machine, "_fence", lambda fence: lambda document, by, number: fence(document, by, document.round)
    ),
    "forms over missing members": _patched(machine, "_form", _form_over_missing),
    "forms a round while one runs": _patched(machine, "_form", _form_any_running_round),
    "gives a number twice": _patched(machine, "_form", _form_with_same_number),
    "forms a round of a size that is not allowed": _patched(machine, "_form", _too_many),
    "takes out without a record": _patched(machine, "_lose", _lose_from_waiting_only),
    "forgets who is gone": _patched(IndexAssignment, "document", _forget_who_is_gone),
    "ranks without regard to the last round": _patched(selection, "assign", _ranks_by_name),
    "everyone moves up": _patched(selection, "assign", _ranks_packed),
    "groups that are whole are torn": _patched(machine, "_form", _groups_do_not_count),
    "an older incarnation comes back": _patched(IndexAssignment, "_replace_older", _seat_for_anyone),
    "finished when one member is": _patched(machine, "_done", _finished_by_one),
    "unreachable pairs together": _patched(selection, "largest_set", _everyone_reaches_everyone),
    "a dead agent is never taken out": _patched(proposals, "without_expired", _nobody_is_evicted),
    "leaves although too few stay": _patched(draining, "staying", lambda _: lambda document: Staying.ALL),
    "who was asked to stop comes back": _patched(IndexAssignment, "join", _whoever_stopped_joins),
    "a mark takes out": _patched(machine, "_stop", _mark_takes_out),
    "a settled join request is taken up again": _patched(proposals, "_fold", _old_join_requests_count),
}


@pytest.mark.long_but("forms over missing members")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_seeded_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    for seed in range(MUTANT_WALKS):
        try:
            walk(seed)
        except Violation:
            return
    pytest.fail(f"{MUTANT_WALKS} walks did not notice: {mistake}")
