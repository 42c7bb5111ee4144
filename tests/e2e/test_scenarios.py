"""Every scenario of tests/scenarios on a cluster with real nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.e2e.driver import Job, takes_from_others

SCENARIOS = sorted((Path(__file__).resolve().parents[1] / "scenarios").glob("*.txt"))


def marks(path: Path) -> list[pytest.MarkDecorator]:
    return [pytest.mark.alone] if takes_from_others(path.read_text()) else []


@pytest.mark.long
@pytest.mark.kind
@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem, marks=marks(p)) for p in SCENARIOS])
def test_scenario_played_ends_as_if_undisturbed(path: Path, new_job: Callable[..., Job]) -> None:
    new_job().play(path.read_text())
