"""Stock torchrun with `everstep` and `etcd-v3`: real agents and processes, over gloo (failures 43, 44, 66)."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from everstep.contract import env
from everstep.contract.document import FINISHED, decode
from everstep.contract.messages import REPORT_PATH
from everstep_operator.kube.wire import Unstructured
from support.rendezvous.agents import until
from support.rendezvous.etcd_server import EtcdCluster
from support.rendezvous.operator_server import OperatorServer
from support.rendezvous.torchrun_job import TorchrunJob, children

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def job(etcd: EtcdCluster, tmp_path: Path) -> Iterator[Callable[..., TorchrunJob]]:
    made: list[TorchrunJob] = []

    def make(*flags: str, nodes: str = "2:3") -> TorchrunJob:
        endpoint = etcd.urls[0].removeprefix("http://")
        made.append(TorchrunJob(tmp_path, endpoint, uuid.uuid4().hex, *flags, nodes=nodes))
        return made[-1]

    yield make
    for one in made:
        one.clean_up()


@pytest.fixture
def operated(operator: OperatorServer, tmp_path: Path) -> Iterator[Callable[..., TorchrunJob]]:
    """Agents in pods of a TrainingJob: where the operator is, and which token to show it, is in their environment."""
    made: list[TorchrunJob] = []

    def make(*flags: str, nodes: str = "2:3", owner: Unstructured | None = None) -> TorchrunJob:
        owner = owner or operator.create_job(f"job-{uuid.uuid4().hex}")

        def variables(number: int) -> dict[str, str]:
            pod = operator.create_pod(owner, number)
            return {
                env.JOB_UID: owner.metadata.uid,
                env.REPORT_URL: operator.replicas[0].url + REPORT_PATH,
                env.TOKEN_FILE: str(pod.token_file),
                env.WORKER_INDEX: str(pod.index),
                env.INCARNATION: "0",
            }

        job = TorchrunJob(
            tmp_path, "", owner.metadata.uid, *flags, nodes=nodes, backend="everstep", variables=variables
        )
        made.append(job)
        return made[-1]

    yield make
    for one in made:
        one.clean_up()


def test_the_handler_is_registered_where_torchrun_looks() -> None:
    found = {point.name: point.value for point in entry_points(group="torchrun.handlers")}
    wanted = {
        "etcd-v3": "everstep.membership.torchrun.entry_points:etcd_v3",
        "everstep": "everstep.membership.torchrun.entry_points:everstep",
    }
    assert wanted.items() <= found.items(), "run `make setup`: pyproject.toml is newer"


# How agents are lost and replaced is the contract of all stores (test_rendezvous_world.py); the other tests here and in
# tests/agent are of the one or the other.
@pytest.mark.long
@pytest.mark.parametrize("backend", ["everstep", "etcd-v3"])
def test_agents_that_are_killed_are_left_behind_and_replaced_and_the_job_ends_well(
    backend: str, request: pytest.FixtureRequest
) -> None:
    run = request.getfixturevalue("job" if backend == "etcd-v3" else "operated")()
    run.start(3)
    first = run.world(3)
    assert {line.total for line in first} == {3}

    killed = run.kill(first[1].agent)
    two = run.world(2, killed)
    print(f"agent of rank 1 killed: all-reduce of the survivors after {max(x.at for x in two) - killed:.1f} s")
    assert [line.agent for line in two] == [first[0].agent, first[2].agent]

    run.start()
    began = time.time()
    three = run.world(3, killed)
    print(f"regrown {max(x.at for x in three) - began:.1f} s after the start of a new agent")
    assert [line.agent for line in three[:2]] == [line.agent for line in two]

    killed = run.kill(three[0].agent)  # it hosts the round's process-group store
    left = run.world(2, killed)
    print(f"agent of rank 0 killed: all-reduce of the survivors after {max(x.at for x in left) - killed:.1f} s")
    assert {line.agent for line in left} == {line.agent for line in three[1:]}

    told = [{line.round for line in world} for world in (first, two, three, left)]
    assert all(len(rounds) == 1 for rounds in told), told
    assert sorted(told, key=min) == told, "the fencing token of their commits"
    codes = run.finish()
    assert sorted(codes) == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]


@pytest.mark.long
def test_agents_that_fail_for_good_leave_the_job_to_those_that_the_operator_starts_in_their_place(
    operated: Callable[..., TorchrunJob], operator: OperatorServer
) -> None:
    owner = operator.create_job(f"job-{uuid.uuid4().hex}")
    run = operated("--max-restarts=0", nodes="2", owner=owner)
    run.start(2)
    first = run.world(2)
    (run.folder / "fail-1").touch()
    failed = next(agent for agent in run.agents if agent.pid == first[1].agent)
    assert failed.wait(60) != 0

    def both_train_again() -> bool:
        # The other one may have failed too, of its lost peer, or wait for the successor.
        run.start(2 - sum(agent.poll() is None for agent in run.agents))
        return {line.rank for line in run.lines() if line.round > 1} == {0, 1}

    until(both_train_again, 120)
    assert run.finish().count(0) == 2
    kept = operator.store(operator.create_pod(owner, 9)).read().document
    assert kept is not None
    assert decode(kept).closed == FINISHED, "the success of all is known"


@pytest.mark.long
def test_a_training_process_that_fails_is_restarted_with_all_others(job: Callable[..., TorchrunJob]) -> None:
    run = job(nodes="2")
    run.start(2)
    first = run.world(2)
    (run.folder / "fail-1").touch()
    again = run.world(2, max(line.at for line in first))
    assert [line.agent for line in again] == [line.agent for line in first]
    assert run.finish() == [0, 0]


@pytest.mark.long
def test_an_agent_that_is_asked_to_end_is_missed_before_its_lease_expires(job: Callable[..., TorchrunJob]) -> None:
    run = job()
    run.start(3, conf="last_call=3,ttl=200")
    first = run.world(3)
    agent = next(a for a in run.agents if a.pid == first[2].agent)
    asked = time.time()
    agent.send_signal(signal.SIGTERM)
    assert [line.agent for line in run.world(2, asked)] == [line.agent for line in first[:2]]
    assert run.finish().count(0) == 2


@pytest.mark.long
def test_an_agent_that_is_stopped_is_left_behind_and_comes_back_when_it_wakes(job: Callable[..., TorchrunJob]) -> None:
    run = job()
    run.start(3)
    first = run.world(3)
    stopped = [first[2].agent, *children(first[2].agent)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    at = time.time()
    two = run.world(2, at)
    print(f"agent stopped: all-reduce of the survivors after {max(x.at for x in two) - at:.1f} s")
    assert [line.agent for line in two] == [line.agent for line in first[:2]]
    for pid in reversed(stopped):
        os.kill(pid, signal.SIGCONT)
    three = run.world(3, max(x.at for x in two))
    assert [line.agent for line in three] == [line.agent for line in first]
    assert run.finish() == [0, 0, 0]


def test_a_key_that_does_not_exist_is_named_by_torchs_own_registry() -> None:
    parameters = RendezvousParameters("etcd-v3", "127.0.0.1:1", "run", 1, 2, last_call_timeot="3", timeout=900)
    with pytest.raises(ValueError, match=r"last_call_timeot: no such key; did you mean last_call_timeout\?"):
        get_rendezvous_handler(parameters)
