"""examples/local_sgd: parameters travel once a round, workers leave between rounds, kills leave no trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, accuracy, disturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "local_sgd"
ARGUMENTS = ("--rounds", "30", "--every-rounds", "10")


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    return shared(NAME, ARGUMENTS, through=[PROGRAMS / "bytes_sent.py"])


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    check_kill(NAME, tmp_path, calm, ARGUMENTS, (8, 24))


def test_parameters_travel_once_a_round(calm: Ended) -> None:
    size = sum(value.nbytes for value in calm.state["model"].values())
    sent = [(int(given), int(passes)) for given, passes in re.findall(r"sent (\d+) bytes for (\d+)", calm.output)]
    assert len(sent) == 3, calm.output
    shares = [given / passes / size for given, passes in sent]
    record(
        NAME, "bytes that a rank gives for a local step, by those of its parameters", max(shares), "", expected=1 / 12
    )
    assert all(given == 30 * size and passes == 30 * 12 for given, passes in sent), sent


@pytest.mark.long
def test_a_worker_leaves_between_two_rounds(tmp_path: Path, calm: Ended) -> None:
    through = [PROGRAMS / "unhurried.py", Path("12:2")]
    average = (*ARGUMENTS, "--outer", "average")
    left = disturbed(NAME, tmp_path, average, at=["12:scale=2"], through=through, elastic="2:3")
    restarts = left.status()["restarts"]
    record(NAME, "restarts when one of three workers leaves between two rounds", restarts, "")
    assert restarts == 0, left.output
    workers = [entry["world_size"] for entry in left.history() if entry["kind"] == "step"]
    assert workers[0] == 3, workers
    assert workers[-1] == 2, workers
    record(NAME, "accuracy on unseen images after 30 rounds", accuracy(NAME, calm.state["model"]), "")
    assert accuracy(NAME, calm.state["model"]) > 0.8
    assert accuracy(NAME, left.state["model"]) > 0.8
