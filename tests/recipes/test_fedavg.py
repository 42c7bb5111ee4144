"""examples/fedavg: the same federation with any workers, parameters once a round, and kills leave no trace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, accuracy, disturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "fedavg"
ARGUMENTS = ("--rounds", "30", "--every-rounds", "10")


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    return shared(NAME, ARGUMENTS, through=[PROGRAMS / "bytes_sent.py"])


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    check_kill(NAME, tmp_path, calm, ARGUMENTS, (8, 24))


@pytest.mark.long
def test_parameters_travel_once_a_round(calm: Ended) -> None:
    size = sum(value.nbytes for value in calm.state["model"].values())
    sent = [(int(given), int(passes)) for given, passes in re.findall(r"sent (\d+) bytes for (\d+)", calm.output)]
    assert len(sent) == 3, calm.output
    given, passes = (sum(column) for column in zip(*sent, strict=True))
    share = given / passes / size
    record(NAME, "bytes that a rank gives for a local step, by those of its parameters", share, "")
    assert all(given == 30 * (size + 4) for given, _ in sent), "the parameters once a round, and the sum of the weights"
    assert share < 1 / 10


@pytest.mark.long
def test_a_worker_leaves_between_two_rounds(tmp_path: Path, calm: Ended) -> None:
    through = [PROGRAMS / "unhurried.py", Path("12:2")]
    left = disturbed(NAME, tmp_path, ARGUMENTS, at=["12:scale=2"], through=through, elastic="2:3")
    restarts = left.status()["restarts"]
    record(NAME, "restarts when one of three workers leaves between two rounds", restarts, "")
    assert restarts == 0, left.output
    workers = [entry["world_size"] for entry in left.history() if entry["kind"] == "step"]
    assert workers[0] == 3, workers
    assert workers[-1] == 2, workers
    model = calm.state["model"]
    furthest = max(float((left.state["model"][name] - value).abs().max()) for name, value in model.items())
    record(NAME, "largest difference of a parameter when a worker leaves", furthest, "")
    for name, value in model.items():
        torch.testing.assert_close(left.state["model"][name], value, rtol=1e-3, atol=1e-4)
    reached = accuracy(NAME, left.state["model"])
    record(NAME, "accuracy on unseen images after 30 rounds", reached, "")
    assert reached > 0.7
