"""Which rank is slow, from what each needs in a step of its own (failure 64). Pure; a job that has a slow rank is in
`tests/agent/test_agent_slow.py`."""

from __future__ import annotations

from copy import deepcopy as copy
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from everstep.train.coordination.straggler import EVERY, FIRST, NoStraggler, Straggler, StragglerDetector, slowest


def compared(ranks: int, own: dict[int, float], steps: int, change: dict[int, dict[int, float]]) -> list[list[object]]:
    """What each rank says after each step, where ranks need `own` seconds (1 if nothing is said) and wait for the
    slowest; `change`: of `own` after a step."""
    now = [0.0]
    paces = [StragglerDetector(lambda: now[0]) for _ in range(ranks)]
    waited = [0.0] * ranks
    said: list[list[object]] = [[] for _ in range(ranks)]
    for step in range(steps):
        own = change.get(step, own)
        needs = [own.get(rank, 1.0) for rank in range(ranks)]
        now[0] += max(needs)
        for rank in range(ranks):
            waited[rank] += max(needs) - needs[rank]
        numbers: list[int] = []
        for rank, pace in enumerate(paces):  # what each would say, before anybody hears it
            copy(pace).completed(waited[rank], partial(_note, numbers))
        for rank, pace in enumerate(paces):
            found = pace.completed(waited[rank], lambda _, numbers=numbers: numbers)  # type: ignore[misc]
            if found is not None:
                said[rank].append((step + 1, found))
    return said


def _note(numbers: list[int], number: int) -> list[int]:
    numbers.append(number)
    return numbers


def test_a_rank_that_is_five_times_slower_is_named_once_by_all_and_its_end_too() -> None:
    said = compared(3, {1: 5.0}, 8 * EVERY, {200: {}})
    assert said[0] == [(2 * FIRST, Straggler(1, 5.0, 1.0)), (4 * EVERY, NoStraggler())]
    assert said[1] == said[0] == said[2]


def test_the_own_time_is_what_is_left_of_a_step_without_its_waits() -> None:
    now = [0.0]
    pace = StragglerDetector(lambda: now[0])
    numbers: list[int] = []
    for step in range(1, FIRST + 1):
        now[0] += 1.0
        pace.completed(0.75 * step, partial(_note, numbers))
    assert numbers == [250_000]


def test_a_rank_that_is_a_little_slower_or_slow_for_a_moment_is_not_named() -> None:
    assert compared(3, {1: 2.0}, 4 * EVERY, {}) == [[], [], []]
    assert compared(3, {}, 4 * EVERY, {EVERY - 1: {1: 50.0}, EVERY: {}}) == [[], [], []]


def test_the_slow_rank_of_another_world_is_another() -> None:
    pace = StragglerDetector(lambda: 0.0)
    for number in range(2):
        pace.moved(0.0)
        said = [pace.completed(0.0, lambda _, n=number: [9_000_000 * (r == n) for r in range(3)]) for _ in range(64)]  # type: ignore[misc]
        assert [s.rank for s in said if isinstance(s, Straggler)] == [number]


@given(st.lists(st.floats(0, 100), min_size=0, max_size=9))
def test_at_most_one_rank_is_named_and_it_is_the_slowest(own: list[float]) -> None:
    found = slowest(own)
    assert found is None or (found.own == max(own) == own[found.rank] and found.own > 2.5 * found.others)
