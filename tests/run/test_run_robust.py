"""What a local run leaves alone, survives and cleans up."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from everstep_local.apiserver.faults import Faults, Refuse
from everstep_local.run import commands
from everstep_local.run.control import ControlServer
from everstep_local.run.job_file import Overrides, load, with_local_checkpoints
from everstep_local.run.local_run import LEASE_SECONDS, LocalRun, Options
from everstep_local.run.running import Handlers
from everstep_operator.kube.resources import LEASES
from everstep_operator.plan.decide.loss import INCIDENT
from everstep_operator.runtime.clock import cancel
from support.local.local_job import LocalJob, descendants
from support.scenarios.player import wait_for

pytestmark = pytest.mark.timeout(300)
RUNS = int(os.environ.get("EVERSTEP_RUNS", "0"))  # `make soak` takes a hundred
SEEDS = range(RUNS) if RUNS else (2,)  # two kills, the second while the first is being recovered from


@pytest.mark.long
def test_operator_that_dies_and_comes_back_touches_no_process(new_job: Callable[..., LocalJob]) -> None:
    job = new_job()
    job.apply(workers=2, steps=300, pause=0.02, every=20)
    job.until_step(20, "checkpoint.lastCommittedStep")
    before = processes(job)
    job.kill_operator()
    now = job.reached("progress.step")  # later than the last word of the one that died
    written = "the status of the one that came back"
    wait_for(written, lambda: (job.status().get("progress") or {}).get("step", 0) > now, 60)
    assert processes(job) == before
    job.until_complete()
    job.expect_undisturbed()
    job.expect_restarts("total", 0)
    assert job.status()["checkpoint"]["lastCommittedStep"] == 300


@pytest.mark.long
def test_run_that_is_stopped_for_longer_than_a_lease_goes_on_in_the_same_term(new_job: Callable[..., LocalJob]) -> None:
    """A machine that is too busy to run the operator, or Ctrl-Z: no other operator could have led meanwhile."""
    job = new_job()
    job.apply(workers=2, steps=300, pause=0.02, every=20)
    job.until_step(20, "progress.step")
    assert job.process is not None
    job.process.send_signal(signal.SIGSTOP)
    time.sleep(LEASE_SECONDS + 1)
    job.process.send_signal(signal.SIGCONT)
    job.until_complete()
    log = (job.out / "operator.log").read_text()
    assert log.count("term begins") == 1, log


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_run_with_a_kill_at_a_random_moment_completes_with_the_right_parameters(
    seed: int, new_job: Callable[..., LocalJob]
) -> None:
    rng = random.Random(seed)
    # A third each: any moment; a save is always under way; a second kill while the first is being recovered from.
    aim = ("any moment", "save", "recovery")[seed % 3]
    moment, victim = rng.randrange(0, 150), rng.randrange(2)
    print(f"seed {seed}: torchrun of worker {victim} is killed at step {moment}, aimed at {aim}")
    job = new_job()
    steps = 300 if aim == "recovery" else 200
    job.apply(workers=2, steps=steps, pause=0.04, every=1 if aim == "save" else 20)
    first = wait_for("both workers have a process", lambda: both if len(both := pids(job)) == 2 else {}, 60)
    wait_for("the moment", lambda: job.reached("progress.step") >= moment, 60)
    job.kill_torchrun(victim)
    wanted = {1}
    if aim == "recovery":
        wait_for("its new pod has a process", lambda: pids(job).get(victim, first[victim]) != first[victim], 60)
        again, began = rng.randrange(2), job.injected_at
        time.sleep(rng.uniform(0, 4))  # anywhere in the seconds until training goes on
        job.kill_torchrun(again)
        # The loss of a replacement is an incident of its own; that of a worker which was there before, if it is later.
        later = job.injected_at - began
        wanted = {2} if again == victim else {1} if later < INCIDENT.total_seconds() - 2 else {1, 2}
    job.until_complete()
    job.expect_undisturbed()
    assert job.status()["restarts"]["infrastructure"] in wanted, job.describe()


def processes(job: LocalJob) -> dict[int, list[int]]:
    """Of each worker its agent, and all below it."""
    return {row["pid"]: sorted(descendants(row["pid"])) for row in job.view()["workers"]}


def pids(job: LocalJob) -> dict[int, int]:
    """Of each worker with a process, the newest pod's."""
    rows = sorted(job.view().get("workers", ()), key=lambda row: row["incarnation"])
    return {row["worker"]: row["pid"] for row in rows if row["pid"]}


