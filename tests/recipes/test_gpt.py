"""examples/gpt: bits and samples of an undisturbed run, an evaluation by all ranks, the schedule, and curves."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from support.recipes.kills import check_kill
from support.recipes.recipes import Ended, script
from support.recipes.recorded import record
from support.recipes.scalars import scalars
from support.recipes.shared import SharedRuns

pytestmark = pytest.mark.timeout(300)
NAME = "gpt"
STEPS = 120
ARGUMENTS = ("--steps", str(STEPS), "--every-steps", "20", "--evaluate-every", "40")


@pytest.fixture(scope="module")
def calm(shared: SharedRuns) -> Ended:
    return shared(NAME, ARGUMENTS)


@pytest.mark.long
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, calm: Ended) -> None:
    curves = tmp_path / "curves"
    hit = check_kill(NAME, tmp_path, calm, (*ARGUMENTS, "--curves", str(curves)), (25, 100))
    bits, sample = evaluations(hit.output)[STEPS]
    assert (bits, sample) == evaluations(calm.output)[STEPS]
    assert hit.state["rate"]["_last_lr"] == pytest.approx([0.1 * 3e-3]), "the cosine ends at a tenth"
    record(NAME, f"bits a character on unseen text after {STEPS} steps", bits, "", expected=None)
    check_curves(curves, calm)
    assert bits < entropy(Path(os.__file__).read_text()), "frequencies of characters would predict as well"


def test_three_ranks_measure_what_one_measures(calm: Ended) -> None:
    train = script(NAME)
    model = train.Transformer()
    model.load_state_dict(calm.state["model"])
    data = train.pieces(Path(os.__file__).read_text())
    with torch.no_grad():
        alone = train.loss_of(model, data[: len(data) // 10]).item() / math.log(2)
    together = evaluations(calm.output)[STEPS][0]
    record(NAME, "difference of three ranks' evaluation from that of one", abs(alone - together), "bits a character")
    assert together == pytest.approx(alone, abs=2e-4)


def check_curves(folder: Path, calm: Ended) -> None:
    """Over the loss of rank 0 each step is logged once, with the rate of the schedule, and so is each evaluation. The
    step in which it was lost may be missing, as docs/how-to-trackers.md says: the new rank 0 has not seen it."""
    rates = dict(scalars(folder / "training", "rate"))
    steps = [step for step, _ in scalars(folder / "training", "loss")]
    record(NAME, f"steps of {STEPS} that the curve of a killed run has once", len(set(steps)), "", expected=STEPS)
    assert steps == sorted(set(steps))
    assert len(set(range(1, STEPS + 1)) - set(steps)) <= 1
    for step, rate in rates.items():
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / STEPS)
        assert rate == pytest.approx(3e-3 * min((step + 1) / 20, cosine)), step
    measured = scalars(folder / "evaluation", "bits")
    assert [(step, round(bits, 4)) for step, bits in measured] == [
        (step, bits) for step, (bits, _) in evaluations(calm.output).items()
    ]


def evaluations(output: str) -> dict[int, tuple[float, str]]:
    """By step: bits a character, and what was sampled."""
    found = re.findall(r"step (\d+): ([\d.]+) bits a character; (.+)", output)
    return {int(step): (float(bits), sample.strip()) for step, bits, sample in found}


def entropy(text: str) -> float:
    """Bits a character, of one that is drawn by its frequency."""
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)
