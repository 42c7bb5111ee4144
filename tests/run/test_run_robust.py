"""What a local run leaves alone, survives and cleans up."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

import pytest
from local_job import LocalJob, descendants
from player import wait_for

pytestmark = pytest.mark.timeout(300)
RUNS = int(os.environ.get("EVERSTEP_RUNS", "0"))  # `make soak` takes a hundred
SEEDS = range(RUNS) if RUNS else (2,)  # 2: two kills, the second while the first is being recovered from


def test_operator_that_dies_and_comes_back_touches_no_process(new_job: Callable[..., LocalJob]) -> None:
    job = new_job()
    job.apply(workers=2, steps=200, pause=0.05, every=20)
    job.until_step(20, "checkpoint.lastCommittedStep")
    before = {row["pid"]: sorted(descendants(row["pid"])) for row in job.view()["workers"]}
    job.kill_operator()
    job.until_step(job.status()["checkpoint"]["lastCommittedStep"] + 40, "checkpoint.lastCommittedStep")
    assert {row["pid"]: sorted(descendants(row["pid"])) for row in job.view()["workers"]} == before
    job.until_complete()
    job.expect_undisturbed()
    job.expect_restarts("total", 0)


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
    job.apply(workers=2, steps=200, pause=0.1, every=1 if aim == "save" else 20)
    first = wait_for("both workers have a process", lambda: both if len(both := pids(job)) == 2 else {}, 30)
    # The rows are live; the status is written every few seconds.
    wait_for("the moment", lambda: max(row["step"] or 0 for row in job.view()["workers"]) >= moment, 60)
    job.kill_torchrun(victim)
    if aim == "recovery":
        job.until_lost()
        again = rng.randrange(2)
        wait_for("its new pod has a process", lambda: pids(job).get(again, first[again]) != first[again], 30)
        time.sleep(rng.uniform(0, 4))  # anywhere in the seconds until training goes on
        job.kill_torchrun(again)
    job.until_complete()
    job.expect_undisturbed()
    job.expect_restarts("infrastructure", 2 if aim == "recovery" else 1)


def pids(job: LocalJob) -> dict[int, int]:
    """Of each worker with a process, the newest pod's."""
    rows = sorted(job.view().get("workers", ()), key=lambda row: row["restarts"])
    return {row["worker"]: row["pid"] for row in rows if row["pid"]}


@pytest.mark.long  # the same runs on the cluster each time
def test_two_runs_of_one_name_at_once_do_not_meet(new_job: Callable[..., LocalJob]) -> None:
    first, second = new_job(), new_job()
    for job in (first, second):
        job.apply(workers=2, steps=200, pause=0.1, every=20)
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
    job.apply(workers=2, steps=10_000, pause=0.05, every=20)
    job.until_step(20)
    assert job.listening, "the operator and torch's stores listen; what is not seen now is not looked for later"
    assert job.process is not None
    job.process.send_signal(number)
    assert job.exit_code(30) == 130


def test_run_that_dies_takes_its_processes_with_it_and_the_next_one_sweeps(new_job: Callable[..., LocalJob]) -> None:
    job = new_job()
    job.apply(workers=2, steps=10_000, pause=0.05, every=20)
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
