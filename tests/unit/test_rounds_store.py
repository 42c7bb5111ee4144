"""The operator's rounds: an operator dies at each of its requests, two lead at once, documents that are no successor.

The API server is the in-memory one; agents are a few lines that propose what the pure machine says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from everstep.contract.document import Document, DocumentInvalid, JoinRequest, Member, Sizes, decode, encode
from everstep.membership.commands import CloseJob, Command, Done, Evict, Form, Join, Stop, Waited
from everstep.membership.machine import Rejected, apply
from everstep_operator.kube.errors import Forbidden, Operation
from everstep_operator.kube.resources import CONFIGMAPS
from everstep_operator.kube.wire import Pod
from everstep_operator.main import JOBS
from everstep_operator.round_view import RoundView
from everstep_operator.rounds.agent_lookup import Agent
from everstep_operator.rounds.documents import JobRef, RoundsRefused, RoundsUnavailable, WriteFailure
from everstep_operator.rounds.presence import Worker
from everstep_operator.rounds.registry import RoundRegistry
from everstep_operator.worker_pods import stop_was_requested
from support.operator.round_stage import NS, SIZES, A, B, Mortal, Stage, Term


async def change(
    rounds: RoundRegistry, agent: Agent, event: Callable[[Document], Command], given: Document | None = None
) -> bool:
    """As an agent changes the document: read, decide, swap; whether it was taken."""
    sight = await rounds.of(agent.job).read(0)
    before = Document(SIZES) if sight.document is None else decode(sight.document.encode())
    after = apply(before, event(before))
    if isinstance(after, Rejected):
        return True  # it happened already, though nobody was told
    return (
        await rounds.of(agent.job).swap(sight.version, encode(after), stop_requested=agent.stop_requested) is not None
    )


def join(member: Member) -> Callable[[Document], Command]:
    return lambda _: Join(member, SIZES)


def close(document: Document) -> Command:
    return Form("a", document.round, Waited.REJOIN)


STORY: tuple[tuple[int, Callable[[Document], Command], Callable[[Document], bool]], ...] = (
    (0, join(A), lambda d: "a" in {m.agent for m in (*d.joining, *d.members)}),
    (1, join(B), lambda d: "b" in {m.agent for m in (*d.joining, *d.members)}),
    (0, close, lambda d: d.members == (A, B)),
    (0, lambda d: Evict("a", d.round, "b", "lost"), lambda d: bool(d.gone) or d.members == (A,)),
    (0, join(A), lambda d: bool(d.joining) or d.members == (A,)),
    (0, close, lambda d: d.members == (A,)),
)  # fmt: skip


async def play(stage: Stage, rounds: RoundRegistry, restart: Callable[[], RoundRegistry]) -> None:
    """The job's life; whenever the operator fails, `restart` gives the next one, and the agents try again."""
    for who, event, done in STORY:
        for _ in range(10):
            try:
                await change(rounds, stage.agents[who], event)
                await stage.judge()
                document = await stage.stored()
                if document is not None and done(document):
                    break
            except RoundsUnavailable:
                await stage.judge()
                rounds = restart()
        else:
            raise AssertionError(f"no progress: {await stage.stored()}")


