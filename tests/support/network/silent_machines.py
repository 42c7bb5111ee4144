"""A node that falls silent with a worker and the operator's leader on it: machines of this kernel, a Service between.

Three agents, of which two go on; two replicas of the operator over one API server in memory, which both reach on a way
of its own. Each agent reaches the replicas at one address, by a rule that picks either for each connection, as
kube-proxy does. Nothing trains: what is measured is how long the two have no round.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from everstep.contract.document import Member, Sizes
from everstep.membership.backends.operator_calls import OperatorCalls
from everstep.membership.backends.operator_store import HttpStore
from everstep.membership.driver import Driver
from everstep.membership.joining import JoinSettings
from everstep.membership.peers.peer_monitor import PeerMonitor
from everstep.membership.proposals import Patience
from everstep.membership.world_state import Broken, Round
from support.network.netspaces import Machines
from support.rendezvous.agents import LIMIT, until
from support.rendezvous.operator_server import OperatorServer, Replica
from testcluster.proc import run

LOST = "lost"  # the machine that falls silent: the leader and agent 2 are on it
KEPT = ("spare", "left", "right")  # the other replica, and the other agents
SERVICE = "10.231.7.200"
PORT = 8080
ROUNDS = JoinSettings(patience=Patience(last_call=30.0))  # all else as it is by default


class SilentNode:
    """Use as a context manager; `cut` once."""

    def __init__(self, folder: Path, lease_seconds: int = 6, ttl: float = ROUNDS.ttl) -> None:
        """`lease_seconds`: of the operator's Lease; `ttl`: seconds of each agent's."""
        self._folder, self._lease_seconds = folder, lease_seconds
        self._settings = replace(ROUNDS, ttl=ttl)
        self.machines = Machines("hub", LOST, *KEPT)
        self.drivers: list[Driver] = []

    def __enter__(self) -> SilentNode:
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(self.machines)
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        with self.machines.inside("spare"):  # what the replicas' loop connects to, it does from there
            self.operators = OperatorServer(self._folder, lease_seconds=self._lease_seconds)
        stack.callback(self.operators.stop)
        self.leader = self._replica(LOST)
        until(lambda: self.operators.leads(self.leader))
        self.spare = self._replica("spare")
        self.job = self.operators.create_job()
        for index, name in enumerate((*KEPT[1:], LOST)):
            self._serve(name)
            with self.machines.inside(name) as address:
                pod = self.operators.create_pod(self.job, index, node=name)
                peers = PeerMonitor(f"agent-{index}", address)
                member = Member(index, f"agent-{index}", address=address, link_port=peers.port)
                store = HttpStore(OperatorCalls(f"http://{SERVICE}:{PORT}", str(pod.token_file)))
                self.drivers.append(Driver(store, member, Sizes(2, 3), self._settings, peers=peers))
                stack.callback(self.drivers[-1].stop)
        assert {formed.number for formed in self.join(self.drivers)} == {1}
        followers = [f for driver in self.drivers for f in driver._peers._followed.values()]  # type: ignore[union-attr]
        until(lambda: all(f._connected for f in followers))
        until(lambda: self.spare.operator.leader_probe._reached_address is not None)

    def cut(self) -> float:
        """Nothing comes from that machine any more, nor to it: neither the agents nor its API server. When."""
        at = time.monotonic()
        for name in KEPT:
            self.machines.drop(LOST, name)
            self.machines.drop(name, LOST)
        self.leader.faults.cut()
        return at

    def go_on(self, at: float) -> dict[str, float]:
        """Seconds until the others have heard that their round is over, and until both are in the next."""
        left = self.drivers[:2]
        heard = []
        for driver in left:
            world_state = driver.wait(LIMIT)
            assert isinstance(world_state, Broken), world_state
            heard.append(time.monotonic() - at)
        formed = self.join(left)
        assert [len(one.members) for one in formed] == [2, 2]
        return {"heard": max(heard), "formed": time.monotonic() - at}

    def join(self, drivers: list[Driver]) -> list[Round]:
        found: list[Round] = []
        threads = []
        for driver in drivers:
            with self.machines.inside(self._machine(driver)):
                thread = threading.Thread(target=lambda d=driver: found.append(d.join(LIMIT)))
                thread.start()
                threads.append(thread)
        for thread in threads:
            thread.join(2 * LIMIT)
        assert len(found) == len(drivers)
        return found

    def _machine(self, driver: Driver) -> str:
        return (*KEPT[1:], LOST)[self.drivers.index(driver)]

    def _replica(self, name: str) -> Replica:
        return self.operators.start(host=self.machines.addresses[name], inside=lambda: self.machines.inside(name))

    def _serve(self, name: str) -> None:
        """A Service of the two replicas, for who is on that machine."""
        ends = [f"{self.machines.addresses[machine]}:{replica.port}" for machine, replica in self._ends()]
        rule = ("-d", SERVICE, "-p", "tcp", "--dport", str(PORT))
        half = ("-m", "statistic", "--mode", "random", "--probability", "0.5")
        for end, chance in zip(ends, (half, ()), strict=True):
            self._netns(name, "iptables", "-w", "-t", "nat", "-A", "OUTPUT", *rule, *chance, "-j", "DNAT", "--to", end)

    def _ends(self) -> Iterator[tuple[str, Replica]]:
        yield LOST, self.leader
        yield "spare", self.spare

    def _netns(self, name: str, *argv: str) -> None:
        run("ip", "netns", "exec", self.machines.space(name), *argv)


@contextmanager
def in_turn(folder: Path, times: int) -> Iterator[Callable[[], dict[str, float]]]:
    """Gives a function that measures one such fault, each on machines of its own."""
    made = iter(range(times))

    def measure() -> dict[str, float]:
        with SilentNode(folder / str(next(made))) as node:
            return node.go_on(node.cut())

    yield measure
