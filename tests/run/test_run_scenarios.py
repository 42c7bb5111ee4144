"""Every scenario of tests/scenarios in local mode: the same text as on a real cluster.

`make nightly` plays them. `make test` has kills and sizes in the demo.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.local.local_job import LocalJob
from testcluster.s3 import S3Server

FOLDER = Path(__file__).resolve().parents[1] / "scenarios"
NEEDS_SERVER = "store_restarted_during_save"
SCENARIOS = [pytest.param(p, id=p.stem) for p in sorted(FOLDER.glob("*.txt")) if p.stem != NEEDS_SERVER]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
@pytest.mark.parametrize("path", SCENARIOS)
def test_scenario_played_locally_ends_as_if_undisturbed(path: Path, new_job: Callable[..., LocalJob]) -> None:
    new_job().play(path.read_text())


@pytest.mark.long
@pytest.mark.s3
def test_scenario_with_a_store_that_restarts_ends_as_if_undisturbed(
    new_job: Callable[..., LocalJob], s3_server: S3Server
) -> None:
    new_job(s3_server).play((FOLDER / f"{NEEDS_SERVER}.txt").read_text())
