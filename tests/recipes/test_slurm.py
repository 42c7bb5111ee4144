"""examples/slurm on a real Slurm: killed processes, requeues, the end of a job's time, and cancelled jobs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import everstep
from support.recipes.recipes import EXAMPLES, PROGRAMS, differences, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns
from support.recipes.slurm import Batch, Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]
NAME = "slurm"
TRAIN = EXAMPLES / "ddp" / "train.py"
CHANCE = random.Random(NAME)
KILL, STOP = CHANCE.randint(15, 30), CHANCE.randint(35, 50)
ARGUMENTS = ("--steps", "80", "--every-steps", "20")
STEADY = ("--steps", "1500", "--every-steps", "500")  # more than two minutes, where steps are long


@pytest.fixture(scope="module")
def slurm(slurm_programs: None, etcd_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    del slurm_programs, etcd_program  # there before the first test
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


def disturbed(slurm: Slurm, folder: Path, how: str, arguments: tuple[str, ...] = ARGUMENTS, *options: str) -> Batch:
    """`how` is one of those of programs/slurm_disturbed.py."""
    command = [str(PROGRAMS / "slurm_disturbed.py"), str(KILL), str(STOP), how, str(TRAIN), *arguments]
    return slurm.submit(folder, command, *options)


def resumed(output: str) -> int:
    """The step from which the job's second run has gone on; it is the one after which the first one has stopped."""
    stopped = [int(step) for step in re.findall(r"stopped after step (\d+), its state is committed", output)]
    assert len(stopped) == 1, output
    begun = re.findall(r"round 1: step (\d+), formed", output)
    assert begun == ["0", "0", str(stopped[0]), str(stopped[0])], output
    return stopped[0]


@pytest.mark.long
@pytest.mark.parametrize("how", ["requeue", "warn"])
def test_a_killed_process_and_a_requeue_leave_no_trace(
    slurm: Slurm, shared: SharedRuns, tmp_path: Path, how: str
) -> None:
    calm = shared("ddp", ARGUMENTS, processes=2)
    job = disturbed(slurm, tmp_path / "hit", how)
    slurm.at_once(job)
    hit = slurm.ended(job)
    assert f"round 2: step {KILL}, formed" in hit.output, "the others have gone on in their processes"
    assert STOP <= resumed(hit.output) < calm.step
    changed = differences(calm, hit)
    record(NAME, "values that a killed process and a requeue change", len(changed), "")
    assert changed == []


@pytest.mark.long
def test_a_job_whose_time_is_up_goes_on_after_the_same_step(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm itself sends the signal, a minute before two minutes are over."""
    calm = undisturbed("ddp", tmp_path / "calm", STEADY, processes=2)
    job = disturbed(slurm, tmp_path / "hit", "nothing", STEADY, "--time=2", "--signal=B:USR1@60")
    slurm.at_once(job)
    hit = slurm.ended(job)
    assert STOP <= resumed(hit.output) < calm.step
    assert differences(calm, hit) == []


@pytest.mark.long
def test_a_job_that_slurm_ends_at_its_limit_without_a_warning_saves_and_the_next_one_goes_on(
    slurm: Slurm, tmp_path: Path
) -> None:
    """Slurm sends SIGTERM when two minutes are over, and SIGKILL 30 seconds later, its default of `KillWait`."""
    first = disturbed(slurm, tmp_path / "hit", "nothing", STEADY, "--time=2", "--signal=B:USR1@0")
    slurm.until(first, "TIMEOUT")
    stopped = everstep.load(tmp_path / "hit" / "commits").step
    rest = ("--steps", str(stopped + 20), "--every-steps", "500")
    hit = slurm.ended(slurm.submit(tmp_path / "hit", [str(TRAIN), *rest]))
    assert resumed(hit.output) == stopped >= STOP
    assert differences(undisturbed("ddp", tmp_path / "calm", rest, processes=2), hit) == []


@pytest.mark.long
def test_a_cancelled_job_saves_and_stays_cancelled_and_the_next_one_goes_on(
    slurm: Slurm, shared: SharedRuns, tmp_path: Path
) -> None:
    calm = shared("ddp", ARGUMENTS, processes=2)
    first = disturbed(slurm, tmp_path / "hit", "cancel")
    slurm.until(first, "CANCELLED")
    second = slurm.submit(tmp_path / "hit", [str(TRAIN), *ARGUMENTS])
    hit = slurm.ended(second)
    assert STOP <= resumed(hit.output) < calm.step
    assert slurm.state(first) == "CANCELLED"
    assert differences(calm, hit) == []


@pytest.mark.long
def test_a_job_that_has_lost_an_agent_ends_and_the_next_one_goes_on(
    slurm: Slurm, shared: SharedRuns, tmp_path: Path
) -> None:
    calm = shared("ddp", ARGUMENTS, processes=2)
    first = disturbed(slurm, tmp_path / "hit", "lose")
    slurm.until(first, "FAILED")
    hit = slurm.ended(slurm.submit(tmp_path / "hit", [str(TRAIN), *ARGUMENTS]))
    assert differences(calm, hit) == []
