"""examples/evaluate: at any number of ranks the metrics of one process, and kills that leave no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, Ended, differences, script, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "evaluate"
ARGUMENTS = ("--steps", "40", "--every-steps", "10")


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    return shared(NAME, ARGUMENTS, 2)


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    """Also in the metrics of the evaluations, which are part of the state."""
    check_kill(NAME, tmp_path, calm, ARGUMENTS, (12, 36), 2)


@pytest.mark.long
def test_a_worker_killed_in_an_evaluation_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    through = [PROGRAMS / "killed_evaluating.py", tmp_path / "killed"]
    hit = undisturbed(NAME, tmp_path, ARGUMENTS, 2, through)
    assert "SIGKILL" in hit.output, "nobody was killed"
    assert differences(calm, hit) == []


def test_metrics_are_those_of_one_process(calm: Ended) -> None:
    """357 samples are no multiple of two: a sampler that fills shares up would count some twice."""
    check(calm)
    record(NAME, "samples that 2 ranks count", int(calm.state["history"]["40"]["samples"]), "", expected=357)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 4])
def test_metrics_of_other_numbers_of_ranks_are_those_of_one_process(tmp_path: Path, ranks: int) -> None:
    check(undisturbed(NAME, tmp_path, ("--steps", "40"), ranks))


def check(ended: Ended) -> None:
    assert set(ended.state["history"]) == {"20", "40"}
    assert ended.state["history"]["40"] == alone(ended)


def alone(ended: Ended) -> dict[str, float]:
    """The metrics of the model of a commit, sample by sample."""
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)
    ).eval()
    network.load_state_dict(ended.state["model"])
    train = script(NAME)
    images, labels = train.load_digits(return_X_y=True)
    confusion = torch.zeros(10, 10, dtype=torch.float64)
    for image, label in zip(torch.from_numpy(images).float()[1440:] / 16, labels[1440:], strict=True):
        confusion[int(label), int(network(image).argmax())] += 1
    assert confusion.sum() == 357
    found: dict[str, float] = train.metrics(confusion)
    return found
