"""Every scenario of tests/scenarios on a cluster with real nodes; `make soak` has those of `LATER`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.e2e.driver import Job, takes_from_others

SCENARIOS = sorted((Path(__file__).resolve().parents[1] / "scenarios").glob("*.txt"))
# What `make test` plays elsewhere, in this order: c10d in test_restarts.py and `torchrun_killed`, and nothing is done
# to this job; the suspension of a fixed job in test_gate.py and test_restarts.py; in local mode.
LATER = {"plain_two_workers", "suspended_and_resumed", "elastic_example_every_pod_deleted_at_once"}


def marks(path: Path) -> list[pytest.MarkDecorator]:
    later = [pytest.mark.long] if path.stem in LATER else []
    return [*later, pytest.mark.alone] if takes_from_others(path.read_text()) else later


@pytest.mark.kind
@pytest.mark.turns(4)
@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem, marks=marks(p)) for p in SCENARIOS])
def test_scenario_played_ends_as_if_undisturbed(path: Path, new_job: Callable[..., Job]) -> None:
    new_job().play(path.read_text())
