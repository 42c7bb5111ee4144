"""Join requests that the operator writes for agents that ask: many in one swap, by the agents' own machine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from everstep.contract.document import Document, JoinRequest, Member, Sizes, decode, encode
from everstep.membership.commands import CloseJob, Join
from everstep.membership.machine import apply, join_all
from everstep_operator.rounds.agent_lookup import Agent
from everstep_operator.rounds.job_rounds import VersionedDocument
from everstep_operator.rounds.presence import Worker
from everstep_operator.rounds.registry import RoundRegistry
from everstep_operator.rounds.rules import urgency, with_join_requests
from everstep_operator.rounds.watches import Urgency
from support.clocks.virtual_time import in_virtual_time
from support.operator.round_stage import SIZES, A, B, Mortal, Stage, Term

LIMIT = 10.0


def join_request(member: Member, after: int = 0, sizes: Sizes = SIZES) -> JoinRequest:
    return JoinRequest(member, after, sizes)


def announce(rounds: RoundRegistry, agent: Agent, member: Member, after: int = 0, sizes: Sizes = SIZES) -> float:
    """Announce and ask, as an agent does."""
    rounds.of(agent.job).announce(agent.worker, member.agent, join_request(member, after, sizes).encode(), 30.0)
    return rounds.of(agent.job).request_write(member.agent)


async def staged(operators: int = 1, client: Any = None) -> tuple[Stage, list[RoundRegistry]]:
    stage = Stage()
    await stage.start()
    return stage, [stage.operator(client and client(stage)) for _ in range(operators)]


async def document(stage: Stage, round: int) -> Document:
    """What is kept, as soon as it has that round."""
    async with asyncio.timeout(LIMIT):
        while (found := await stage.stored()) is None or found.round < round:  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0.005)
    await stage.judge()
    return found


# --- how it is done


@in_virtual_time
async def test_agents_that_ask_find_themselves_in_a_round_that_none_of_them_wrote() -> None:
    stage, (rounds,) = await staged()
    for agent, member in zip(stage.agents, (A, B), strict=True):
        assert announce(rounds, agent, member) > 0
    assert (await document(stage, 1)).members == (A, B)


@in_virtual_time
async def test_newcomer_to_a_job_that_trains_is_written_before_it_would_do_so_itself() -> None:
    """It replaces a worker that was lost, and knows of no round."""
    stage, (rounds,) = await staged()
    for agent, member in zip(stage.agents, (A, B), strict=True):
        announce(rounds, agent, member)
    formed = await document(stage, 1)
    rounds.withdraw_pod(stage.job.uid, stage.agents[1].worker)
    newcomer = Member(1, "newcomer", incarnation=1)
    grace = announce(rounds, Agent(stage.job, Worker("uid-2", 1, 1)), newcomer)
    await asyncio.sleep(grace / 2)
    found = await stage.stored()
    assert found is not None
    assert newcomer in (*found.joining, *found.members)
    # What the members once asked for is no join request any more.
    assert with_join_requests(encode(formed).decode(), formed, {"a": join_request(A), "b": join_request(B)}) is None


@in_virtual_time
async def test_a_hundred_join_requests_cost_a_few_writes() -> None:
    stage, (rounds,) = await staged(client=lambda stage: Mortal(stage.client))
    sizes = Sizes(100, 100)
    for i in range(100):
        announce(rounds, Agent(stage.job, Worker(f"uid-{i}", i, 0)), Member(i, f"agent-{i:03}"), sizes=sizes)
        await asyncio.sleep(0.001)
    assert len((await document(stage, 1)).members) == 100
    client: Any = rounds._environment.documents._client
    writes = sum("configmaps" in what and not what.startswith("get") for what in client.requests)
    print(f"{writes} writes")
    assert writes <= 40  # one after the other they would be a hundred, and as many that came too late


@in_virtual_time
async def test_who_announces_without_asking_is_written_by_nobody() -> None:
    stage, (rounds,) = await staged()
    rounds.of(stage.job).announce(stage.agents[0].worker, "a", join_request(A).encode(), 30.0)
    await asyncio.sleep(0.1)  # five times as long as join requests are gathered
    assert await stage.stored() is None


@in_virtual_time
async def test_members_that_ask_again_meet_in_the_next_round_without_the_one_that_expired() -> None:
    stage, (rounds,) = await staged()
    for agent, member in zip(stage.agents, (A, B), strict=True):
        announce(rounds, agent, member)
    await document(stage, 1)
    rounds.of(stage.job).withdraw(stage.agents[1].worker, "b")
    announce(rounds, stage.agents[0], A, after=1)
    assert (await document(stage, 2)).members == (A,)


@in_virtual_time
async def test_closed_job_writes_nothing_more_and_says_so_at_once() -> None:
    stage, (rounds,) = await staged()
    announce(rounds, stage.agents[0], A)
    announce(rounds, stage.agents[1], B)
    formed = await document(stage, 1)
    sight = await rounds.of(stage.job).read(0)
    closed = apply(formed, CloseJob("a", "done"))
    assert isinstance(closed, Document)
    assert await rounds.of(stage.job).swap(sight.version, encode(closed))
    assert announce(rounds, stage.agents[0], A, after=1) == 0


@pytest.mark.parametrize("urgent", [False, True], ids=["one more waits", "one is gone"])
@in_virtual_time
async def test_who_watches_with_an_old_version_is_told_of_more_that_wait_when_all_are(urgent: bool) -> None:
    """In a crowd the document changes faster than an agent can ask again."""
    stage, (rounds,) = await staged()
    sizes, count = Sizes(3, 300), 250
    agents = [Agent(stage.job, Worker(f"uid-{i}", i, 0)) for i in range(count)]

    async def joins(i: int) -> VersionedDocument:
        before = await rounds.of(stage.job).read(0)
        old = Document(sizes) if before.document is None else decode(before.document.encode())
        after, _ = join_all(old, [Join(Member(i, f"a{i}"), sizes)])
        if i == 3:  # the round of three, that the others would be added to
            after = replace(after, round=1, members=after.joining, joining=())
        assert await rounds.of(stage.job).swap(before.version, encode(after)) is not None
        return await rounds.of(stage.job).read(0)

    for i in range(4):
        seen = await joins(i)
    watches = [
        asyncio.ensure_future(rounds.of(a.job).watch(a.worker, seen.version, seen.expirations, 30.0)) for a in agents
    ]
    await asyncio.sleep(0.1)
    first = await joins(5)
    assert {told.version for told in await asyncio.gather(*watches) if told} == {first.version}
    newest = await joins(6)
    began = asyncio.get_running_loop().time()
    again = asyncio.ensure_future(
        rounds.of(agents[0].job).watch(agents[0].worker, first.version, first.expirations, 30.0)
    )
    if urgent:
        document = decode(str(newest.document).encode())
        assert await rounds.of(agents[1].job).swap(newest.version, encode(replace(document, broken="a test says so")))
    told = await again
    assert told is not None
    assert told.version == (await rounds.of(agents[1].job).read(0)).version
    took = asyncio.get_running_loop().time() - began
    soon, later = (count * urgency.value for urgency in (Urgency.SOON, Urgency.LATER))
    assert took <= soon if urgent else soon < took <= later, "after the last time that all were told"


# --- what goes wrong


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@in_virtual_time
async def test_operator_that_dies_while_it_writes_join_requests_leaves_them_to_the_next(after: bool) -> None:
    for at in range(10):
        stage, (first, second) = await staged(2, lambda stage: Mortal(stage.client))
        first._environment.documents._client = client = Mortal(stage.client, at, after)  # type: ignore[assignment]
        for rounds in (first, second):
            for agent, member in zip(stage.agents, (A, B), strict=True):
                announce(rounds, agent, member)
            if rounds is first:
                async with asyncio.timeout(LIMIT):
                    while not client.dead and not stage.rounds:
                        await asyncio.sleep(0.005)
                        await stage.judge()
        await document(stage, 1)
        assert list(stage.rounds.values()) == [(A, B)], at
        if not client.dead:
            assert at > 2  # the whole of it was died through
            return
    raise AssertionError("it has more requests than were tried")


@in_virtual_time
async def test_two_operators_that_both_lead_form_one_round_of_one_join_request() -> None:
    stage, operators = await staged(3)
    for rounds in operators:
        for agent, member in zip(stage.agents, (A, B), strict=True):
            announce(rounds, agent, member)
    await document(stage, 1)
    await asyncio.sleep(0.2)
    await stage.judge()
    assert list(stage.rounds.values()) == [(A, B)]


@in_virtual_time
async def test_api_server_that_fails_for_a_moment_is_asked_again() -> None:
    stage, (rounds,) = await staged()
    rounds._environment.documents._client = client = Mortal(stage.client, 0)  # type: ignore[assignment]
    announce(rounds, stage.agents[0], A)
    announce(rounds, stage.agents[1], B)
    async with asyncio.timeout(LIMIT):
        while not client.dead:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.005)
    client.dead, client._at = False, None
    assert (await document(stage, 1)).members == (A, B)


@in_virtual_time
async def test_replica_that_leads_no_more_writes_nothing() -> None:
    stage, _ = await staged()
    rounds = stage.operator(term=(term := Term()))
    announce(rounds, stage.agents[0], A)
    term.leads = False
    rounds.forget_all()
    await asyncio.sleep(0.1)
    assert await stage.stored() is None


# --- what is written


def asked(*join_requests: JoinRequest) -> dict[str, JoinRequest]:
    return {join_request.member.agent: join_request for join_request in join_requests}


def written(before: Document | None, *join_requests: JoinRequest) -> Document | None:
    return with_join_requests(None if before is None else encode(before).decode(), before, asked(*join_requests))


def test_join_request_for_a_round_that_was_formed_meanwhile_is_not_written_again() -> None:
    formed = written(None, join_request(A), join_request(B))
    assert formed is not None
    assert formed.round == 1
    assert written(formed, join_request(A), join_request(B)) is None


def test_join_request_that_an_agent_made_anew_replaces_its_older_one() -> None:
    before = written(None, join_request(A, sizes=Sizes(2, 2)))
    assert before is not None
    assert written(before, join_request(A, sizes=Sizes(2, 2))) is None
    anew = written(before, join_request(replace(A, store_port=7), sizes=Sizes(2, 2)))
    assert anew is not None
    assert [member.store_port for member in anew.joining] == [7]


def test_agent_that_cannot_join_keeps_nobody_out() -> None:
    before, _ = join_all(Document(Sizes(2, 2)), [Join(B, Sizes(2, 2))])
    other = join_request(A, sizes=Sizes(9, 9))
    assert written(before, other, join_request(B, sizes=Sizes(2, 2))) is None
    after = written(before, other, join_request(B, sizes=Sizes(2, 2)), join_request(Member(2, "c"), sizes=Sizes(2, 2)))
    assert after is not None
    assert [member.agent for member in after.members] == ["b", "c"]


def test_nobody_is_taken_out_unless_somebody_joins() -> None:
    formed = written(None, join_request(A), join_request(B))
    assert formed is not None
    assert written(formed, join_request(A)) is None


def test_document_with_fields_of_a_newer_release_is_left_to_the_agents() -> None:
    before, _ = join_all(Document(SIZES), [Join(A, SIZES)])
    text = json.dumps({**json.loads(encode(before)), "newer": 1}, separators=(",", ":"))
    assert decode(text.encode()) == before
    assert with_join_requests(text, before, asked(join_request(A), join_request(B))) is None


# --- who needs to know


def test_only_the_first_member_that_asks_for_the_next_round_is_urgent_news() -> None:
    three = Sizes(3, 5)
    members = tuple(Member(i, name) for i, name in enumerate("abc"))
    gathering, _ = join_all(Document(three), [Join(members[0], three)])
    more, _ = join_all(gathering, [Join(members[1], three)])
    assert urgency(None, gathering) is Urgency.NOW
    assert urgency(gathering, more) is Urgency.LATER
    whole = Document(three, round=1, members=members, seats=more.seats)
    newcomer, _ = join_all(whole, [Join(Member(3, "d"), three)])
    assert urgency(more, whole) is Urgency.NOW
    assert urgency(whole, newcomer) is Urgency.LATER
    back, _ = join_all(newcomer, [Join(members[0], three)])
    assert urgency(newcomer, back) is Urgency.SOON
    both, _ = join_all(back, [Join(members[1], three)])
    assert urgency(back, both) is Urgency.LATER
    assert urgency(both, replace(both, broken="x")) is Urgency.SOON
    assert urgency(both, replace(both, closed="x")) is Urgency.NOW
