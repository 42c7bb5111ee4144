"""examples/hf_trainer: two lines of Everstep, the right step after a loss of any size, progress in the job's status."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.recipes.recipes import EXAMPLES, Ended, differences, disturbed, kill
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "hf_trainer"
STEPS = 80
COMPARED = ("model", "optimizer", "scheduler")  # Trainer's own log of the run has times in it


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    return shared(NAME, ("--steps", str(STEPS), "--every-steps", "20"))


@pytest.mark.turns(3)
@pytest.mark.parametrize("whom", ["one", "all"])
def test_killed_workers_leave_no_trace(tmp_path: Path, calm: Ended, whom: str) -> None:
    one = kill(NAME, 25, 55)
    step = one.partition(":")[0]
    at = [one] if whom == "one" else [f"{step}:kill={worker}" for worker in range(3)]
    hit = disturbed(NAME, tmp_path, ("--steps", str(STEPS), "--every-steps", "20"), at=at)
    assert hit.status()["restarts"] >= 1, hit.output
    assert hit.status()["step"] == hit.status()["total_steps"] == STEPS
    changed = differences(calm, hit, COMPARED)
    workers = "one worker" if whom == "one" else "all workers"
    record(NAME, f"values that a kill of {workers} changes", len(changed), "")
    assert changed == []


def test_what_is_everstep_in_the_script() -> None:
    script = (EXAMPLES / NAME / "train.py").read_text()
    own = [line for line in script.split('"""', 2)[2].splitlines() if "everstep" in line.lower() or "callback" in line]
    # An import, the callback, its place among the callbacks, the call; and two options for the command line.
    record(NAME, "lines of the script that are Everstep's", len(own), "")
    assert len(own) <= 6, own