async def test_life_of_a_job_publishes_each_round_before_it_is_kept() -> None:
    stage = Stage()
    await stage.start()
    client = Mortal(stage.client)
    await play(stage, stage.operator(client), stage.operator)
    assert stage.rounds == {1: (A, B), 2: (A,)}
    assert await stage.published() == 2
    writes = [what for what in client.requests if not what.startswith("get")]
    assert writes[:4] == ["create configmaps", "replace configmaps", "patch_status trainingjobs", "replace configmaps"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_operator_that_dies_at_any_request_delays_a_round_and_never_gives_a_number_twice(after: bool) -> None:
    for at in range(20):
        stage = Stage()
        await stage.start()
        client = Mortal(stage.client, at, after)
        await play(stage, stage.operator(client), stage.operator)
        assert list(stage.rounds.values()) == [(A, B), (A,)], at
        assert len(client.requests) <= at + 1
        if not client.dead:
            assert at > 10  # the whole life was died through
            return
    raise AssertionError("the life has more requests than were tried")


@pytest.mark.parametrize("deleted", [False, True], ids=["kept", "deleted"])
async def test_two_operators_that_both_lead_never_give_one_number_to_two_memberships(deleted: bool) -> None:
    """The first one is stopped before each of its requests in turn, the second forms a round, the first goes on."""
    for stop in range(5):
        stage = Stage()
        await stage.start()
        first, second = stage.operator(client := Mortal(stage.client)), stage.operator()
        for who, event, _ in STORY[:2]:
            await change(first, stage.agents[who], event)
        reached, resume = asyncio.Event(), asyncio.Event()
        seen = len(client.requests)

        async def pause(what: str) -> None:
            if len(client.requests) - seen == stop:  # noqa: B023
                reached.set()  # noqa: B023
                await resume.wait()  # noqa: B023

        client.gate = pause
        # Each forms the next round, of another membership: what the first decided is old when it wakes.
        slow = asyncio.ensure_future(change(first, stage.agents[0], close))
        waiting = asyncio.ensure_future(reached.wait())
        await asyncio.wait((slow, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if slow.done():
            assert stop >= 3
            return
        if deleted:
            await stage.client.delete(CONFIGMAPS, NS, "digits-rounds")
            assert await change(second, stage.agents[0], join(A)) is True
        else:
            await change(second, stage.agents[0], lambda d: Evict("a", d.round, "b", "lost"))
        await change(second, stage.agents[0], close)
        await stage.judge()
        resume.set()
        with contextlib.suppress(RoundsUnavailable):
            await slow
        await stage.judge()
        assert (A,) in stage.rounds.values()
    raise AssertionError("the first operator has more requests than were tried")


async def test_document_that_was_lost_is_begun_anew_with_larger_numbers() -> None:
    stage = Stage()
    await stage.start()
    await play(stage, rounds := stage.operator(), stage.operator)
    await stage.client.delete(CONFIGMAPS, NS, "digits-rounds")
    await stage.clock.advance(6)  # a read asks the API server again
    assert (await rounds.of(stage.job).read(0)).document is None
    for _ in range(2):
        await change(rounds, stage.agents[0], join(A))
        await change(rounds, stage.agents[0], close)
        await stage.judge()
    assert list(stage.rounds) == [1, 2, 3, 4]
    assert rounds.view(stage.job) == RoundView(4, ((0, 0),))


async def test_sizes_that_the_operator_sets_hold_for_agents_that_were_started_with_others() -> None:
    stage = Stage()
    await stage.start()
    told: list[JobRef] = []
    rounds = stage.operator(changed=told.append)
    await rounds.of(stage.job).set_sizes(Sizes(1, 1))
    assert rounds.view(stage.job) == RoundView(0, sizes=Sizes(1, 1))
    assert told == [stage.job], "the planner looks again"
    for who, event, _ in STORY[:3]:
        await change(rounds, stage.agents[who], event)
    assert (await stage.stored()) is not None
    assert rounds.view(stage.job) == RoundView(1, ((0, 0),), joining=(1,), sizes=Sizes(1, 1))
    await rounds.of(stage.job).set_sizes(Sizes(2, 2))
    document = await stage.stored()
    assert document is not None
    assert (document.round, document.sizes, document.ruled) == (1, Sizes(2, 2), True)
    new = stage.operator()
    assert (await new.of(stage.job).read(0)).document == encode(document).decode()
    await stage.judge()


async def test_sizes_that_are_the_same_or_of_a_closed_job_are_not_written() -> None:
    stage = Stage()
    await stage.start()
    rounds = stage.operator(client := Mortal(stage.client))
    await rounds.of(stage.job).set_sizes(SIZES)
    await rounds.of(stage.job).set_sizes(SIZES)
    assert client.requests.count("create configmaps") == 1
    await change(rounds, stage.agents[0], join(A))
    await change(rounds, stage.agents[0], lambda _: CloseJob("a", "over"))
    await rounds.of(stage.job).set_sizes(Sizes(2, 2))
    document = await stage.stored()
    assert document is not None
    assert (document.closed, document.sizes) == ("over", SIZES)


async def test_closed_document_is_begun_anew_once_and_its_rounds_go_on() -> None:
    for at in [*range(4), None]:
        stage = Stage()
        await stage.start()
        rounds = stage.operator()
        for who, event, _ in STORY[:3]:
            await change(rounds, stage.agents[who], event)
        await rounds.of(stage.job).begin_anew(SIZES, 1)
        assert (await stage.stored() or Document(SIZES)).round == 1, "it is not closed"
        await change(rounds, stage.agents[0], lambda _: CloseJob("a", "over"))
        await rounds.of(stage.job).begin_anew(SIZES, 7)
        assert (await stage.stored() or Document(SIZES)).closed == "over", "another one was meant"
        with contextlib.suppress(RoundsUnavailable):
            await stage.operator(Mortal(stage.client, at)).of(stage.job).begin_anew(SIZES, 1)
        new = stage.operator()
        await new.of(stage.job).begin_anew(SIZES, 1)
        assert await stage.stored() == Document(SIZES, ruled=True)
        assert await stage.published() == 1
        for who, event, _ in STORY[:3]:
            await change(new, stage.agents[who], event)
        document = await stage.stored()
        assert document is not None
        assert (document.round, await stage.published()) == (2, 2)


async def test_agent_that_changes_the_sizes_or_whose_they_are_or_who_is_announced_is_corrected() -> None:
    stage = Stage()
    await stage.start()
    rounds = stage.operator()
    await rounds.of(stage.job).set_sizes(SIZES, 2)
    assert rounds.view(stage.job) == RoundView(0, sizes=SIZES, surge=2)
    sight = await rounds.of(stage.job).read(0)
    assert sight.document is not None
    before = decode(sight.document.encode())
    for changes in ({"ruled": False}, {"sizes": Sizes(1, 1)}, {"surge": 0}):
        sight = await rounds.of(stage.job).read(0)
        after = encode(replace(before, joining=(A,), **changes))  # type: ignore[arg-type]
        assert await rounds.of(stage.job).swap(sight.version, after) is None, "it is to read again"
        assert await stage.stored() == replace(before, joining=(A,))


async def test_sizes_are_set_though_the_operator_dies_at_any_request_or_another_changes_the_document() -> None:
    for at in range(4):
        stage = Stage()
        await stage.start()
        await change(stage.operator(), stage.agents[0], join(A))
        with contextlib.suppress(RoundsUnavailable):
            await stage.operator(Mortal(stage.client, at)).of(stage.job).set_sizes(Sizes(2, 2))
        await stage.operator().of(stage.job).set_sizes(Sizes(2, 2))
        document = await stage.stored()
        assert document is not None
        assert (document.sizes, document.joining) == (Sizes(2, 2), (A,))


async def test_fields_of_a_newer_agent_are_kept_where_sizes_are_set() -> None:
    stage = Stage()
    await stage.start()
    rounds = stage.operator()
    body = {**json.loads(encode(Document(SIZES, joining=(A,)))), "later": [1]}
    await rounds.of(stage.job).swap(0, json.dumps(body).encode())
    await rounds.of(stage.job).set_sizes(Sizes(2, 2))
    (kept,) = (await stage.client.list(CONFIGMAPS, NS)).items
    assert json.loads(kept.data["document"])["later"] == [1]


async def test_number_that_an_agent_asks_for_is_not_the_one_that_it_gets() -> None:
    stage = Stage()
    await stage.start()
    rounds = stage.operator()
    for who, event, _ in STORY[:3]:
        await change(rounds, stage.agents[who], event)
    sight = await rounds.of(stage.job).read(0)
    assert sight.document is not None
    greedy = replace(decode(sight.document.encode()), round=2**52, gone=())
    assert await rounds.of(stage.job).swap(sight.version, encode(greedy)) is None
    assert await stage.published() == 2
    again = await rounds.of(stage.job).read(0)
    assert again.document is not None
    assert decode(again.document.encode()).round == 2


async def test_status_that_the_planner_writes_meanwhile_costs_a_repetition_only() -> None:
    stage = Stage()
    await stage.start()
    rounds = stage.operator(client := Mortal(stage.client))
    for who, event, _ in STORY[:2]:
        await change(rounds, stage.agents[who], event)
    times = 0

    async def planner(what: str) -> None:
        nonlocal times
        if what == "patch_status trainingjobs" and times < 3:
            times += 1
            await stage.client.patch_status(JOBS, NS, "digits", {"readyReplicas": times})

    client.gate = planner
    assert await change(rounds, stage.agents[0], close)
    job = await stage.client.get(JOBS, NS, "digits")
    assert (job.status["world"]["round"], job.status["readyReplicas"]) == (1, 3)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda d: replace(d, round=0, members=()), "round 0 is over"),
        (lambda d: replace(d, members=(A,)), "members of round 1 cannot be changed"),
        (lambda d: replace(d, members=(B, A)), "members of round 1 cannot be changed"),
    ],
)
async def test_document_that_is_no_successor_is_refused_and_nothing_changes(
    edit: Callable[[Document], Document], reason: str
) -> None:
    stage = Stage()
    await stage.start()
    rounds = stage.operator()
    for who, event, _ in STORY[:3]:
        await change(rounds, stage.agents[who], event)
    sight = await rounds.of(stage.job).read(0)
    assert sight.document is not None
    with pytest.raises(RoundsRefused, match=reason):
        await rounds.of(stage.job).swap(sight.version, encode(edit(decode(sight.document.encode()))))
    with pytest.raises(DocumentInvalid):
        await rounds.of(stage.job).swap(sight.version, b"\xff\xfe{\x00")
    assert await rounds.of(stage.job).read(0) == sight
    assert await stage.published() == 1


