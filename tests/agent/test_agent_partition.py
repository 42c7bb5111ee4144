"""Jobs on a network that loses packets, of machines all of which reach the store (failures 60 and 61).

Real processes in network namespaces of this kernel, gloo between them, a real etcd. Nobody tells an end that its
packets are lost.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent.agent_job import EXPIRING, HERE, Agent, Job
from support.network.netspaces import Machines
from support.network.slow_network import SlowNetwork
from support.rendezvous.etcd_server import EtcdCluster

pytestmark = pytest.mark.timeout(420)
SESSION = HERE / "session_script.py"
NAMES = "abc"
STEPS = 3


@pytest.fixture
def machines(etcd_program: Path) -> Iterator[Machines]:
    del etcd_program  # built before the first test
    with Machines("store", *NAMES) as made:
        yield made


@contextlib.contextmanager
def spread(machines: Machines, folder: Path, addresses: dict[str, str] | None = None) -> Iterator[Job]:
    """An agent on each of the three machines, known to the others by these addresses, and etcd on a fourth."""
    with machines.inside("store") as address:
        store = EtcdCluster(folder / "etcd", 1, host=address)
        store.start()
    endpoint = store.urls[0].removeprefix("http://")
    argv = (str(SESSION), json.dumps({"out": str(folder)}))
    try:
        # Cold: who forks warm processes is in the network of the tests.
        with Job(folder, endpoint, *argv, environ={"GLOO_SOCKET_IFNAME": ""}, cold=True) as run:
            for name in NAMES:
                with machines.inside(name):
                    run.start(conf=EXPIRING, flags=[f"--local-addr={addresses[name]}"] if addresses else ())
            yield run
        run.until(lambda: not run.left_behind(), "processes were left behind", 10)
    finally:
        store.stop()


def others_of(run: Job, at: float) -> tuple[list[Agent], list[Agent]]:
    """Wait until two train without the third; they, and it."""

    def found() -> list[Agent]:
        two = [a for a in run.agents if run.trains(a.trainers(), at, 2)]
        return two if len(two) == 2 else []

    two = run.until(found, "no two go on")
    return two, [a for a in run.agents if a not in two]


def resumed(run: Job, two: list[Agent], at: float) -> float:
    """Seconds until both of them trained together again."""
    return max(run.trains(a.trainers(), at, 2)[0]["at"] for a in two) - at


def most_repeated(run: Job, pids: list[int]) -> int:
    """How many steps in a row a process had to repeat. Each step is made once; of one whose update was made when the
    network broke, the last lines may be lost."""
    most = 0
    for pid in pids:
        done = [e["step"] for e in run.steps(pid)]
        assert done == sorted(set(done)), "a step was made twice"
        assert done[-1] - done[0] + 1 - len(done) <= 2, "more was lost than the last lines of a step"
        row = 0
        for event in run.events(pid):
            row = row + 1 if event["kind"] == "again" else 0
            most = max(most, row)
    return most


@pytest.mark.long
@pytest.mark.parametrize("lost", [["ab"], ["ab", "ba"]], ids="-".join)
def test_of_two_that_do_not_reach_each_other_one_goes_and_comes_back_and_no_step_is_lost(
    lost: list[str], machines: Machines, tmp_path: Path
) -> None:
    with spread(machines, tmp_path) as run:
        _goes_and_comes_back(lost, run, machines)


def _goes_and_comes_back(lost: list[str], run: Job, machines: Machines) -> None:
    run.world(run.agents, 0)
    pids = {a.number: a.trainers() for a in run.agents}
    at = time.monotonic()
    for sender, receiver in lost:  # type: ignore[str-unpack]
        machines.drop(sender, receiver)
    two, (third,) = others_of(run, at)
    print(f"two go on after {resumed(run, two, at):.2f} s, without agent {third.number}")
    assert run.agents[2] in two, "who reaches both stays"
    assert resumed(run, two, at) < 20  # 3.5 on a machine that does nothing else
    machines.heal()
    healed = time.monotonic()
    back = max(e["at"] for e in run.world(run.agents, healed))
    print(f"three again {back - healed:.2f} s after the network was whole")
    assert {a.number: a.trainers() for a in run.agents} == pids, "all keep their processes"
    assert most_repeated(run, [pid for agent in two for pid in pids[agent.number]]) <= 1
    assert run.differing() == {}


@pytest.mark.long
def test_a_job_on_a_bad_network_is_slower_and_loses_nobody(machines: Machines, tmp_path: Path) -> None:
    """Of what one of three machines sends, three of ten packets are lost, and the others take half a second."""
    with (
        SlowNetwork(machines, NAMES, bad="a", delay=0.5, loss=0.3) as slow,
        spread(machines, tmp_path, slow.addresses) as run,
    ):
        began = time.monotonic()
        run.until(lambda: run.trains(run.agents[0].trainers(), 0, 3, STEPS), f"not {STEPS} steps", 300)
        print(f"{STEPS} steps within {time.monotonic() - began:.0f} s of the start")
        for agent in run.agents:
            log = agent.log.read_text()
            assert "round 1:" in log
            assert "round 2:" not in log
            assert "does not answer" not in log
    assert run.differing() == {}
