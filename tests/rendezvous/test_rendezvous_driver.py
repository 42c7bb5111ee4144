"""Agents that join, lose each other, come back and leave: threads over the memory store, the operator's, and real etcd.

The same tests over all stores are what makes their semantics one.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, pairwise
from random import Random

import pytest

from everstep.contract.document import Document, Member, Sizes, decode, decode_join_request
from everstep.membership.backends.etcd import EtcdStore
from everstep.membership.backends.etcd_http import Gateway
from everstep.membership.backends.memory import MemoryStore
from everstep.membership.commands import Charge, CloseJob, SetBoundary
from everstep.membership.driver import Driver
from everstep.membership.errors import JoinRefused, JoinTimedOut, RendezvousClosed, StoreUnavailable
from everstep.membership.joining import LONGEST_WAIT
from everstep.membership.machine import Rejected
from everstep.membership.store import Backoff, RoundStore, View
from everstep.membership.world_state import Broken, Closed, Growing, Round, Whole
from support.rendezvous.agents import EXPIRING, LIMIT, QUICK, crew, until
from support.rendezvous.etcd_server import EtcdCluster
from support.rendezvous.operator_server import OperatorServer

MakeStore = Callable[[], RoundStore]


@pytest.fixture(params=["memory", "operator", "etcd"])
def store(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    """Makes one more client of one job's store."""
    if request.param == "memory":
        shared = MemoryStore()
        yield lambda: shared
        return
    if request.param == "operator":
        server: OperatorServer = request.getfixturevalue("operator")
        job_object, pods = server.create_job(f"job-{uuid.uuid4().hex}"), count()
        yield lambda: server.store(server.create_pod(job_object, next(pods)))
        return
    cluster: EtcdCluster = request.getfixturevalue("etcd")
    job = f"job/{uuid.uuid4().hex}"
    made: list[EtcdStore] = []

    def make() -> EtcdStore:
        made.append(EtcdStore(Gateway(cluster.urls), job))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ranks(rounds: dict[str, Round]) -> str:
    """The names in rank order; all must hold the same round."""
    assert len({(r.number, r.members) for r in rounds.values()}) == 1
    found = next(iter(rounds.values()))
    assert all(found.members[r.rank].agent == name for name, r in rounds.items())
    return "".join(m.agent for m in found.members)


def test_agents_that_start_together_form_one_round(store: MakeStore) -> None:
    with crew(store, Sizes(2, 3)) as job:
        rounds = job.start("abc")
        assert sorted(ranks(rounds)) == ["a", "b", "c"]
        assert {r.number for r in rounds.values()} == {1}
        assert {d.world_state() for d in job.drivers.values()} == {Whole()}


def test_an_agent_that_leaves_is_missed_at_once_and_the_others_go_on(store: MakeStore) -> None:
    with crew(store, Sizes(2, 3)) as job:
        before = ranks(job.start("abc"))
        job.drivers[before[1]].leave()
        began = time.monotonic()
        rest = before.replace(before[1], "")
        for name in rest:
            assert isinstance(job.drivers[name].wait(LIMIT), Broken)
        assert ranks(job.join(rest)) == rest
        assert time.monotonic() - began < QUICK.patience.rejoin, "nobody waited for it"


def test_survivors_wait_for_a_replacement(store: MakeStore) -> None:
    patience = replace(QUICK.patience, shrink_after=LIMIT)
    with crew(store, Sizes(1, 3), replace(QUICK, patience=patience)) as job:
        before = ranks(job.start("abc"))
        job.drivers["c"].leave()
        survivors = job.joining("ab")
        until(lambda: len(job.drivers["a"].document().joining) == 2)  # type: ignore[union-attr]
        job.add("d")
        rounds = {**job.join("d"), **{name: future.result(LIMIT) for name, future in survivors.items()}}
        assert sorted(ranks(rounds)) == ["a", "b", "d"]
        assert {r.number for r in rounds.values()} == {2}, "nobody trained with two"
        assert ranks(rounds).replace("d", "") == before.replace("c", "")


@pytest.mark.long_but("operator")
def test_survivors_wait_for_a_replacement_for_as_long_as_they_are_told(store: MakeStore) -> None:
    wait = 1.0
    patience = replace(QUICK.patience, shrink_after=wait)
    with crew(store, Sizes(1, 3), replace(QUICK, patience=patience)) as job:
        job.start("abc")
        job.drivers["c"].leave()
        began = time.monotonic()
        assert sorted(ranks(job.join("ab"))) == ["a", "b"]
        assert wait <= time.monotonic() - began < LONGEST_WAIT, "and no longer: not until they look at everything again"