async def test_success_of_an_agent_whose_pod_was_told_to_end_is_refused_and_no_other_change_of_it() -> None:
    """Its processes may have ended with 0 because they were told to, as by a preStop hook."""
    stage = Stage()
    await stage.start()
    rounds = stage.operator()
    for who, event, _ in STORY[:3]:
        await change(rounds, stage.agents[who], event)
    assert await change(rounds, stage.agents[0], lambda d: Done("a", d.round))
    told = replace(stage.agents[1], stop_requested=True)
    with pytest.raises(RoundsRefused, match="exit code 0 is no success"):
        await change(rounds, told, lambda d: Done("b", d.round))
    assert await change(rounds, told, lambda _: Stop("b"))
    view = rounds.view(stage.job)
    assert view is not None
    assert (view.finished, view.closed) == (False, None)
    assert await change(rounds, stage.agents[1], lambda d: Done("b", d.round))
    view = rounds.view(stage.job)
    assert view is not None
    assert view.finished


@pytest.mark.parametrize(
    ("metadata", "conditions", "told"),
    [
        ({}, [], False),
        ({"deletionTimestamp": "2026-01-01T00:00:30Z"}, [], True),
        ({}, [{"type": "DisruptionTarget", "status": "True"}], True),
        ({}, [{"type": "DisruptionTarget", "status": "False"}, {"type": "Ready", "status": "True"}], False),
    ],
)
def test_pod_that_is_deleted_or_disrupted_is_told_to_end(metadata: object, conditions: object, told: bool) -> None:
    pod = msgspec.convert({"metadata": metadata, "status": {"phase": "Running", "conditions": conditions}}, Pod)
    assert stop_was_requested(pod) is told


