"""examples/heterogeneous: shares by speed, backup workers, and the gradient of the whole batch; kills change rounding
alone, or nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.recipes.recipes import PROGRAMS, Ended, differences, disturbed, kill, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME, BACKUP = "heterogeneous", "heterogeneous/backup.py"
STEPS = ("--steps", "30")
COST = (0.003, 0.009)  # of slow_ranks.py


@pytest.fixture(scope="module")
def alone(shared: SharedRuns) -> Ended:
    return shared(NAME, STEPS, 1)


def furthest(left: Ended, right: Ended) -> float:
    mine, others = (
        {name.removeprefix("inner."): value for name, value in ended.state["model"].items()} for ended in (left, right)
    )
    assert mine.keys() == others.keys()
    return max(float((mine[name] - others[name]).abs().max()) for name in mine)


@pytest.mark.long
def test_a_killed_worker_changes_rounding_alone(tmp_path: Path, alone: Ended) -> None:
    """Shares follow measured times, so sums are made in another order. At all shares the gradient is the same."""
    hit = disturbed(NAME, tmp_path, (*STEPS, "--every-steps", "10"), 2, [kill(NAME, 8, 25, workers=2)])
    assert hit.status()["restarts"] == 1, hit.output
    record(NAME, "largest difference of a parameter after a kill from one process", furthest(hit, alone), "")
    assert furthest(hit, alone) < 1e-4


@pytest.mark.long
def test_unequal_ranks_end_a_step_together(tmp_path: Path, alone: Ended) -> None:
    mixed = undisturbed(NAME, tmp_path, STEPS, 2, [PROGRAMS / "slow_ranks.py"])
    record(NAME, "largest difference of a parameter of unequal ranks from one process", furthest(mixed, alone), "")
    assert furthest(mixed, alone) < 1e-4
    shares = mixed.state["carried"]["shares"]
    longest = max(share * cost for share, cost in zip(shares, COST, strict=True))
    best = sum(shares) / sum(1 / cost for cost in COST)
    record(NAME, "time of a step by the final shares, by the best", longest / best, "", expected=1)
    took = max(float(n) for n in re.findall(r"took ([\d.]+)", mixed.output))
    record(NAME, "measured time of a step on two cores with other work, by the best", took, "", expected=1)
    assert longest < 1.1 * best, shares


@pytest.fixture(scope="module")
def backed_up(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return undisturbed(BACKUP, tmp_path_factory.mktemp("backed_up"), STEPS, 1)


@pytest.mark.long
def test_a_killed_backup_worker_leaves_no_trace(tmp_path: Path, backed_up: Ended) -> None:
    hit = disturbed(BACKUP, tmp_path, (*STEPS, "--every-steps", "10"), 2, [kill(NAME, 8, 25, workers=2)])
    assert hit.status()["restarts"] == 1, hit.output
    changed = differences(backed_up, hit)
    record(NAME, "values that a kill changes, with backup workers, from one process", len(changed), "")
    assert changed == []


@pytest.mark.long
def test_the_slower_of_two_backup_workers_is_not_waited_for(tmp_path: Path, backed_up: Ended) -> None:
    mixed = undisturbed(BACKUP, tmp_path, STEPS, 2, [PROGRAMS / "slow_ranks.py"])
    assert furthest(mixed, backed_up) == 0, "the gradient of whoever was first is that of one process"
    found = re.findall(r"rank (\d) computed (\d+) samples", mixed.output)
    computed = {int(rank): int(samples) for rank, samples in found}
    assert computed.keys() == {0, 1}, mixed.output
    share = computed[1] / computed[0]
    record(NAME, "samples that the slower of two backup workers computed, by those of the faster", share, "",
           expected=COST[0] / COST[1])  # fmt: skip
    assert computed[0] <= 30 * 96
    assert share < 0.9, "it leaves its part when it hears that the other one has finished"