@pytest.mark.long
def test_two_runs_of_one_name_at_once_do_not_meet(new_job: Callable[..., LocalJob]) -> None:
    first, second = new_job(), new_job()
    for job in (first, second):
        job.apply(workers=2, steps=200, pause=0.04, every=20)
    for job in (first, second):
        job.until_step(20, "checkpoint.lastCommittedStep")
    first.delete_pod(0)
    for job in (first, second):
        job.until_complete()
        job.expect_undisturbed()
    first.expect_restarts("infrastructure", 1)
    second.expect_restarts("total", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_interrupted_run_leaves_nothing(number: signal.Signals, new_job: Callable[..., LocalJob]) -> None:
    job = new_job()
    job.apply(workers=2, steps=10_000, pause=0.02, every=20)
    job.until_step(20)
    # The operator and torch's stores listen. What is not seen now is not looked for later.
    wait_for("a look at the run's ports", lambda: job.view() and job.listening, 30)
    assert job.process is not None
    job.process.send_signal(number)
    assert job.exit_code(30) == 130


@pytest.mark.long
def test_run_that_dies_takes_its_processes_with_it_and_the_next_one_sweeps(new_job: Callable[..., LocalJob]) -> None:
    job = new_job()
    job.apply(workers=2, steps=10_000, pause=0.02, every=20)
    job.until_step(20)
    running = [p for row in job.view()["workers"] for p in (row["pid"], *descendants(row["pid"]))]
    assert len(running) >= 4
    assert job.process is not None
    job.process.kill()
    wait_for("the workers are gone", lambda: not any(alive(p) for p in running), 10)
    job.process.wait(10)
    assert job.left(), "a killed run cannot remove its socket and its folder"
    script = job.folder / "next.py"
    script.write_text("print('swept')\n")
    job.start(str(script), "--out", str(job.folder / "next"), "--plain")
    assert job.exit_code(60) == 0


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


SLEEPS = """
apiVersion: everstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: sleeps}
spec:
  replicas: 1
  rendezvous: {backend: c10d}
  template: {spec: {containers: [{name: worker, image: x, command: [sleep, "600"]}]}}
"""


@asynccontextmanager
async def running_with(faults: Faults, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalRun]:
    """A local run in this process, whose operators reach the API server with these faults."""
    (folder / "job.yaml").write_text(SLEEPS)
    nothing = Overrides()
    job = with_local_checkpoints(load(folder / "job.yaml", (), nothing), nothing, folder / "commits")
    local = LocalRun(job, Options(folder / "out"), lambda: None)
    monkeypatch.setattr(local.cluster, "client", partial(local.cluster.client, faults=faults))
    with tempfile.TemporaryDirectory(prefix="everstep-run-") as sockets:  # the path of a socket has a limit
        monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
        async with ControlServer(job.name, Handlers(local).by_verb()):
            run = asyncio.create_task(local.run())
            try:
                yield local
            finally:
                await cancel(run)
                local.close()


@pytest.mark.long
async def test_status_and_suspend_name_why_nobody_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator dies, and the next one may not write the Lease: the pod runs on, and a suspend has no effect yet."""
    faults = Faults()

    async def until(what: str, holds: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, what
            await asyncio.sleep(0.05)

    async def says(*command: str) -> str:
        """In one line, because a table is as wide as its terminal."""
        done = await asyncio.to_thread(CliRunner().invoke, commands.app, command)
        assert done.exit_code == 0, done.exception
        return " ".join(done.output.split())

    def pids() -> list[int | None]:
        return [worker.pid for worker in view.workers] if (view := local.view()) is not None else []

    async with running_with(faults, tmp_path, monkeypatch) as local:
        await until("the pod runs", lambda: any(pids()))
        before = pids()
        assert "no operator has led" not in await says("status")
        refused = faults.add(Refuse(500, message="etcd is full"), "create", "replace", resource=LEASES)
        assert await says("kill", "--operator") == "kill operator", "the next one may lead in a moment"
        await until("nobody has led for 10 s", local.notice)
        why = r"no operator has led for \d+ s: the Lease cannot be reached: .*etcd is full"
        assert re.search(why, await says("status"))
        assert re.fullmatch(f"suspend; note: {why}", await says("suspend"))
        assert pids() == before
        faults.remove(refused)
        await until("the job is suspended", lambda: pids() == [])
        assert "no operator has led" not in await says("status")