async def test_closed_job_stays_closed() -> None:
    stage = Stage()
    await stage.start()
    rounds = stage.operator()
    for who, event, _ in STORY[:3]:
        await change(rounds, stage.agents[who], event)
    await change(rounds, stage.agents[0], lambda _: CloseJob("a", "done"))
    sight = await rounds.of(stage.job).read(0)
    with pytest.raises(RoundsRefused, match="the job is closed: done"):
        await rounds.of(stage.job).swap(sight.version, encode(Document(SIZES)))
    view = rounds.view(stage.job)
    assert view is not None
    assert view.closed == "done"


async def test_planner_sees_that_a_job_has_finished_and_does_not_miss_who_left_it_then() -> None:
    stage = Stage()
    await stage.start()
    rounds = stage.operator()
    for who, event, _ in STORY[:3]:
        await change(rounds, stage.agents[who], event)
    await change(rounds, stage.agents[1], lambda d: Done("b", d.round))
    await change(rounds, stage.agents[0], lambda d: Evict("a", d.round, "b", "its pod ended"))
    view = rounds.view(stage.job)
    assert view is not None
    assert (view.gone, view.finished) == ((), False)
    await change(rounds, stage.agents[0], lambda d: Done("a", d.round))
    view = rounds.view(stage.job)
    assert view is not None
    assert view.finished


