"""A leader whose process stands still while its kernel answers: what its agents do, and what it does when it thaws."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from everstep.contract.document import JoinRequest, Member, Sizes
from everstep.membership.backends.operator_store import HttpStore
from everstep.membership.errors import StoreUnavailable
from support.network.ports import Ports
from support.operator.authorities import Authority, put
from support.rendezvous.agents import LIMIT, until
from support.rendezvous.operator_server import OperatorServer, Pod, Replica

LEASE_SECONDS = 6


def request_of(index: int) -> bytes:
    return JoinRequest(Member(index, f"agent-{index}"), 0, Sizes(1, 3)).encode()


def announced(store: HttpStore, pod: Pod, ttl: float) -> str:
    """The agent of this pod is present, and the operator has written that into the document."""
    agent = f"agent-{pod.index}"
    store.announce(agent, request_of(pod.index), ttl)
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
def renewing(store: HttpStore, agent: str, ttl: float = 60.0) -> Iterator[list[float]]:
    """The agent renews as a driver does; the seconds that each renewal took."""
    took: list[float] = []
    over = threading.Event()
    request = request_of(int(agent.partition("-")[2]))

    def renew() -> None:
        while not over.wait(0.2):
            began = time.monotonic()
            try:
                if not store.renew(agent):  # the next leader does not know it yet
                    store.announce(agent, request, ttl)
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


class Service:
    """An address of two replicas: its first connections lead to `first`, as many as it is told, and all others to
    `other`."""

    def __init__(self, first: tuple[str, int], other: tuple[str, int]) -> None:
        self._first, self._other, self.left = first, other, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):  # until it is closed
            while True:
                caller, _ = self._socket.accept()
                self.left, target = self.left - 1, self._first if self.left > 0 else self._other
                replica = socket.create_connection(target)
                for ends in ((caller, replica), (replica, caller)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_healthy_agent_whose_looks_reach_the_frozen_replica_twice_is_not_missed(tmp_path: Path, tls: bool) -> None:
    authority, ports = Authority(), Ports()
    secret, port = put(tmp_path / "secret", ca_crt=authority.pem, ca_key=authority.key_pem), ports.take()
    settings = {"EVERSTEP_TLS_DIR": str(secret), "EVERSTEP_TLS_PORT": str(port)} if tls else {}
    operators = OperatorServer(tmp_path, lease_seconds=LEASE_SECONDS)
    try:
        leader = operators.start(host="127.0.0.2", apart=True, tls=settings)
        until(lambda: operators.leads(leader))
        follower = operators.start(host="127.0.0.1", tls=settings)
        until(lambda: follower.operator.leader_probe._answered_address)
        service = Service(*((each.host, port if tls else each.port) for each in (leader, follower)))
        job = operators.create_job()
        pod, ca = operators.create_pod(job, 0), authority.pem.decode() if tls else ""
        at = f"{'https' if tls else 'http'}://localhost"
        store = operators.store(pod, f"{at}:{service.port}", ca=ca)
        reader = operators.store(operators.create_pod(job, 1), f"{at}:{port if tls else follower.port}", ca=ca)
        agent = announced(store, pod, 3.0)
        with renewing(store, agent, 3.0):
            pools = store._calls._own_pool().pools  # as after a while: the operator has closed what was idle
            for key in [each for each in pools.keys() if pools[each].port == service.port]:  # noqa: SIM118
                del pools[key]
            service.left = 2
            freeze(leader)
            until(lambda: operators.leads(follower))
            leads = time.monotonic()
            while time.monotonic() < leads + LEASE_SECONDS:
                assert set(reader.present()) == {agent}, f"missed {time.monotonic() - leads:.1f} s later"
                time.sleep(0.05)
        thaw(leader)
        service.close()
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
