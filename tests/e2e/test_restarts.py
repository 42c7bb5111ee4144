"""A job that is restarted as a whole goes on: support.scenarios.rows, on a cluster with real nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.e2e.driver import Job, takes_from_others
from support.scenarios.rows import ROWS, Row


def marks(row: Row) -> list[pytest.MarkDecorator]:
    return [pytest.mark.alone] if takes_from_others(row.text()) else []


@pytest.mark.long
@pytest.mark.kind
@pytest.mark.parametrize("row", [pytest.param(row, id=str(row), marks=marks(row)) for row in ROWS])
def test_job_restarted_as_a_whole_ends_as_if_undisturbed(row: Row, new_job: Callable[..., Job]) -> None:
    new_job().play(row.text())