async def test_name_that_belongs_to_somebody_else_is_left_alone_and_said() -> None:
    stage = Stage()
    await stage.start()
    await stage.client.create(CONFIGMAPS, NS, {"metadata": {"name": "digits-rounds"}, "data": {"mine": "1"}})
    rounds = stage.operator()
    with pytest.raises(RoundsUnavailable, match="ConfigMap digits-rounds has a name that this job needs"):
        await rounds.of(stage.job).read(0)
    assert (await stage.client.get(CONFIGMAPS, NS, "digits-rounds")).data == {"mine": "1"}


async def test_job_that_is_new_is_not_looked_up_and_what_stands_there_all_the_same_is_kept() -> None:
    """A cache that is behind may call a job new that is not; another's ConfigMap may have the name."""
    stage = Stage()
    await stage.start()
    client = Mortal(stage.client)
    rounds = stage.operator(client)
    assert rounds.view(stage.job, is_new=True) == RoundView(0)
    await change(stage.operator(), stage.agents[0], join(A))
    await rounds.of(stage.job).set_sizes(Sizes(2, 2))
    document = await stage.stored()
    assert document is not None
    assert (document.sizes, document.joining) == (Sizes(2, 2), (A,))
    assert client.requests == ["create configmaps", "get configmaps", "replace configmaps"]


async def test_name_of_a_new_jobs_document_that_somebody_else_has_is_said_until_it_is_free() -> None:
    stage = Stage()
    await stage.start()
    await stage.client.create(CONFIGMAPS, NS, {"metadata": {"name": "digits-rounds"}, "data": {"mine": "1"}})
    told: list[JobRef] = []
    rounds = stage.operator(changed=told.append)
    assert rounds.view(stage.job, is_new=True) == RoundView(0)
    with pytest.raises(RoundsUnavailable, match="has a name that this job needs"):
        await rounds.of(stage.job).set_sizes(SIZES)
    assert "digits-rounds" in (rounds.write_failure(stage.job).name_taken or "")
    assert told == [stage.job]
    await stage.client.delete(CONFIGMAPS, NS, "digits-rounds")
    await rounds.of(stage.job).set_sizes(SIZES)
    assert rounds.write_failure(stage.job) == WriteFailure()
    document = await stage.stored()
    assert document is not None
    assert document.sizes == SIZES


