"""Which rank is slow, from what each needs in a step of its own (failure 64). Pure; a job that has a slow rank is in
`tests/agent/test_agent_slow.py`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy as copy
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.train.coordination.straggler import (
    EVERY,
    FIRST,
    Cause,
    NoStraggler,
    Pace,
    Straggler,
    StragglerDetector,
    slowest,
)


def compared(
    ranks: int,
    own: dict[int, float],
    steps: int,
    change: dict[int, dict[int, float]],
    fetches: dict[int, float] | None = None,
    noise: Callable[[int, int], float] = lambda _, __: 1.0,
) -> list[list[object]]:
    """What each rank says after each step, where ranks need `own` seconds (1 if nothing is said), by `noise` times, and
    wait for the slowest; `change`: of `own` after a step; `fetches`: for batches, of their own time."""
    now = [0.0]
    paces = [StragglerDetector(lambda: now[0]) for _ in range(ranks)]
    waited = [0.0] * ranks
    fetched = [0.0] * ranks
    said: list[list[object]] = [[] for _ in range(ranks)]
    for step in range(steps):
        own = change.get(step, own)
        needs = [own.get(rank, 1.0) * noise(step, rank) for rank in range(ranks)]
        now[0] += max(needs)
        for rank in range(ranks):
            waited[rank] += max(needs) - needs[rank]
            fetched[rank] += (fetches or {}).get(rank, 0.01 if fetches is not None else 0.0)
        numbers: list[Sequence[int]] = []
        for rank, pace in enumerate(paces):  # what each would say, before anybody hears it
            copy(pace).completed(waited[rank], fetched[rank], partial(_note, numbers))
        for rank, pace in enumerate(paces):
            found = pace.completed(waited[rank], fetched[rank], lambda _, numbers=numbers: numbers)  # type: ignore[misc]
            if found is not None:
                said[rank].append((step + 1, found))
    return said


def _note(numbers: list[Sequence[int]], mine: Sequence[int]) -> list[Sequence[int]]:
    numbers.append(mine)
    return [mine]


def test_a_rank_that_is_five_times_slower_is_named_once_by_all_and_its_end_too() -> None:
    said = compared(3, {1: 5.0}, 8 * EVERY, {200: {}})
    assert said[0] == [(2 * FIRST, Straggler(1, 5.0, 1.0, None)), (4 * EVERY, NoStraggler())]
    assert said[1] == said[0] == said[2]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_that_is_a_little_slower_in_each_step_is_named_within_64_steps(ranks: int) -> None:
    said: Any = compared(ranks, {1: 1.3}, EVERY, {})
    for ((step, straggler),) in said:
        assert (step, straggler.rank, straggler.cause) == (EVERY, 1, None)
        assert (straggler.own, straggler.others) == (pytest.approx(1.3, abs=1e-3), pytest.approx(1.0, abs=1e-3))


@pytest.mark.parametrize(("fetches", "cause"), [({1: 0.3}, Cause.INPUT), ({1: 0.05}, Cause.COMPUTE)])
def test_slow_rank_is_named_with_where_its_time_goes(fetches: dict[int, float], cause: Cause) -> None:
    said: Any = compared(3, {1: 1.4}, EVERY, {}, fetches)[0]
    (_, straggler) = said[0]
    assert isinstance(straggler, Straggler)
    assert straggler.cause is cause
    assert ("waits longer for its next batch" in str(straggler)) == (cause is Cause.INPUT)


def test_the_own_time_is_what_is_left_of_a_step_without_its_waits() -> None:
    now = [0.0]
    pace = StragglerDetector(lambda: now[0])
    numbers: list[Sequence[int]] = []
    for step in range(1, FIRST + 1):
        now[0] += 1.0
        pace.completed(0.75 * step, 0.125 * step, partial(_note, numbers))
    assert numbers == [(250_000, 250_000, 250_000, 125_000, 1_000_000)]


def test_a_rank_that_is_hardly_slower_or_slow_for_a_moment_is_not_named() -> None:
    assert compared(3, {1: 1.2}, 4 * EVERY, {}) == [[], [], []]
    assert compared(3, {}, 4 * EVERY, {EVERY - 1: {1: 50.0}, EVERY: {}}) == [[], [], []]
    assert compared(3, {1: 2.0}, 4 * EVERY, {30: {}}) == [[], [], []]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 8))
def test_ranks_whose_steps_differ_by_chance_are_not_named(seed: int, ranks: int) -> None:
    """Each step of each rank takes once to three times as long as the quickest: a loaded machine."""
    chance = random.Random(seed)
    assert compared(ranks, {}, 2 * EVERY, {}, noise=lambda _, __: 1 + 2 * chance.random()) == [[]] * ranks


def test_difference_that_is_not_felt_in_a_step_is_not_named() -> None:
    rest, mine = Pace(0.020, 0.020, 0.020, 0.0, 1.0), Pace(0.030, 0.030, 0.030, 0.0, 1.0)
    assert slowest([rest, mine, rest], EVERY) is None
    short = [Pace(p.own, p.quick, p.late, p.input, 0.05) for p in (rest, mine, rest)]
    assert slowest(short, EVERY) == Straggler(1, 0.030, 0.020, None)


def test_the_slow_rank_of_another_world_is_another() -> None:
    pace = StragglerDetector(lambda: 0.0)
    for number in range(2):
        pace.moved(0.0, 0.0)
        rows = [[9_000_000 * (r == number)] * 5 for r in range(3)]
        said = [pace.completed(0.0, 0.0, lambda _, rows=rows: rows) for _ in range(64)]  # type: ignore[misc]
        assert [s.rank for s in said if isinstance(s, Straggler)] == [number]


@given(st.lists(st.floats(0, 100), min_size=0, max_size=9), st.integers(1, EVERY))
def test_at_most_one_rank_is_named_and_it_is_the_slowest(own: list[float], steps: int) -> None:
    found = slowest([Pace(s, s, s, 0.0, 100.0) for s in own], steps)
    assert found is None or (found.own == max(own) == own[found.rank] and found.own > 1.25 * found.others)
