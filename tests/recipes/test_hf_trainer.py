"""examples/hf_trainer: two lines of Everstep, the right step after a loss of any size, progress in the job's status."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.recipes.kills import check_library_kill
from support.recipes.recipes import EXAMPLES, Ended
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "hf_trainer"
STEPS = 80
ARGUMENTS = ("--steps", str(STEPS), "--every-steps", "20")
COMPARED = ("model", "optimizer", "scheduler")  # Trainer's own log of the run has times in it


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    return shared(NAME, ARGUMENTS)


@pytest.mark.long
@pytest.mark.parametrize("whom", ["one", "all"])
def test_killed_workers_leave_no_trace(tmp_path: Path, calm: Ended, whom: str) -> None:
    assert check_library_kill(NAME, tmp_path, calm, ARGUMENTS, whom, COMPARED) == STEPS


def test_what_is_everstep_in_the_script() -> None:
    script = (EXAMPLES / NAME / "train.py").read_text()
    own = [line for line in script.split('"""', 2)[2].splitlines() if "everstep" in line.lower() or "callback" in line]
    # An import, the callback, its place among the callbacks, the call; and two options for the command line.
    record(NAME, "lines of the script that are Everstep's", len(own), "")
    assert len(own) <= 6, own