async def test_document_that_the_api_server_refuses_is_told_until_it_is_written() -> None:
    """A quota of ConfigMaps: the agents only know that they have to try again, so the job's status says why."""
    stage = Stage()
    await stage.start()
    client = Mortal(stage.client)
    refuses = True

    async def gate(what: str) -> None:
        if refuses and what == "create configmaps":
            raise Forbidden("exceeded quota: small", operation=Operation("create", "configmaps"))

    client.gate = gate
    rounds = stage.operator(client)
    with pytest.raises(RoundsUnavailable, match="exceeded quota"):
        await change(rounds, stage.agents[0], STORY[0][1])
    said = rounds.write_failure(stage.job).refused
    assert said is not None
    assert said.startswith("ConfigMap digits-rounds: ")
    assert "exceeded quota: small" in said
    refuses = False
    assert await change(rounds, stage.agents[0], STORY[0][1])
    assert rounds.write_failure(stage.job) == WriteFailure()


async def test_sizes_that_the_api_server_refuses_wake_the_job_once() -> None:
    """If each refusal announced a change, the next pass would follow at once, and ask again, for as long as the quota
    is used up, or the namespace ends."""
    stage = Stage()
    await stage.start()
    client = Mortal(stage.client)
    told: list[JobRef] = []

    async def gate(what: str) -> None:
        if what == "create configmaps":
            raise Forbidden("the namespace is being terminated", operation=Operation("create", "configmaps"))

    client.gate = gate
    rounds = stage.operator(client, changed=told.append)
    for _ in range(5):
        with pytest.raises(RoundsUnavailable, match="being terminated"):
            await rounds.of(stage.job).set_sizes(SIZES)
        assert rounds.view(stage.job) == RoundView(0)
        await stage.clock.advance(0.1)
    assert told == [stage.job]  # of the refusal
    assert client.requests.count("get configmaps") == 1


async def test_job_that_is_deleted_gets_no_round() -> None:
    stage = Stage()
    await stage.start()
    rounds = stage.operator()
    for who, event, _ in STORY[:2]:
        await change(rounds, stage.agents[who], event)
    await stage.client.delete(JOBS, NS, "digits", propagation="Orphan")
    with pytest.raises(RoundsRefused, match="is gone"):
        await change(rounds, stage.agents[0], close)


async def test_writes_of_one_job_are_bounded_in_number() -> None:
    stage = Stage()
    await stage.start()
    rounds = stage.operator()
    sight = await rounds.of(stage.job).read(0)
    version: int | None = sight.version
    for i in range(200):
        assert version is not None
        version = await rounds.of(stage.job).swap(version, encode(Document(SIZES, restarts=i)))
    assert version is not None
    with pytest.raises(RoundsUnavailable, match="times a second"):
        await rounds.of(stage.job).swap(version, encode(Document(SIZES)))
    await stage.clock.advance(1)
    sight = await rounds.of(stage.job).read(0)
    assert await rounds.of(stage.job).swap(sight.version, encode(Document(SIZES))) is not None


# --- presence and a new leader


async def test_new_leader_counts_nobody_as_lapsed_who_had_no_time_to_come_back() -> None:
    stage = Stage()
    await stage.start()
    old = stage.operator()
    for who, member in enumerate((A, B)):
        old.of(stage.job).announce(stage.agents[who].worker, member.agent, JoinRequest(member, 0, SIZES).encode(), 20.0)
    for who, event, _ in STORY[:3]:
        await change(old, stage.agents[who], event)
    new = stage.operator()
    before = await new.of(stage.job).read(0)
    assert before.expirations != (await old.of(stage.job).read(0)).expirations  # so that each looks
    assert set(json.loads(await new.of(stage.job).present(stage.agents[0].worker))) == {"a", "b"}
    await stage.clock.advance(10)
    assert not new.of(stage.job).renew(stage.agents[0].worker, "a")
    new.of(stage.job).announce(stage.agents[0].worker, "a", JoinRequest(A, 1, SIZES).encode(), 20.0)
    await stage.clock.advance(9.5)
    assert (await new.of(stage.job).read(0)).expirations == before.expirations
    await stage.clock.advance(1)
    assert (await new.of(stage.job).read(0)).expirations == before.expirations + 1
    assert set(json.loads(await new.of(stage.job).present(stage.agents[0].worker))) == {"a"}


