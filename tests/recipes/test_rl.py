"""examples/rl: a lost rollout worker stops nobody, a new learner goes on in its buffer, and kills leave no trace."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from support.recipes.recipes import PROGRAMS, Ended, differences, disturbed
from support.recipes.recorded import record
from support.recipes.roles import played

pytestmark = pytest.mark.timeout(300)
NAME = "rl"
PER = 18  # steps that a buffer is used for
ARGUMENTS = ("--steps", str(10 * PER), "--every-steps", "2")
KILLED = PROGRAMS / "killed_roles.py"


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return played(NAME, tmp_path_factory.mktemp("calm"), ARGUMENTS, 2)[0]


@pytest.mark.long
def test_killed_processes_stop_nobody_else_and_leave_no_trace(tmp_path: Path, calm: Ended) -> None:
    """The rollout worker that was killed is replaced only after the learner was killed too: until then the learner
    trains with what the other worker makes."""
    hit, starts = played(NAME, tmp_path, ARGUMENTS, 3, [KILLED, f"{PER}:{4 * PER}:5:0"])
    assert starts == [2, 2, 1], hit.output
    changed = differences(calm, hit)
    record(NAME, "values that a kill of the learner and of a rollout worker changes", len(changed), "")
    assert changed == []

    killed, committed = map(int, re.findall(r"killed in step (\d+) after the commit of step (\d+)", hit.output)[0])
    first, second = map(int, re.findall(r"began at step (\d+)", hit.output))
    assert first == 0
    assert second >= committed
    assert second // PER == killed // PER, "the new learner goes on in the buffer of the lost one"
    assert second % PER > 0, "and not at its beginning"
    made = Counter(map(int, re.findall(r"made fragment (\d+)", hit.output)))
    again = sum(times - 1 for times in made.values())
    record(NAME, "fragments that were made again, of one that was lost with its worker", again, "", expected=1)
    assert made.keys() == set(range(calm.state["buffer"]["next"]))
    assert again == 1, made


@pytest.mark.long
def test_killed_pods_leave_no_trace(tmp_path: Path, calm: Ended) -> None:
    hit = disturbed(NAME, tmp_path, ARGUMENTS, through=[KILLED, Path(f"{PER}:{4 * PER}:5:0")], elastic="2:3")
    assert sorted(re.findall(r"WorkerLost: worker (\d)", hit.output)) == ["0", "1"], hit.output
    changed = differences(calm, hit)
    record(NAME, "values that a kill of both pods changes", len(changed), "")
    assert changed == []
