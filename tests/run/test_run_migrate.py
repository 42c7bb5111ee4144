"""A worker that a person moves: another one first, and no step is repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.local.local_job import LocalJob
from support.scenarios.lines import Asked

pytestmark = pytest.mark.timeout(300)


@pytest.mark.long
def test_worker_of_a_job_of_a_fixed_size_moves_without_a_repeated_step(new_job: Callable[..., LocalJob]) -> None:
    job = new_job()
    job.ask_for(Asked.parse(["workers=2", "script=ledger", "steps=700", "pause=0.05", "every=100"]))
    job.until_step(20)
    moved, _ = job.pod_names()

    def migrate() -> None:
        job.ask("migrate", pod=moved)

    job.inject(migrate)
    job.until_recovered()
    job.expect_rung("migrate")
    job.expect_repeated(0)
    roster = job.status()["roster"]
    assert [(each["first"], each["last"]) for each in roster["workers"]] == [(1, 2)]
    job.until_complete()
    job.expect_outcome()
    job.expect_restarts("total", 0)