@pytest.mark.long_but("operator")
def test_an_agent_that_falls_silent_is_taken_out_when_its_lease_expires(store: MakeStore) -> None:
    with crew(store, Sizes(2, 3), EXPIRING) as job:
        before = ranks(job.start("abc"))
        job.drivers[before[0]].stop()  # without a word, as a crash
        rest = before[1:]
        for name in rest:
            assert "expired" in getattr(job.drivers[name].wait(LIMIT), "why", "")
        assert ranks(job.join(rest)) == rest


@pytest.mark.long_but("etcd")
def test_a_newcomer_is_announced_and_taken_in_when_the_members_come_back(store: MakeStore) -> None:
    with crew(store, Sizes(2, 3)) as job:
        before = ranks(job.start("ab"))
        job.add("c")
        waiting = job.joining("c")["c"]
        assert job.drivers["a"].wait(LIMIT) == Growing(1, None)
        assert isinstance(job.drivers["b"].wait(LIMIT), Growing)
        assert not waiting.done()
        rounds = job.join("ab")
        assert ranks({**rounds, "c": waiting.result(LIMIT)}) == before + "c"


@pytest.mark.long_but("operator")
def test_a_step_to_let_joiners_in_is_agreed_once(store: MakeStore) -> None:
    with crew(store, Sizes(2, 3)) as job:
        job.start("ab")
        job.add("c")
        job.joining("c")
        job.drivers["a"].wait(LIMIT)
        assert not isinstance(job.drivers["a"].change(SetBoundary("a", 1, 40)), Rejected)
        assert isinstance(job.drivers["b"].change(SetBoundary("b", 1, 41)), Rejected)
        until(lambda: job.drivers["b"].world_state() == Growing(1, 40))
        job.drivers["c"].leave()  # it still waits


def test_a_member_that_was_taken_out_while_it_lived_learns_it_and_can_come_back(store: MakeStore) -> None:
    with crew(store, Sizes(2, 3)) as job:
        job.start("abc")
        job.drivers["a"].evict("c", "a test says so")
        until(lambda: isinstance(job.drivers["c"].world_state(), Broken))
        assert isinstance(job.drivers["c"].evict("a", "revenge"), Rejected)
        # Before the others, who would not wait for it.
        back = job.joining("c")["c"]
        until(lambda: job.drivers["a"].document().joining)  # type: ignore[union-attr]
        assert sorted(ranks({**job.join("ab"), "c": back.result(LIMIT)})) == ["a", "b", "c"]


@pytest.mark.long_but("etcd")
def test_a_closed_job_takes_nobody(store: MakeStore) -> None:
    with crew(store, Sizes(2, 3)) as job:
        job.start("ab")
        job.drivers["a"].change(CloseJob("a", "done"))
        until(lambda: job.drivers["b"].world_state() == Closed("done"))
        job.add("c")
        with pytest.raises(RendezvousClosed, match="done"):
            job.join("c")


@pytest.mark.long_but("memory")
def test_a_join_that_cannot_succeed_says_what_it_waited_for(store: MakeStore) -> None:
    with crew(store, Sizes(3, 3)) as job:
        for name in "ab":
            job.add(name)
        for future in job.joining("ab", timeout=1.5).values():
            with pytest.raises(JoinTimedOut, match=r"agents wait|has not answered"):
                future.result(LIMIT)


@pytest.mark.long_but("etcd")
def test_agents_with_different_sizes_are_told_both(store: MakeStore) -> None:
    with crew(store, Sizes(2, 3)) as job:
        job.start("ab")
        stranger = Driver(store(), Member(-1, "s"), Sizes(4, 4), QUICK)
        with pytest.raises(JoinRefused, match=r"4:4.*2:3"):
            stranger.join(LIMIT)
        stranger.stop()


@pytest.mark.long
def test_a_job_whose_agents_all_died_is_taken_up_by_new_ones(store: MakeStore) -> None:
    with crew(store, Sizes(2, 2), EXPIRING) as job:
        job.start("ab")
        for name in "ab":
            job.drivers[name].stop()
        assert {r.number for r in job.start("cd").values()} == {2}


