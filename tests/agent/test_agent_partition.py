"""Jobs on a network that loses packets between two of three machines, all of which reach the store (failure 60).

Real processes in network namespaces of this kernel, gloo between them, a real etcd. Nobody tells an end that its
packets are lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_job import HERE, Agent, Job
from etcd_server import EtcdCluster
from netspaces import Machines
from testcluster import programs

pytestmark = pytest.mark.timeout(300)
SESSION = HERE / "session_script.py"
NAMES = "abc"


@pytest.fixture(scope="session", autouse=True)
def _etcd_is_built() -> None:
    programs.etcd()


@pytest.fixture
def machines() -> Iterator[Machines]:
    with Machines("store", *NAMES) as made:
        yield made


@pytest.fixture
def spread(machines: Machines, tmp_path: Path) -> Iterator[Job]:
    """An agent on each of the three machines, and etcd on a fourth."""
    with machines.inside("store") as address:
        store = EtcdCluster(tmp_path / "etcd", 1, host=address)
        store.start()
    endpoint = store.urls[0].removeprefix("http://")
    argv = (str(SESSION), json.dumps({"out": str(tmp_path)}))
    try:
        with Job(tmp_path, endpoint, *argv, environ={"GLOO_SOCKET_IFNAME": ""}) as run:
            for name in NAMES:
                with machines.inside(name):
                    run.start()
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
    """How many steps in a row a process had to repeat; no step may be missing."""
    most = 0
    for pid in pids:
        done = [e["step"] for e in run.steps(pid)]
        assert done == list(range(done[0], done[0] + len(done))), "each step is made once"
        row = 0
        for event in run.events(pid):
            row = row + 1 if event["kind"] == "again" else 0
            most = max(most, row)
    return most


@pytest.mark.parametrize("lost", [["ab"], pytest.param(["ab", "ba"], marks=pytest.mark.long)], ids="-".join)
def test_of_two_that_do_not_reach_each_other_one_goes_and_comes_back_and_no_step_is_lost(
    lost: list[str], spread: Job, machines: Machines
) -> None:
    run = spread
    run.world(run.agents, 0)
    pids = {a.number: a.trainers() for a in run.agents}
    at = time.monotonic()
    for sender, receiver in lost:
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
