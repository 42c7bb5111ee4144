"""A machine that is too slow is told as such by `everstep rehearse`, and never as a fault of the script."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.rehearse.starvation import is_starved
from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(500)

# Each run has a folder beside those of the runs before it. Those of SLOW take longer for each step than --limit has for
# all.
SCRIPT = """
import glob, time, torch, everstep
slow = len(glob.glob("../../*/folder")) in SLOW
weight = torch.zeros(1)
with everstep.start() as run:
    run.track(weight=weight)
    for step in run.steps(until=10_000):
        with step:
            weight += 1
        time.sleep(STEP if slow else 0)
"""
SHORT = ("--ranks", "2", "--steps", "12", "--kill", "rank", "--limit", "60")


def rehearse(folder: Path, slow: str, step: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report, and what the terminal shows."""
    (folder / "train.py").write_text(SCRIPT.replace("SLOW", slow).replace("STEP", step))
    done = play(folder, *SHORT, seconds=480)
    return done.code, done.report, done.shown


def test_process_that_gets_no_processor_is_starved() -> None:
    """Both are bound to one processor, and one of them runs when the other does not want it."""
    cpu = min(os.sched_getaffinity(0))
    work = f"import os; os.sched_setaffinity(0, [{cpu}])\nwhile True: pass"
    idle = f"import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n{work}"
    # A shell stands between, as an agent does.
    busy = subprocess.Popen([sys.executable, "-c", work])
    starved = subprocess.Popen(["sh", "-c", '"$0" -c "$1" & wait', sys.executable, idle], start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not is_starved(starved.pid):
            assert time.monotonic() < until
            time.sleep(0.1)
    finally:
        busy.kill()
        os.killpg(starved.pid, 9)
        busy.wait()
        starved.wait()


@pytest.mark.long
def test_second_calm_run_that_is_slow_once_is_repeated(tmp_path: Path) -> None:
    code, report, _ = rehearse(tmp_path, "(2,)", "6")
    assert (report["findings"], code) == ([], 0)
    assert [(run["name"], run["steps"], run["played"]) for run in report["runs"]] == [
        ("calm", 12, 1), ("again", 12, 2), ("rank", 12, 1),
    ]  # fmt: skip


@pytest.mark.long
def test_machine_that_stays_too_slow_ends_the_rehearsal_with_a_code_of_its_own(tmp_path: Path) -> None:
    code, report, shown = rehearse(tmp_path, "range(2, 99)", "6")
    (found,) = report["findings"]
    assert (found["kind"], found["certain"], code) == ("slow", False, 3)
    assert [run["name"] for run in report["runs"]] == ["calm", "again"], "the others would be as slow"
    assert "NOT JUDGED" in shown
    assert not (tmp_path / ".everstep").exists(), "no stamp"


@pytest.mark.long
def test_first_calm_run_that_still_makes_steps_at_its_limit_is_told_as_too_slow(tmp_path: Path) -> None:
    code, report, _ = rehearse(tmp_path, "(1,)", "6")
    (found,) = report["findings"]
    assert (found["kind"], code) == ("slow", 3)
    assert "--limit" in found["text"]
