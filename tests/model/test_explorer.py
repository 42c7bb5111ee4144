"""The explorer finds what is there to be found: all states, the shortest trace, and its own limit."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import pytest

from support.protocol.explorer import TooManyStatesError, explore


class Jugs:
    """Two jugs of 3 and 5 litres and a tap; measuring 4 litres takes six steps, and no fewer."""

    def __init__(self, forbidden: int = 4) -> None:
        self.forbidden = forbidden

    def initial(self) -> tuple[int, int]:
        return (0, 0)

    def canonical(self, state: tuple[int, int]) -> Hashable:
        return state

    def actions(self, state: tuple[int, int]) -> Iterator[tuple[str, tuple[int, int]]]:
        a, b = state
        yield "fill 3", (3, b)
        yield "fill 5", (a, 5)
        yield "empty 3", (0, b)
        yield "empty 5", (a, 0)
        yield "3 into 5", (a - min(a, 5 - b), b + min(a, 5 - b))
        yield "5 into 3", (a + min(b, 3 - a), b - min(b, 3 - a))

    def violation(self, state: tuple[int, int]) -> str | None:
        return "measured" if state[1] == self.forbidden else None


def test_violation_within_reach_is_found_with_the_shortest_trace() -> None:
    report = explore(Jugs(), max_states=100)
    assert report.violation == "measured"
    assert report.trace == ("fill 5", "5 into 3", "empty 3", "5 into 3", "fill 5", "5 into 3")


def test_model_without_violation_is_visited_to_the_last_state() -> None:
    report = explore(Jugs(forbidden=6), max_states=100)
    assert report.violation is None
    assert report.states == 16  # of 24 pairs, those with a jug full or empty


def test_check_of_each_state_that_fails_is_reported_like_a_violation() -> None:
    report = explore(Jugs(forbidden=6), 100, lambda s: "both full" if s == (3, 5) else None)
    assert (report.violation, len(report.trace)) == ("both full", 2)


def test_more_states_than_the_limit_is_an_error_and_not_a_pass() -> None:
    with pytest.raises(TooManyStatesError):
        explore(Jugs(forbidden=6), max_states=15)
