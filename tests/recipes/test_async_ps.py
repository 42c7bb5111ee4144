"""examples/async_ps: gradients are as new as the bound says, a lost worker stops nobody, a lost server goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.recipes.recipes import PROGRAMS, accuracy, disturbed
from support.recipes.recorded import record
from support.recipes.roles import played

pytestmark = pytest.mark.timeout(300)
NAME = "async_ps"
KILLED = PROGRAMS / "killed_roles.py"
BOUND, WORKERS = 3, 2
# So many can each other worker give while one computes: it may be BOUND behind at first, and BOUND + 1 ahead at last.
OLDEST = (2 * BOUND + 1) * (WORKERS - 1)


@pytest.mark.long
def test_gradients_are_as_new_as_the_bound_says_and_kills_stop_nobody(tmp_path: Path) -> None:
    """The fast worker is killed, and replaced only after the server was killed too: until then the slow one goes on."""
    arguments = ("--steps", "150", "--every-steps", "5", "--bound", str(BOUND))
    hit, starts = played(NAME, tmp_path, arguments, 1 + WORKERS, [KILLED, "1000:90:30:0.1"])
    assert starts == [2, 2, 1], hit.output
    ages = {int(age): times for age, times in hit.state["staleness"].items()}
    record(NAME, "most versions that a gradient was behind, with a bound of 3 and 2 workers", max(ages), "of 7 allowed")
    assert sum(ages.values()) == hit.step == 150, "each applied gradient counts once, also over the server's death"
    assert 0 < max(ages) <= OLDEST, ages

    (_, committed), *_ = re.findall(r"killed in step (\d+) after the commit of step (\d+)", hit.output)
    first, second = map(int, re.findall(r"began at step (\d+)", hit.output))
    assert first == 0
    assert second >= int(committed) > 0


@pytest.mark.long
def test_killed_pods_cost_no_accuracy(tmp_path: Path) -> None:
    arguments = ("--steps", "600", "--every-steps", "50")
    calm, _ = played(NAME, tmp_path / "calm", arguments, 1 + WORKERS)
    hit = disturbed(NAME, tmp_path / "hit", arguments, through=[KILLED, Path("1000:200:50:0")], elastic="2:3")
    assert sorted(re.findall(r"WorkerLost: worker (\d)", hit.output)) == ["0", "1"], hit.output
    undisturbed, reached = (accuracy(NAME, ended.state["model"]) for ended in (calm, hit))
    record(NAME, "accuracy on unseen images after 600 gradients", undisturbed, "")
    record(NAME, "accuracy with the server and a worker killed", reached, "")
    assert min(undisturbed, reached) > 0.8
    assert reached > undisturbed - 0.05
