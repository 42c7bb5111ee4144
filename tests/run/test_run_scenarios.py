"""Every scenario of tests/scenarios in local mode: the same text as on a real cluster.

Most of them run on the real cluster each time, so here each time only the one in which local mode differs most from it,
whose nodes are simulated, and one that is not played there. Kills and sizes are in `test_run_robust.py` and the demo.
`make soak` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.local.local_job import LocalJob
from testcluster.s3 import S3Server

FOLDER = Path(__file__).resolve().parents[1] / "scenarios"
NEEDS_SERVER = "store_restarted_during_save"
EACH_TIME = {"node_killed", "elastic_example_every_pod_deleted_at_once"}
FASTER = 0.4  # of its pause: nothing in it waits for a cluster
SCENARIOS = [
    pytest.param(p, id=p.stem, marks=() if p.stem in EACH_TIME else pytest.mark.long)
    for p in sorted(FOLDER.glob("*.txt"))
    if p.stem != NEEDS_SERVER
]
pytestmark = [pytest.mark.timeout(300), pytest.mark.turns(3)]


@pytest.mark.parametrize("path", SCENARIOS)
def test_scenario_played_locally_ends_as_if_undisturbed(path: Path, new_job: Callable[..., LocalJob]) -> None:
    new_job(faster=FASTER if path.stem in EACH_TIME else 1.0).play(path.read_text())


@pytest.mark.long
@pytest.mark.s3
def test_scenario_with_a_store_that_restarts_ends_as_if_undisturbed(
    new_job: Callable[..., LocalJob], s3_server: S3Server
) -> None:
    new_job(s3_server).play((FOLDER / f"{NEEDS_SERVER}.txt").read_text())
