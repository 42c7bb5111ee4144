"""examples/amp: all ranks leave out the steps that overflow, the scaler's state comes back, kills leave no trace."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, differences, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "amp"
# The scale begins too high, and grows until it is too high again: some steps are left out early, and some late.
ARGUMENTS = ("--steps", "40", "--every-steps", "10", "--scale", str(2.0**22), "--growth", "4")
BAD = 30  # the step in which the loss of one rank is infinite, of overflow.py


OVERFLOW = PROGRAMS / "overflow.py"


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    return shared(NAME, ARGUMENTS, 2, [OVERFLOW])


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    check_kill(NAME, tmp_path, calm, ARGUMENTS, (12, 28), 2, through=[OVERFLOW])


def test_an_overflow_on_one_rank_is_left_out_on_all(calm: Ended) -> None:
    ranks = re.findall(r"left out (\[[\d, ]*\])", calm.output)
    left_out = json.loads(ranks[0])
    alike = [json.loads(one) for one in ranks].count(left_out)
    record(NAME, "ranks of 2 that leave out the steps that overflow on one", alike, "", expected=2)
    assert ranks == ranks[:1] * 2
    assert BAD in left_out
    assert {int(one["step"]) for one in calm.state["optimizer"]["state"].values()} == {40 - len(left_out)}


@pytest.mark.long
def test_the_scaler_comes_back_from_a_commit(tmp_path: Path, calm: Ended) -> None:
    """At step 30 it has a scale, and a count of steps without an overflow, that a new one would not have."""
    half = undisturbed(NAME, tmp_path, ("--steps", "30", *ARGUMENTS[2:]), 2, [OVERFLOW])
    assert half.state["scaler"]["scale"] != 2.0**22
    changed = differences(calm, undisturbed(NAME, tmp_path, ARGUMENTS, 2, [OVERFLOW]))
    record(NAME, "values that differ after a stop and a restore", len(changed), "")
    assert changed == []


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace_in_bfloat16(tmp_path: Path) -> None:
    arguments = (*ARGUMENTS, "--type", "bf16")
    calm = undisturbed(NAME, tmp_path / "calm", arguments, 2)
    check_kill(NAME, tmp_path / "hit", calm, arguments, (12, 28), 2, figure="")
