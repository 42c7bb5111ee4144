"""examples/large_batch: the learning rate follows the batch at each resize, and kills leave no trace."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.recipes.kills import CHANGED, check_kill
from support.recipes.recipes import Ended, disturbed, kill, undisturbed
from support.recipes.recorded import record

pytestmark = pytest.mark.timeout(300)
NAME = "large_batch"
ARGUMENTS = ("--steps", "30", "--every-steps", "10")
WORKER, BATCH, RATE, WARM_UP = 32, 96, 0.01, 20  # of the script


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["lamb", "lars"])
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, optimizer: str) -> None:
    arguments = (*ARGUMENTS, "--optimizer", optimizer)
    calm = undisturbed(NAME, tmp_path / "calm", arguments, 2)
    figure = CHANGED if optimizer == "lamb" else ""
    check_kill(NAME, tmp_path / "hit", calm, arguments, (8, 25), 2, figure=figure)


def test_the_rate_follows_each_resize(tmp_path: Path) -> None:
    """Of a run that is stopped, and continued by other numbers of workers."""
    for steps, workers in ((25, 3), (50, 2), (60, 4)):
        ended = undisturbed(NAME, tmp_path, ("--steps", str(steps)), workers)
        check(ended)
        if steps < 60:
            figure = f"learning rate of {workers} workers after its warm-up"
            record(NAME, figure, rate(ended), "", expected=RATE * WORKER * workers / BATCH)
    assert [one[:2] for one in carried(ended)["resizes"]] == [[0, 3], [25, 2], [50, 4]]
    assert carried(ended)["position"] == WORKER * (25 * 3 + 25 * 2 + 10 * 4)


@pytest.mark.long
def test_the_rate_follows_a_lost_worker(tmp_path: Path) -> None:
    """The others go on in their processes with a smaller batch, and the new one joins them if it comes in time."""
    hit = disturbed(NAME, tmp_path, ("--steps", "100"), at=[kill(NAME, 15, 45)], elastic="2:3")
    check(hit)
    assert [one[1] for one in carried(hit)["resizes"]][:2] == [3, 2]


def carried(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = ended.state["carried"]
    return found


def rate(ended: Ended) -> float:
    found: float = ended.state["optimizer"]["param_groups"][0]["lr"]
    return found


def check(ended: Ended) -> None:
    """What is recorded is the linear rule, and the rate at the end is what the rule makes of the record."""
    expected = 0.0
    for (step, workers, batch, goal), (end, *_) in pairwise([*carried(ended)["resizes"], [ended.step]]):
        assert batch == WORKER * workers
        assert goal == pytest.approx(RATE * batch / BATCH)
        expected += (goal - expected) * min(1.0, (end - step) / WARM_UP)
    assert rate(ended) == pytest.approx(expected)
