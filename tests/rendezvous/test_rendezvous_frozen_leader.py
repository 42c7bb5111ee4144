"""A leader whose process stands still while its kernel answers: what its agents do, and what it does when it thaws."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from everstep.contract.document import JoinRequest, Member, Sizes
from everstep.membership.backends.operator_store import HttpStore
from everstep.membership.errors import StoreUnavailable
from support.rendezvous.agents import LIMIT, until
from support.rendezvous.operator_server import OperatorServer, Pod, Replica

LEASE_SECONDS = 6


def announced(store: HttpStore, pod: Pod, ttl: float) -> str:
    """The agent of this pod is present, and the operator has written that into the document."""
    agent = f"agent-{pod.index}"
    store.announce(agent, JoinRequest(Member(pod.index, agent), 0, Sizes(1, 3)).encode(), ttl)
    until(lambda: store.read().document)
    return agent


def two_replicas(operators: OperatorServer) -> tuple[Replica, Replica]:
    """The leader, which can be frozen, and a follower that has met it."""
    leader = operators.start(apart=True)
    until(lambda: operators.leads(leader))
    follower = operators.start()
    until(lambda: follower.operator.leader_probe._answered_address)
    return leader, follower


def freeze(leader: Replica) -> None:
    assert leader.apart is not None
    leader.apart.freeze()


def thaw(leader: Replica) -> None:
    assert leader.apart is not None
    leader.apart.thaw()


@contextmanager
def renewing(store: HttpStore, agent: str) -> Iterator[list[float]]:
    """The agent renews as a driver does; the seconds that each renewal took."""
    took: list[float] = []
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.2):
            began = time.monotonic()
            try:
                store.renew(agent)
            except StoreUnavailable:
                continue
            took.append(time.monotonic() - began)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join(LIMIT)


def watching(store: HttpStore, leader: Replica) -> threading.Thread:
    """A watch of the agent that waits at the leader."""

    def follow() -> None:
        with suppress(StoreUnavailable):  # it ends with its leader
            store._follow()

    thread = threading.Thread(target=follow)
    thread.start()
    until(lambda: leader.operator.rounds.watching == 1)
    return thread


def test_agents_of_a_frozen_leader_find_the_next_one_and_leave_no_call_behind(tmp_path: Path) -> None:
    """A watch would wait for 25 s at the frozen one. Each wait of a renewal would be 5 s."""
    operators = OperatorServer(tmp_path, lease_seconds=LEASE_SECONDS)
    try:
        leader, follower = two_replicas(operators)
        pod = operators.create_pod(operators.create_job(), 0)
        store = operators.store(pod, follower.url)  # it redirects to the leader
        agent = announced(store, pod, 60.0)
        assert store._calls._leader == leader.url
        seen = store.read()
        with renewing(store, agent):
            watch = watching(store, leader)
            freeze(leader)
            frozen = time.monotonic()
            until(lambda: operators.leads(follower))
            leads = time.monotonic()
            until(lambda: store._calls._leader == follower.url)
            moved = time.monotonic()
            watch.join(LIMIT)
        print(f"the next leads after {leads - frozen:.1f} s, agents found it {moved - leads:.1f} s later")
        assert store.watch(seen, 0.0) != seen, "the next leader has another count of expirations"
        thaw(leader)
        until(lambda: not operators.leads(leader))
        assert operators.leads(follower)
        assert store.read().document == seen.document
    finally:
        operators.stop()


def test_leader_that_is_slow_for_two_seconds_keeps_its_lease_its_agents_and_their_calls(tmp_path: Path) -> None:
    operators = OperatorServer(tmp_path, lease_seconds=LEASE_SECONDS)
    try:
        leader, follower = two_replicas(operators)
        pod = operators.create_pod(operators.create_job(), 0)
        store = operators.store(pod, follower.url)
        agent = announced(store, pod, 3.0)
        with renewing(store, agent) as took:
            before = store.read()
            watch = watching(store, leader)
            for _ in range(2):
                freeze(leader)
                time.sleep(1.7)
                thaw(leader)
                answered = len(took)
                until(lambda n=answered: len(took) > n + 2)
            assert max(took) > 1.0, "no renewal waited"
            assert operators.leads(leader)
            assert leader.operator.elector.require() == 1
            assert leader.operator.rounds.watching == 1, "its watch was given up"
            assert store._calls._leader == leader.url
            assert store.read() == before
        operators.end(leader)
        watch.join(LIMIT)
    finally:
        operators.stop()


def test_agents_of_a_leader_that_stood_still_for_a_lease_and_leads_again_are_present(tmp_path: Path) -> None:
    """None of them could renew. There is no other replica, so it goes on in a new term."""
    operators = OperatorServer(tmp_path, lease_seconds=LEASE_SECONDS)
    try:
        leader = operators.start(apart=True)
        until(lambda: operators.leads(leader))
        pod = operators.create_pod(operators.create_job(), 0)
        store = operators.store(pod, leader.url)
        agent = announced(store, pod, 3.0)
        freeze(leader)
        time.sleep(3.3)
        thaw(leader)

        def leads_again() -> bool:
            return operators.leads(leader) and leader.operator.elector.require() == 2

        until(leads_again)
        assert set(store.present()) == {agent}
        assert store.renew(agent)
    finally:
        operators.stop()
