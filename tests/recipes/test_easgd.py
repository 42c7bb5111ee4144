"""examples/easgd: parameters travel once a period, workers leave between periods, kills leave no trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, accuracy, disturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "easgd"
ARGUMENTS = ("--periods", "30", "--every-periods", "10")


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    return shared(NAME, ARGUMENTS, through=[PROGRAMS / "bytes_sent.py"])


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    check_kill(NAME, tmp_path, calm, ARGUMENTS, (8, 24))


def test_parameters_travel_once_a_period(calm: Ended) -> None:
    size = sum(value.nbytes for value in calm.state["centre"].values())
    sent = [(int(given), int(passes)) for given, passes in re.findall(r"sent (\d+) bytes for (\d+)", calm.output)]
    assert len(sent) == 3, calm.output
    shares = [given / passes / size for given, passes in sent]
    record(
        NAME, "bytes that a rank gives for a local step, by those of its parameters", max(shares), "", expected=1 / 12
    )
    assert all(given == 30 * size and passes == 30 * 12 for given, passes in sent), sent


@pytest.mark.long
def test_a_worker_leaves_between_two_periods(tmp_path: Path, calm: Ended) -> None:
    through = [PROGRAMS / "unhurried.py", Path("12:2")]
    left = disturbed(NAME, tmp_path, ARGUMENTS, at=["12:scale=2"], through=through, elastic="2:3")
    restarts = left.status()["restarts"]
    record(NAME, "restarts when one of three workers leaves between two periods", restarts, "")
    assert restarts == 0, left.output
    workers = [entry["world_size"] for entry in left.history() if entry["kind"] == "step"]
    assert workers[0] == 3, workers
    assert workers[-1] == 2, workers
    reached = accuracy(NAME, left.state["centre"])
    record(NAME, "accuracy on unseen images after 30 periods", reached, "")
    assert reached > 0.8
