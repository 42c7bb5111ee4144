"""A node that is lost with a worker and the operator's leader on it: machines of this kernel, a Service between.

It falls silent, or it is frozen: then its kernel accepts and acknowledges, and no process of it runs.

Three agents, of which two go on; two replicas of the operator over one API server in memory, which both reach on a way
of its own. Each agent reaches the replicas at one address, by a rule that picks either for each connection, as
kube-proxy does. Nothing trains: what is measured is how long the two have no round.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from everstep.contract.document import Document
from everstep.membership.driver import Driver
from everstep.membership.joining import JoinSettings
from everstep.membership.world_state import Broken, Round
from support.network.agent_process import agent, is_connected, rounds
from support.network.netspaces import Machines
from support.rendezvous.agents import LIMIT, until
from support.rendezvous.operator_server import OperatorServer, Replica
from testcluster.proc import run

LOST = "lost"  # the machine that falls silent: the leader and agent 2 are on it
KEPT = ("spare", "left", "right")  # the other replica, and the other agents
SERVICE = "10.231.7.200"
PORT = 8080
AGENT = Path(__file__).with_name("agent_process.py")


class LostNode:
    """Use as a context manager; `cut` or `freeze` once."""

    def __init__(self, folder: Path, lease_seconds: int = 6, ttl: float = JoinSettings().ttl) -> None:
        """`lease_seconds`: of the operator's Lease; `ttl`: seconds of each agent's."""
        self._folder, self._lease_seconds = folder, lease_seconds
        self._settings = rounds(ttl)
        self.machines = Machines("hub", LOST, *KEPT)
        self.drivers: list[Driver] = []

    def __enter__(self) -> LostNode:
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
        self.leader = self._replica(LOST, apart=True)
        until(lambda: self.operators.leads(self.leader))
        self.spare = self._replica("spare")
        self.job = self.operators.create_job()
        url = f"http://{SERVICE}:{PORT}"
        for index, name in enumerate((*KEPT[1:], LOST)):
            self._serve(name)
            pod = self.operators.create_pod(self.job, index, node=name)
            with self.machines.inside(name) as address:
                if name == LOST:
                    argv = [str(index), address, url, str(pod.token_file), str(self._settings.ttl)]
                    self._third = subprocess.Popen(
                        [sys.executable, str(AGENT), *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                    )
                    stack.callback(self._end_third)
                else:
                    self.drivers.append(agent(index, address, url, str(pod.token_file), self._settings))
                    stack.callback(self.drivers[-1].stop)
        assert {formed.number for formed in self.join(self.drivers)} == {1}
        until(lambda: all(map(is_connected, self.drivers)))
        assert self._third.stdout is not None
        assert self._third.stdout.readline(), "the third agent is in no round"
        until(lambda: self.spare.operator.leader_probe._reached_address is not None)

    def freeze(self) -> float:
        """No process of that machine runs any more, and its kernel answers. When."""
        at = time.monotonic()
        self._third.send_signal(signal.SIGSTOP)
        assert self.leader.apart is not None
        self.leader.apart.freeze()
        return at

    def thaw(self) -> None:
        assert self.leader.apart is not None
        self.leader.apart.thaw()
        self._third.send_signal(signal.SIGCONT)

    def cut(self) -> float:
        """Nothing comes from that machine any more, nor to it: neither the agents nor its API server. When."""
        at = time.monotonic()
        for name in KEPT:
            self.machines.drop(LOST, name)
            self.machines.drop(name, LOST)
        self.leader.faults.cut()
        return at

    def document(self) -> Document:
        """As a survivor reads it, from its machine."""
        with self.machines.inside(KEPT[1]):
            document = self.drivers[0].document()
        assert document is not None
        return document

    def go_on(self, at: float) -> dict[str, float]:
        """Seconds until the others have heard that their round is over, and until both are in the next."""
        left = self.drivers
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
        return KEPT[1:][self.drivers.index(driver)]

    def _replica(self, name: str, *, apart: bool = False) -> Replica:
        inside = partial(self.machines.inside, name)
        return self.operators.start(host=self.machines.addresses[name], inside=inside, apart=apart)

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

    def _end_third(self) -> None:
        self._third.kill()
        self._third.communicate()

    def _netns(self, name: str, *argv: str) -> None:
        run("ip", "netns", "exec", self.machines.space(name), *argv)


@contextmanager
def in_turn(folder: Path, times: int, lose: Callable[[LostNode], float]) -> Iterator[Callable[[], dict[str, float]]]:
    """Gives a function that measures one such fault, each on machines of its own. `lose`: `LostNode.cut` or
    `LostNode.freeze`."""
    made = iter(range(times))

    def measure() -> dict[str, float]:
        with LostNode(folder / str(next(made))) as node:
            return node.go_on(lose(node))

    yield measure
