"""What scripts ask of a run before its first step, compared between ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from everstep.recovery.errors import LoopError
from everstep.recovery.forming import same_calls
from everstep.recovery.state.shape import MODEL, Shape
from everstep.train.guards import calls_before_steps

START = "everstep.start(a checkpoint URL, every_steps=4, rng=True, compare_gradients=True) (train.py:3)"
STEPS = "run.steps(a loader, until=12, epochs=None) (train.py:9)"


class Mesh:
    def __init__(self, place: int) -> None:
        self._place = place

    def get_local_rank(self, name: str) -> int:
        assert name == MODEL
        return self._place


def told(*calls: str) -> str:
    return "\n".join(calls)


@pytest.mark.parametrize(
    ("mine", "other", "one", "two"),
    [
        ([START, "run.evaluate(validate, every=4) (train.py:5)", STEPS], [START, STEPS],
         r"run\.evaluate\(validate, every=4\) \(train\.py:5\)", r"run\.steps\(.*\) \(train\.py:9\)"),
        ([START, STEPS], [START, STEPS, "run.once(download) (train.py:12)"], "nothing in its place", "run.once"),
        (["run.once(a) (t.py:1)", "run.once(b) (t.py:2)"], ["run.once(b) (t.py:2)", "run.once(a) (t.py:1)"],
         r"run\.once\(a\) \(t\.py:1\)", r"run\.once\(b\) \(t\.py:2\)"),
        ([STEPS], [STEPS.replace("12", "10")], "until=12", "until=10"),
    ],
)  # fmt: skip
def test_calls_that_differ_are_refused_with_both_lines(mine: list[str], other: list[str], one: str, two: str) -> None:
    with pytest.raises(LoopError, match=f"rank 0's script made .*{one}.*, and rank 2's .*{two}.*, before its first"):
        same_calls.check([told(*mine), told(*mine), told(*other)])


def test_calls_at_other_lines_are_the_same() -> None:
    same_calls.check([STEPS, STEPS.replace(":9", ":11")])


def test_each_rank_hears_of_the_same_difference() -> None:
    said = [told(START, STEPS), told(START, "run.once(ä) (t.py:1)", STEPS)]
    rounds: list[list[tuple[int, ...]]] = [[], []]
    here = threading.Barrier(2)

    def rank(number: int) -> str:
        def gather(values: Sequence[int]) -> list[tuple[int, ...]]:
            rounds[number].append(tuple(values))
            here.wait(30)
            return [told[-1] for told in rounds]

        def gather_in_step(values: Sequence[int]) -> list[tuple[int, ...]]:
            found = gather(values)
            here.wait(30)
            return found

        with pytest.raises(LoopError) as caught:
            same_calls.check_gathered(said[number], gather_in_step)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert first == second
    assert "run.once(ä) (t.py:1)" in first


def test_places_may_track_other_modules_and_optimizers_and_nothing_else() -> None:
    module, optimizer = torch.nn.Linear(1, 1), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])

    def tracked(place: int, **state: object) -> str:
        return told(*calls_before_steps.of_state(state, Shape(MODEL, 2), Mesh(place)))

    first, second = tracked(0, model=module), tracked(1, model=module, head=optimizer)
    same_calls.check([first, second, first, second])
    with pytest.raises(LoopError, match=r"rank 1's script made at place 1 .*head.*, and rank 3's at place 1 "):
        same_calls.check([first, second, first, tracked(1, model=module)])
    with pytest.raises(LoopError, match=r"rank 0's script made run\.track\(\), and rank 1's run\.track\(seen\)"):
        same_calls.check([first, tracked(1, model=module, seen={})])
    with pytest.raises(LoopError, match=r"run\.track\(head, model\)"):
        same_calls.check(
            [
                told(*calls_before_steps.of_state({"model": module, **more}, Shape(), None))
                for more in ({}, {"head": {}})
            ]
        )


def test_function_is_named_as_it_is_written() -> None:
    assert calls_before_steps.name_of(partial(partial(told, 1), 2)) == "told"  # type: ignore[arg-type]
    assert calls_before_steps.name_of(Mesh(1)) == "Mesh"


def test_line_is_that_of_the_script() -> None:
    assert calls_before_steps.call("run.once(fn)", sys._getframe()).startswith(
        "run.once(fn) (test_calls_before_steps.py:"
    )
