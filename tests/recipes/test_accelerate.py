"""examples/accelerate: five lines are Everstep's, kills of one worker and of all leave no trace, progress in status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.recipes.changed import changed_lines
from support.recipes.kills import check_library_kill
from support.recipes.recipes import EXAMPLES, Ended, undisturbed
from support.recipes.recorded import record

pytestmark = pytest.mark.timeout(300)
NAME = "accelerate"
EPOCHS, STEPS = 3, 3 * 30  # 1,437 images, 48 a step
ARGUMENTS = ("--cpu", "--epochs", str(EPOCHS))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return undisturbed(NAME, tmp_path_factory.mktemp("calm"), ARGUMENTS)


@pytest.mark.long
@pytest.mark.parametrize("whom", ["one", "all"])
def test_killed_workers_leave_no_trace(tmp_path: Path, calm: Ended, whom: str) -> None:
    step = check_library_kill(NAME, tmp_path, calm, ARGUMENTS[1:], whom)
    record(NAME, "steps of the run in the job's status", step, "", expected=STEPS)
    assert step == STEPS


def test_the_script_changes_by_few_lines() -> None:
    changed, moved = changed_lines(EXAMPLES / NAME)
    record(NAME, "lines that Everstep adds or changes", changed, "")
    record(NAME, "lines that only get another indentation", moved, "")
    assert changed <= 10


@pytest.mark.long
def test_the_script_as_it_was_trains(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / NAME / "before.py"), *ARGUMENTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"epoch {EPOCHS - 1}: " in done.stdout