def test_an_agent_that_has_left_does_not_warn_of_the_store_that_it_has_closed(
    store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    with crew(store, Sizes(2, 2)) as job:
        job.start("ab")
        job.drivers["a"].leave()
        caplog.clear()
        job.drivers["a"].unreached("b")  # as its peer monitor does, when the other one goes too
        assert [
            r.getMessage() for r in caplog.records if "could not tell" in r.getMessage() and r.levelname != "DEBUG"
        ] == []


# --- connections between agents


def test_an_agent_that_dies_is_known_by_its_connection_before_its_lease_expires(store: MakeStore) -> None:
    with crew(store, Sizes(2, 4)) as job:
        before = ranks(job.start("abcd", linked=True))
        began = time.monotonic()
        job.drivers[before[0]].stop()
        for name in before[1:]:
            assert isinstance(job.drivers[name].wait(LIMIT), Broken)
        assert time.monotonic() - began < 5  # a quarter of the lease, on a machine that does much else
        assert ranks(job.join(before[1:])) == before[1:]


def test_a_connection_that_breaks_between_living_agents_breaks_no_round() -> None:
    shared = MemoryStore()
    with crew(lambda: shared, Sizes(2, 2)) as job:
        job.start("ab", linked=True)
        for peers in job.monitors.values():
            for follower in peers._followed.values():
                sock = until(lambda follower=follower: follower._sock)  # type: ignore[misc]
                sock.shutdown(2)
        assert job.drivers["a"].wait(0.5) == Whole()


# --- a store that fails


class Away:
    """A store that can be away, and whose answers to writes can get lost."""

    def __init__(self, inner: MemoryStore) -> None:
        self._inner = inner
        self.away = threading.Event()
        self.refused = Counter[str]()
        self.lose = 0

    def __getattr__(self, name: str) -> object:
        method = getattr(self._inner, name)

        def call(*arguments: object) -> object:
            if self.away.is_set() and name != "close":
                self.away.wait(0.01)
                self.refused[name] += 1
                raise StoreUnavailable("away, by a test")
            result = method(*arguments)
            if name == "compare_and_swap" and self.lose > 0:
                self.lose -= 1
                raise StoreUnavailable("the answer is lost, by a test")
            return result

        return call


def test_a_store_that_is_away_changes_nothing_for_a_formed_round() -> None:
    inner = MemoryStore()
    away = Away(inner)
    with crew(lambda: away, Sizes(2, 2)) as job:  # type: ignore[arg-type, return-value]
        job.start("ab")
        away.away.set()
        assert job.drivers["a"].wait(1.0) == Whole()
        futures = job.joining("ab")
        away.away.clear()
        assert {f.result(LIMIT).number for f in futures.values()} == {2}


def test_a_death_that_could_not_be_told_is_told_when_the_store_is_back() -> None:
    away = Away(MemoryStore())
    with crew(lambda: away, Sizes(2, 3)) as job:  # type: ignore[arg-type, return-value]
        before = ranks(job.start("abc", linked=True))
        gone, *left = (job.drivers[name] for name in before)
        away.away.set()
        tries = away.refused["read"]
        gone.stop()
        until(lambda: away.refused["read"] >= tries + 2)  # by one of both survivors
        assert all(driver.world_state() == Whole() for driver in left)
        away.away.clear()
        for driver in left:
            world_state = driver.wait(QUICK.ttl / 2)  # not by its lease
            assert isinstance(world_state, Broken)
            assert f"{gone.agent} is gone" in world_state.why
        assert ranks(job.join(before[1:])) == before[1:]


def test_a_charge_whose_answer_was_lost_is_counted_once_and_said_so() -> None:
    away = Away(MemoryStore())
    with crew(lambda: away, Sizes(2, 2)) as job:  # type: ignore[arg-type, return-value]
        job.start("ab")
        away.lose = 1
        with pytest.raises(StoreUnavailable):
            job.drivers["a"].change(Charge("a", 1, "exit code 1"))
        found = job.drivers["a"].change(Charge("a", 1, "exit code 1"))
        assert isinstance(found, Document)
        assert found.restarts == 1
        assert isinstance(job.drivers["b"].change(Charge("b", 1, "lost a peer")), Rejected)


class Held(MemoryStore):
    """A store whose reads wait while it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()
        self.waiting, self.renewed = Counter[str](), Counter[str]()

    def read(self) -> View:
        if not self.free.is_set():
            self.waiting[threading.current_thread().name] += 1
            assert self.free.wait(2 * LIMIT)
        return super().read()

    def renew(self, agent: str) -> bool:
        still = super().renew(agent)
        self.renewed[agent] += still
        return still


@pytest.mark.long
def test_members_stay_present_while_a_slow_store_is_asked_who_is_gone() -> None:
    """One expiration, of whoever it is, has all members read; none of them may expire by that."""
    store = Held()
    with crew(lambda: store, Sizes(2, 3), replace(QUICK, ttl=6.0)) as job:
        job.start("abc")
        store.free.clear()
        store.announce("ghost", b"{}", QUICK.ttl)
        store.withdraw("ghost")
        try:
            until(lambda: store.waiting.total() >= 3)
            before = store.renewed.copy()
            until(lambda: all(store.renewed[name] >= before[name] + 2 for name in "abc"))
        finally:
            store.free.set()


class Deaf(MemoryStore):
    """A store that tells of expirations, and does not answer who asks on."""

    def __init__(self) -> None:
        super().__init__()
        self.deaf = threading.Event()
        self.asked: list[float] = []

    def read(self) -> View:
        if self.deaf.is_set():
            self.asked.append(time.monotonic())
            raise StoreUnavailable("no replica leads, by a test")
        return super().read()


@pytest.mark.long
def test_lapse_that_cannot_be_looked_into_is_asked_about_ever_less_often() -> None:
    """A thousand agents that ask every few milliseconds keep an operator from ever leading."""
    store = Deaf()
    with crew(lambda: store, Sizes(1, 1)) as job:
        job.start("a")
        store.deaf.set()
        store.announce("ghost", b"{}", QUICK.ttl)
        store.withdraw("ghost")
        until(lambda: len(store.asked) >= 10)
        pauses = [after - before for before, after in pairwise(store.asked)]
        assert min(pauses[7:]) >= QUICK.backoff.most / 4, pauses
        store.deaf.clear()
        until(lambda: job.drivers["a"]._expirations == store.read().expirations)


class Overtaking(MemoryStore):
    """A store that an old join request, announced again, reaches after a newer one, if its agent lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.newer = threading.Event(), threading.Event()
        self.asked = Counter[bool]()

    def announce(self, agent: str, value: bytes, ttl: float) -> float:
        is_newer, is_again = decode_join_request(value).after > 0, self.again.is_set()
        if is_again and not is_newer:
            self.newer.wait(1.0)
        grace = super().announce(agent, value, ttl)
        if is_newer:
            self.newer.set()
        self.asked[is_again] += 1
        return grace

    def renew(self, agent: str) -> bool:
        if self.again.is_set():
            return super().renew(agent)
        self.again.set()
        return False


@pytest.mark.long
def test_join_request_that_is_announced_again_does_not_replace_a_newer_one() -> None:
    store = Overtaking()
    with crew(lambda: store, Sizes(1, 1), EXPIRING) as job:
        job.start("a")
        assert store.again.wait(LIMIT)
        assert job.join("a")["a"].number == 2
        until(lambda: store.asked[True] == 2)  # by the join, and to be present again
        assert decode_join_request(store.present()["a"]).after == 1


def test_lost_answers_form_the_round_once() -> None:
    inner = MemoryStore()
    stores = []

    def make() -> Away:
        stores.append(Away(inner))
        stores[-1].lose = 2
        return stores[-1]

    with crew(make, Sizes(3, 3)) as job:  # type: ignore[arg-type]
        assert {r.number for r in job.start("abc").values()} == {1}


def test_a_document_that_is_garbage_is_an_error_and_not_a_guess() -> None:
    shared = MemoryStore()
    shared.compare_and_swap(0, b"garbage")
    with crew(lambda: shared, Sizes(1, 1)) as job:
        job.add("a")
        with pytest.raises(Exception, match="not JSON"):
            job.join("a")


# --- many (failure 67)


@pytest.mark.long
def test_two_hundred_agents_at_once_form_one_round_with_few_writes() -> None:
    shared = MemoryStore()
    many = 200
    drivers = [Driver(shared, Member(-1, f"a{i:03}"), Sizes(many, many), random=Random(i)) for i in range(many)]
    found: list[Round] = []
    threads = [threading.Thread(target=lambda d=d: found.append(d.join(60))) for d in drivers]  # type: ignore[misc]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    print(f"formed after {time.monotonic() - began:.1f} s")
    for driver in drivers:
        driver.stop()
    assert {(r.number, r.world_size) for r in found} == {(1, many)}
    assert sorted(r.rank for r in found) == list(range(many))
    view = shared.read()
    assert view.document is not None
    assert len(decode(view.document).members) == many
    assert view.version < many / 2


def test_backoff_is_jittered_and_bounded() -> None:
    random, backoff = Random(1), Backoff()
    waits = [backoff.seconds(attempt, random) for attempt in range(1, 200)]
    assert len(set(waits)) == len(waits)
    assert max(waits) <= backoff.most
    assert min(waits[10:]) >= backoff.most / 4


def test_memory_watch_returns_when_the_document_changes() -> None:
    shared = MemoryStore()
    seen: list[View] = []
    thread = threading.Thread(target=lambda: seen.append(shared.watch(View(None, 0), LIMIT)))
    thread.start()
    shared.compare_and_swap(0, b"x")
    thread.join(LIMIT)
    assert seen == [View(b"x", 1)]
