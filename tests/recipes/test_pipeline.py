"""examples/pipeline: the model's own loss, the bubble of the schedule, and kills that leave no trace."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from support.recipes.kills import check_kill
from support.recipes.recipes import PROGRAMS, undisturbed
from support.recipes.recorded import record

pytestmark = pytest.mark.timeout(300)
NAME = "pipeline"
ARGUMENTS = ("--steps", "60", "--every-steps", "20")


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, schedule: str) -> None:
    arguments = (*ARGUMENTS, "--schedule", schedule)
    calm = undisturbed(NAME, tmp_path / "calm", arguments, processes=4)
    figure = "values that a kill changes (1f1b)" if schedule == "1f1b" else ""
    seed = NAME + schedule
    check_kill(NAME, tmp_path / "hit", calm, arguments, (15, 40), 4, seed=seed, figure=figure, restarts=4)


@pytest.mark.long_but("interleaved")
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_loss_is_that_of_the_model_in_one_piece(tmp_path: Path, schedule: str) -> None:
    """By the parameters that twenty steps make of it."""
    whole = undisturbed(NAME, tmp_path / "whole", ("--steps", "20"), 1, [PROGRAMS / "whole_model.py"])
    divided = undisturbed(NAME, tmp_path / "divided", ("--steps", "20", "--schedule", schedule), 2)
    found = {}
    for place in range(2):
        for name, value in divided.state[f"model@{place}of2"].items():
            found[_in_whole(name, place, schedule)] = value
    expected = whole.state["model"]
    assert found.keys() == expected.keys()
    if schedule == "interleaved":
        furthest = max(float((found[name] - value).abs().max()) for name, value in expected.items())
        record(NAME, "largest difference of a parameter from the model in one piece (interleaved)", furthest, "")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_replica_of_one_rank_has_the_model_in_one_piece(tmp_path: Path, schedule: str) -> None:
    whole = undisturbed(NAME, tmp_path / "whole", ("--steps", "20"), 1, [PROGRAMS / "whole_model.py"])
    arguments = ("--steps", "20", "--stages", "1", "--schedule", schedule)
    alone = undisturbed(NAME, tmp_path / "alone", arguments, 2)
    pairs = list(zip(alone.state["model"].values(), whole.state["model"].values(), strict=True))
    assert pairs
    for found, expected in pairs:  # in the order of the layers
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def _in_whole(name: str, place: int, schedule: str) -> str:
    """`module.part.layer.weight` of a rank, in the model that has all parts in a row."""
    module, part, rest = name.split(".", 2)
    index = int(module) * 2 + place if schedule == "interleaved" else place * 2 + int(part)
    return f"{index}.{rest}"


@pytest.mark.long
def test_a_rank_is_idle_as_long_as_the_schedule_says(tmp_path: Path) -> None:
    """(p - 1) / (m + p - 1) of a step, of p stages and m micro-batches: exactly, by the order of the passes. By the
    clock, a rank that comes later to a step than the other is idle for less of it; so the more idle one is held to its
    least. A machine with other work adds to that."""
    most = []
    for micro_batches in (2, 8):
        script = [PROGRAMS / "pipeline_bubble.py"]
        ended = undisturbed(NAME, tmp_path / str(micro_batches), (str(micro_batches),), 2, script)
        idle = [float(n) for n in re.findall(r"idle ([\d.]+)", ended.output)]
        assert len(idle) == 2, ended.output
        orders = dict(re.findall(r"stage (\d) order ([FB]+)", ended.output))
        assert idle_share([orders["0"], orders["1"]]) == Fraction(1, micro_batches + 1), orders
        share, figure = 1 / (micro_batches + 1), f"2 stages with {micro_batches} micro-batches (1f1b)"
        record(NAME, f"largest idle share of {figure}", max(idle), "", expected=share)
        assert max(idle) > share - 0.02
        most.append(max(idle))
    assert most[1] < most[0], "more micro-batches leave less idle"


def idle_share(orders: list[str]) -> Fraction:
    """The share of a step in which a stage has nothing to do. `orders`: by stage, its forward (F) and backward (B)
    passes; each takes one unit of time, and sending takes none."""
    ended: dict[tuple[str, int, int], int] = {}  # by pass, micro-batch and stage
    clocks, todo = [0] * len(orders), [list(order) for order in orders]
    while any(todo):
        before = len(ended)
        for stage, order in enumerate(orders):
            while todo[stage]:
                kind, done = todo[stage][0], len(order) - len(todo[stage])
                batch = order[:done].count(kind)
                source = stage - 1 if kind == "F" else stage + 1  # whose result this pass needs
                if 0 <= source < len(orders) and (kind, batch, source) not in ended:
                    break
                clocks[stage] = max(clocks[stage], ended.get((kind, batch, source), 0)) + 1
                ended[kind, batch, stage] = clocks[stage]
                todo[stage].pop(0)
        assert len(ended) > before, f"the stages wait for each other: {orders}"
    return 1 - Fraction(len(orders[0]), max(clocks))