async def test_agent_is_not_told_what_was_only_supposed_of_a_job_that_seems_new() -> None:
    """Nobody of the round was here yet: an answer without them would say that they are lost."""
    stage = Stage()
    await stage.start()
    old = stage.operator()
    await form(stage, old)
    new = stage.operator()
    assert new.view(stage.job, is_new=True) == RoundView(0)
    assert set(json.loads(await new.of(stage.job).present(stage.agents[0].worker))) == {"a", "b"}
    assert new.view(stage.job, is_new=True) == old.view(stage.job)


async def form(stage: Stage, rounds: RoundRegistry) -> None:
    """A round of both agents, which are present for 20 s."""
    for who, event, _ in STORY[:3]:
        await change(rounds, stage.agents[who], event)
    for who, member in enumerate((A, B)):
        rounds.of(stage.job).announce(
            stage.agents[who].worker, member.agent, JoinRequest(member, 0, SIZES).encode(), 20.0
        )


@pytest.mark.parametrize("early", [False, True], ids=["", "called before all know that it leads"])
@pytest.mark.parametrize("others", [0, 1], ids=["nobody else", "another"])
async def test_leader_that_leads_again_remembers_who_is_present_if_nobody_led_in_between(
    others: int, early: bool
) -> None:
    """Case 40, seen from a round: the Lease is lost for a moment, to a slow API server or in a crowd."""
    stage = Stage()
    await stage.start()
    term = Term()
    rounds = stage.operator(term=term)
    await form(stage, rounds)
    before = await rounds.of(stage.job).read(0)
    term.leads = False
    rounds.forget_all()
    await stage.clock.advance(30)  # nobody could renew
    term.leads, term.epoch = True, 2 + others
    if early:
        await rounds.of(stage.job).read(0)
    rounds.forget_all()
    after = await rounds.of(stage.job).read(0)
    assert after.expirations != before.expirations  # so that each looks
    assert set(json.loads(await rounds.of(stage.job).present(stage.agents[0].worker))) == {"a", "b"}
    assert rounds.of(stage.job).renew(stage.agents[0].worker, "a") is not bool(others)
    await stage.clock.advance(20.5)  # one more lease: b is gone, and a if it was told to announce itself and did not
    present = set(json.loads(await rounds.of(stage.job).present(stage.agents[0].worker)))
    assert present == set(), "nobody renewed in this time"
    assert (await rounds.of(stage.job).read(0)).expirations == after.expirations + 2


async def test_join_request_of_who_was_present_is_written_by_the_leader_that_leads_again() -> None:
    stage = Stage()
    await stage.start()
    term = Term()
    rounds = stage.operator(term=term)
    for who, member in enumerate((A, B)):
        rounds.of(stage.job).announce(
            stage.agents[who].worker, member.agent, JoinRequest(member, 0, SIZES).encode(), 20.0
        )
        rounds.of(stage.job).request_write(member.agent)
    term.leads = False
    rounds.forget_all()
    term.leads, term.epoch = True, 2
    await rounds.of(stage.job).read(0)  # whoever comes first
    await stage.clock.advance(1)
    async with asyncio.timeout(5):
        while (document := await stage.stored()) is None or len(document.members) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_pod_that_dies_between_two_leaderships_of_a_replica_is_not_remembered() -> None:
    stage = Stage()
    await stage.start()
    term = Term()
    rounds = stage.operator(term=term)
    await form(stage, rounds)
    term.leads = False
    rounds.forget_all()
    rounds.withdraw_pod(stage.job.uid, stage.agents[1].worker)
    term.leads, term.epoch = True, 2
    await rounds.of(stage.job).read(0)
    assert set(json.loads(await rounds.of(stage.job).present(stage.agents[0].worker))) == {"a"}


