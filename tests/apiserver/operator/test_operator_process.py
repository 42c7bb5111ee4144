"""The operator as the process that a Deployment runs: two replicas, killed, frozen and woken (failure
modes 20, 22, 39)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep_operator.kube.errors import NotFound
from everstep_operator.kube.resources import LEASES
from everstep_operator.main import JOBS
from support.apiserver.operators import Place
from support.apiserver.replica import Replica
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver


@pytest.fixture
def start(crd: Any, place: Place, tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def begin(name: str, in_pod: bool = False, **options: Any) -> Replica:
        made.append(Replica(crd, place.namespace, name, tmp_path, in_pod=in_pod, **options))
        return made[-1]

    yield begin
    for replica in made:
        replica.end()


async def holder(place: Place) -> str:
    try:
        lease = await place.client.get(LEASES, place.namespace, "everstep-operator")
    except NotFound:
        return ""
    return str(lease.spec.holder_identity or "").partition("_")[0]


async def test_replica_that_is_killed_is_followed_by_the_other_and_nothing_is_done_twice(
    place: Place, start: Callable[[str], Replica]
) -> None:
    """Case 22: the job ran on meanwhile; what happened to it is found by looking."""
    first = start("replica-a")
    await place.create_job()
    await eventually("the first replica is ready", first.is_ready)
    await place.running("digits-w0-0", "digits-w1-0")
    second = start("replica-b")
    await eventually("the second replica is ready", second.is_ready)
    # A machine that stands still for three seconds lets a Lease expire: then the second leads by now.
    leader, other = (first, second) if await first.leads() else (second, first)
    leader.send(signal.SIGKILL)
    await place.end("digits-w1-0", 137)
    await place.running("digits-w0-1", "digits-w1-1")
    assert await holder(place) == other.name
    assert (await place.status())["restarts"]["total"] == 1
    # The replica leads for the whole API server: jobs that other tests left in their namespaces have plans too.
    plans = [line for line in other.lines() if line["msg"] == "plan" and line["round"] == 2]
    assert f"{place.namespace}/digits" in {line["job"] for line in plans}, "the log tells of no plan for round 2"


@pytest.mark.long
async def test_leader_frozen_beyond_its_lease_does_no_harm_when_it_wakes(
    place: Place, start: Callable[[str], Replica]
) -> None:
    """Case 39: it wakes with caches of round 1 and believes that it leads."""
    first = start("replica-a")
    await place.create_job()
    await place.running("digits-w0-0", "digits-w1-0")
    second = start("replica-b")
    await eventually("the second replica is ready", second.is_ready)
    first.send(signal.SIGSTOP)
    await place.end("digits-w1-0", 137)
    await place.running("digits-w0-1", "digits-w1-1")
    uids = {pod.metadata.uid for pod in (await place.pods()).values()}
    first.send(signal.SIGCONT)

    async def follows() -> bool:
        return await first.is_ready() and not await first.leads()

    await eventually("the old leader knows that it follows", follows)
    assert {pod.metadata.uid for pod in (await place.pods()).values()} == uids
    await place.end("digits-w0-1", 137)
    await place.running("digits-w0-2", "digits-w1-2")
    status = await place.status()
    assert status["restarts"]["total"] == 2
    assert status["world"]["round"] == 3


async def test_operator_told_to_stop_gives_its_lease_back_and_ends(
    place: Place, start: Callable[[str], Replica]
) -> None:
    replica = start("replica-a")

    async def leads() -> bool:
        return await replica.is_ready() and await replica.leads()

    await eventually("it leads", leads)
    replica.send(signal.SIGTERM)
    assert await asyncio.to_thread(replica.process.wait, 30) == 0
    assert await holder(place) == ""
    assert replica.lines()[-1]["msg"] == "operator stops"


async def test_operator_in_a_pod_runs_a_job_without_the_official_client(
    place: Place, start: Callable[..., Replica]
) -> None:
    replica = start("replica-a", in_pod=True)
    await place.create_job()
    await place.running("digits-w0-0", "digits-w1-0")
    replica.send(signal.SIGTERM)
    assert await asyncio.to_thread(replica.process.wait, 30) == 0, replica.log.read_text()
    modules = replica.printed.read_text().split()
    assert "everstep_operator.controller.apply" in modules
    # What reads kubeconfigs, and what sends traces to a collector that nobody named.
    assert [name for name in modules if name.partition(".")[0] in ("kubernetes", "opentelemetry")] == []


async def test_operator_whose_collector_of_traces_is_away_runs_a_job_and_ends_in_time(
    place: Place, start: Callable[..., Replica]
) -> None:
    with socket.socket() as silent:  # it takes connections, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(60)
        collector = f"http://127.0.0.1:{silent.getsockname()[1]}"
        replica = start("replica-a", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": collector, "OTEL_BSP_SCHEDULE_DELAY": "9"})
        await place.create_job(recovery={"backoffSeconds": {"initial": 0, "max": 0}})
        await place.running("digits-w0-0", "digits-w1-0")
        await place.end("digits-w1-0", 137)
        await place.running("digits-w0-1", "digits-w1-1")
        await place.client.delete(JOBS, place.namespace, "digits", propagation="Background")
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            assert await replica.is_ready()
            replica.send(signal.SIGTERM)
            assert await asyncio.to_thread(replica.process.wait, 10) == 0, "the grace period of the chart"
            assert await holder(place) == ""


def test_setting_that_cannot_be_used_is_named_and_nothing_starts() -> None:
    command = str(Path(sys.executable).with_name("everstep-operator"))
    done = subprocess.run(
        [command], env={**os.environ, "EVERSTEP_PORT": "http"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "EVERSTEP_PORT" in done.stderr
