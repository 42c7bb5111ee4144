"""examples/lightning: two lines are Everstep's, kills of one worker and of all leave no trace, progress in status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.recipes.changed import changed_lines
from support.recipes.recipes import EXAMPLES, Ended, differences, disturbed, kill, undisturbed
from support.recipes.recorded import record

pytestmark = pytest.mark.timeout(300)
NAME = "lightning"
EPOCHS, STEPS = 3, 3 * 30  # 1,437 images, 48 a step
ARGUMENTS = ("--max_epochs", str(EPOCHS), "--accelerator", "cpu")
COMPARED = ("model", "optimizer_0", "scheduler_0", "loops")  # the callbacks' state names their own folder


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return undisturbed(NAME, tmp_path_factory.mktemp("calm"), (*ARGUMENTS, "--devices", "3"))


@pytest.mark.turns(3)
@pytest.mark.parametrize("whom", ["one", pytest.param("all", marks=pytest.mark.long)])
def test_killed_workers_leave_no_trace(tmp_path: Path, calm: Ended, whom: str) -> None:
    one = kill(NAME, 25, 55)
    at = [one] if whom == "one" else [f"{one.partition(':')[0]}:kill={worker}" for worker in range(3)]
    hit = disturbed(NAME, tmp_path, ("--default_root_dir", str(tmp_path), *ARGUMENTS), at=at)
    status = hit.status()
    assert status["restarts"] >= 1, hit.output
    record(NAME, "steps of the run in the job's status", status["step"], "", expected=STEPS)
    assert status["step"] == status["total_steps"] == calm.step == STEPS
    changed = differences(calm, hit, COMPARED)
    workers = "one worker" if whom == "one" else "all workers"
    record(NAME, f"values that a kill of {workers} changes", len(changed), "")
    assert changed == []


def test_the_script_changes_by_few_lines() -> None:
    changed, moved = changed_lines(EXAMPLES / NAME)
    record(NAME, "lines that Everstep adds or changes", changed, "")
    assert changed <= 10
    assert moved == 0


@pytest.mark.long
def test_the_script_as_it_was_trains(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / NAME / "before.py"), *ARGUMENTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"`max_epochs={EPOCHS}` reached" in done.stdout + done.stderr