async def test_pod_answers_while_its_agent_renews_its_presence() -> None:
    """A node that is not ready takes no worker whose agent answers; a new leader gives every agent one lease's time."""
    stage = Stage()
    await stage.start()
    rounds = stage.operator()
    a, b = stage.agents[:2]
    assert rounds.answers(stage.job, b.worker.pod_uid)  # it may announce itself in a moment
    rounds.of(a.job).announce(a.worker, A.agent, JoinRequest(A, 0, SIZES).encode(), 3.0)
    await stage.clock.advance(2.0)
    assert rounds.of(a.job).renew(a.worker, A.agent)
    await stage.clock.advance(2.0)
    assert rounds.answers(stage.job, a.worker.pod_uid)
    assert not rounds.answers(stage.job, b.worker.pod_uid)
    await stage.clock.advance(1.5)
    assert not rounds.answers(stage.job, a.worker.pod_uid)


async def test_pod_that_dies_while_its_agent_is_awaited_is_not_awaited_any_more() -> None:
    stage = Stage()
    await stage.start()
    old = stage.operator()
    for who, event, _ in STORY[:3]:
        await change(old, stage.agents[who], event)
    new = stage.operator()
    before = await new.of(stage.job).read(0)
    new.withdraw_pod(stage.job.uid, Worker("unknown", 1, 3))
    assert (await new.of(stage.job).read(0)).expirations == before.expirations
    new.withdraw_pod(stage.job.uid, Worker("whatever", 1, 0))
    assert (await new.of(stage.job).read(0)).expirations == before.expirations + 1
    assert set(json.loads(await new.of(stage.job).present(stage.agents[0].worker))) == {"a"}


async def test_view_of_a_job_that_is_not_known_yet_is_read_and_announced() -> None:
    stage = Stage()
    await stage.start()
    old = stage.operator()
    for who, event, _ in STORY[:4]:
        await change(old, stage.agents[who], event)
    told: list[JobRef] = []
    new = stage.operator(changed=told.append)
    assert new.view(stage.job) is None
    await stage.clock.advance(0.1)
    assert told[-1] == stage.job
    assert new.view(stage.job) == RoundView(1, ((0, 0), (1, 0)), gone=(1,), left=((1, 0),))


async def test_watch_ends_when_the_leadership_does() -> None:
    stage = Stage()
    await stage.start()
    epoch = 1
    rounds = stage.operator(term=lambda: epoch)
    sight = await rounds.of(stage.job).read(0)
    waiting = asyncio.ensure_future(
        rounds.of(stage.job).watch(stage.agents[0].worker, sight.version, sight.expirations, 30.0)
    )
    await asyncio.sleep(0)
    assert rounds.watching == 1
    rounds.forget_all()  # it is told that it leads, which it knew
    await asyncio.sleep(0)
    assert rounds.watching == 1
    epoch += 1
    rounds.forget_all()
    async with asyncio.timeout(5):
        await waiting


async def test_in_a_crowd_one_after_the_other_is_told_who_is_present_to_write_for_all() -> None:
    stage = Stage()
    await stage.start()
    rounds = stage.operator()
    agents = [Agent(stage.job, Worker(f"uid-{i}", i, 0)) for i in range(40)]
    sizes = Sizes(1, 40)
    for i, agent in enumerate(agents):
        rounds.of(agent.job).announce(
            agent.worker, f"agent-{i}", JoinRequest(Member(i, f"agent-{i}"), 0, sizes).encode(), 30.0
        )
    assert len(json.loads(await rounds.of(agents[0].job).present(agents[0].worker))) == 40
    with pytest.raises(RoundsUnavailable, match="another agent writes just now"):
        await rounds.of(agents[1].job).present(agents[1].worker)
    await rounds.of(agents[0].job).present(agents[0].worker)
    assert await rounds.of(agents[0].job).swap(0, encode(Document(sizes))) is not None
    await rounds.of(agents[1].job).present(agents[1].worker)  # it wrote: the next one may
    with pytest.raises(RoundsUnavailable):
        await rounds.of(agents[2].job).present(agents[2].worker)
    await stage.clock.advance(0.3)
    await rounds.of(agents[2].job).present(agents[2].worker)  # whoever had the turn did not use it
