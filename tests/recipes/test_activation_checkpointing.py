"""examples/activation_checkpointing: the same gradients, from less memory, and kills that leave no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.recipes.kills import check_kill
from support.recipes.peak_memory import Peak
from support.recipes.recipes import differences, script, undisturbed
from support.recipes.recorded import record
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "activation_checkpointing"
ARGUMENTS = ("--steps", "40", "--every-steps", "10")


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, shared: SharedRuns) -> None:
    check_kill(NAME, tmp_path, shared(NAME, ARGUMENTS, 2), ARGUMENTS, (12, 36), 2)


@pytest.mark.long
def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    with_it = undisturbed(NAME, tmp_path / "with", ("--steps", "20"), 2)
    without = undisturbed(NAME, tmp_path / "without", ("--steps", "20", "--no-again"), 2)
    changed = differences(with_it, without)
    record(NAME, "values that differ from training without it", len(changed), "")
    assert changed == []


def test_gradients_are_equal_and_memory_is_less() -> None:
    network = script(NAME).Network
    gradients, peaks = [], []
    for again in (True, False):
        torch.manual_seed(0)
        model = network(again)
        images, labels = torch.randn(512, 64), torch.randint(0, 10, (512,))
        with Peak() as memory:
            torch.nn.functional.cross_entropy(model(images), labels).backward()
        gradients.append([p.grad for p in model.parameters()])
        peaks.append(memory.peak)
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
    record(NAME, "peak of memory, by that without it", peaks[0] / peaks[1], "")
    assert peaks[0] < peaks[1] / 2, peaks
