"""Ranks that come to different places of a loop over epochs are told so there, and a later process waits for nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from everstep.recovery.errors import LoopError
from everstep.train.between_steps import check_location
from everstep.train.nested_loops import STEPS, NestedLoops, Spot

Gather = Callable[[Sequence[int]], list[tuple[int, ...]]]


def all_come(places: list[tuple[str, str]]) -> list[str]:
    """What each rank is told."""
    barrier = threading.Barrier(len(places), timeout=20)
    told: list[tuple[int, ...]] = [()] * len(places)

    def gather_as(rank: int) -> Gather:
        def gather(values: Sequence[int]) -> list[tuple[int, ...]]:
            told[rank] = tuple(values)
            barrier.wait()
            found = list(told)
            barrier.wait()
            return found

        return gather

    def come(rank: int) -> str:
        try:
            check_location(*places[rank], gather_as(rank))
        except LoopError as e:
            return str(e)
        return ""

    with ThreadPoolExecutor(len(places)) as ranks:
        return list(ranks.map(come, range(len(places))))


def test_ranks_at_one_place_go_on_whatever_their_lines_are() -> None:
    assert all_come([("the end", "a.py:1"), ("the end", "a.py:2")]) == ["", ""]


def test_ranks_at_different_places_are_all_told_both_lines() -> None:
    evaluation, steps = ("evaluation 0", "run.evaluate(test) (a.py:7)"), ("steps", "the steps (a.py:9)")
    told = all_come([steps, steps, evaluation])
    assert len(set(told)) == 1
    assert told[0].startswith("rank 1 is at the steps (a.py:9), and rank 2 at run.evaluate(test) (a.py:7): each would")


def looping(spot: Spot) -> NestedLoops:
    """In its outer loop, with the state at `spot`."""
    loops = NestedLoops()
    loops.begin(cast(Any, SimpleNamespace(epoch=spot.epoch, epoch_begins=True)), {})
    loops._come(spot)
    loops.epoch()
    return loops


def test_each_place_of_an_epoch_has_a_name_of_its_own() -> None:
    loops, names = looping(Spot(3)), []
    for come in (loops.evaluates, loops.steps_begin, loops.evaluates):
        come()
        names.append(loops.arrives_at)
        if come == loops.evaluates:
            loops.evaluated()
    assert names == ["evaluation 0 of epoch 3", "the steps of epoch 3", "evaluation 1 of epoch 3"]


@pytest.mark.parametrize("spot", [Spot(3, STEPS), Spot(3, STEPS + 1)])
def test_process_that_joins_others_at_a_place_meets_nobody_there(spot: Spot) -> None:
    """They have met before it came, and now are in the steps, or in the evaluation."""
    loops = looping(spot)
    loops.steps_begin()
    assert loops.arrives_at is None
    if spot.position > STEPS:
        assert loops.evaluates()
        assert loops.arrives_at is None
