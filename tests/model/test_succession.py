"""docs/adr/0072: what it costs if members form a round without the store, and that the store alone costs less."""

from __future__ import annotations

import pytest

from support.protocol.explorer import explore
from support.protocol.rules import SuccessionRule
from support.protocol.succession import Round, SuccessionModel, goes_on

LIMIT = 50_000
ALONE, NEEDS, TERM = SuccessionRule
TODAY = frozenset[SuccessionRule]()


@pytest.mark.parametrize("members", [2, 3, 4])
def test_store_alone_forms_one_world_and_whoever_is_left_goes_on(members: int) -> None:
    model = SuccessionModel(TODAY, members=members, faults=3)
    report = explore(model, LIMIT, lambda s: _stuck_beside_the_store(model, s))
    assert report.violation is None, report.describe()
    assert report.states > 50


@pytest.mark.parametrize("members", [3, 4])
def test_majority_that_forms_a_round_beside_the_store_trains_in_a_second_world(members: int) -> None:
    report = explore(SuccessionModel(frozenset({ALONE}), members=members), LIMIT)
    print(report.describe())
    assert report.violation is not None
    assert "two worlds train" in report.violation
    assert len(report.trace) == 3  # one cut, and each side forms


@pytest.mark.parametrize(("members", "trace"), [(2, ["member 0 dies"]), (4, ["member 0 dies", "member 1 dies"])])
def test_store_that_needs_a_majority_keeps_one_world_and_stops_where_half_is_lost(
    members: int, trace: list[str]
) -> None:
    model = SuccessionModel(frozenset({ALONE, NEEDS}), members=members)
    report = explore(model, LIMIT)
    assert report.violation is None, report.describe()

    def without_a_cut(s: Round) -> str | None:
        return _stuck_beside_the_store(model, s) if len(s.beside_store) == members else None

    stuck = explore(model, LIMIT, without_a_cut)
    print(stuck.describe())
    assert stuck.violation is not None
    assert "never train again" in stuck.violation
    assert list(stuck.trace) == trace


def test_term_for_which_the_store_waits_only_delays_the_second_world() -> None:
    """A world that formed within the term would have to stop at its end: then nothing is won beyond the term."""
    report = explore(SuccessionModel(frozenset({ALONE, TERM})), LIMIT)
    print(report.describe())
    assert report.violation is not None
    assert "two worlds train" in report.violation
    formed = ("the members form a world of [0, 1]", "the term is over", "the store forms a world of [2]")
    assert report.trace[1:] == formed


def _stuck_beside_the_store(model: SuccessionModel, s: Round) -> str | None:
    """The store runs or comes back, and members that reach it live, but nobody ever trains."""
    return goes_on(model, s, store_returns=True) if s.living & s.beside_store else None
