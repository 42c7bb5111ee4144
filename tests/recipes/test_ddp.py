"""examples/ddp: gradients as one process has them, all-reduces once a step, and the bits of an undisturbed run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.recipes.recipes import PROGRAMS, differences, disturbed, kill, script, undisturbed
from support.recipes.recorded import record

pytestmark = pytest.mark.timeout(300)
NAME = "ddp"
FURTHEST = "largest difference of a gradient from that of one process, by the largest gradient"
ARGUMENTS = ("--steps", "60", "--every-steps", "20")


def test_a_killed_worker_leaves_no_trace(tmp_path: Path) -> None:
    calm = undisturbed(NAME, tmp_path / "calm", ARGUMENTS)
    hit = disturbed(NAME, tmp_path / "hit", ARGUMENTS, at=[kill(NAME, 15, 45)])
    assert hit.status()["restarts"] == 1, hit.output
    changed = differences(calm, hit)
    record(NAME, "values that a kill changes", len(changed), "")
    assert changed == []


@pytest.mark.turns(2)
def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    one, three = (undisturbed(NAME, tmp_path / str(n), ("--steps", "1", "--dropout", "0"), processes=n) for n in (1, 3))
    alone, together = (e.state["optimizer"]["state"] for e in (one, three))
    assert alone.keys() == together.keys()
    furthest = max(float((together[i]["exp_avg"] - state["exp_avg"]).abs().max()) for i, state in alone.items())
    largest = max(float(state["exp_avg"].abs().max()) for state in alone.values())
    record(NAME, FURTHEST, furthest / largest, "")
    for i, state in alone.items():
        # After its first step Adam's average is a tenth of the gradient.
        torch.testing.assert_close(together[i]["exp_avg"], state["exp_avg"], rtol=1e-4, atol=1e-7)


@pytest.mark.long
def test_gradients_of_unequal_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    """In the last batch of the epoch three ranks have 25, 24 and 24 samples."""
    epoch = ("--steps", str(script(NAME).TRAIN // 96 + 1), "--dropout", "0")
    one, three = (undisturbed(NAME, tmp_path / str(n), epoch, processes=n) for n in (1, 3))
    alone, together = (e.state["optimizer"]["state"] for e in (one, three))
    for i, state in alone.items():
        torch.testing.assert_close(together[i]["exp_avg"], state["exp_avg"], rtol=1e-4, atol=1e-6)


@pytest.mark.turns(2)
def test_gradients_travel_once_a_step(tmp_path: Path) -> None:
    through = [PROGRAMS / "bytes_averaged.py"]
    few = undisturbed(NAME, tmp_path / "few", ("--steps", "4"), 2, through)
    many = undisturbed(NAME, tmp_path / "many", ("--steps", "4"), 2, through, EVERSTEP_TEST_ALWAYS="1")
    parts = 96 // 2 // 8  # of a rank's batch
    ratio = max(averaged(few.output)) / max(averaged(many.output))
    record(NAME, "bytes that travel with 6 micro-batches, by those without `no_sync`", ratio, "", expected=1 / parts)
    assert {b * parts for b in averaged(few.output)} == set(averaged(many.output)), few.output


def averaged(output: str) -> list[int]:
    found = [int(n) for n in re.findall(r"averaged (\d+) bytes", output)]
    assert len(found) == 2, output
    return found
