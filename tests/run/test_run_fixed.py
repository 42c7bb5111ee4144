"""A fixed job under the default backend, in local mode: the operator's rounds, `everstep-run`, a script without the
session. Whoever is not lost keeps its pod."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.local.local_job import LocalJob
from support.scenarios.player import wait_for

pytestmark = pytest.mark.timeout(300)


def pods(job: LocalJob) -> set[str]:
    return {row["pod"] for row in job.view()["workers"]}


@pytest.mark.long
def test_fixed_job_waits_for_one_replaced_worker_and_ends_as_if_undisturbed(new_job: Callable[..., LocalJob]) -> None:
    job = new_job()
    job.apply(workers=2, steps=200, pause=0.02, every=20)
    job.until_step(20, "checkpoint.lastCommittedStep")
    job.delete_pod(1)
    job.until_recovered()
    assert {"digits-w0-0", "digits-w1-1"} <= pods(job)
    assert "digits-w0-1" not in pods(job), "the survivor kept its pod"
    job.until_complete()
    job.expect_undisturbed()
    job.expect_restarts("infrastructure", 1)
    job.expect_restarts("userCode", 0)


@pytest.mark.long
def test_fixed_job_is_scaled_while_it_runs_and_its_first_workers_keep_their_pods(
    new_job: Callable[..., LocalJob],
) -> None:
    job = new_job()
    job.apply(workers=2, steps=900, pause=0.02, every=20)
    job.until_step(20, "checkpoint.lastCommittedStep")
    job.scale(3)
    wait_for("a world of three", lambda: job.status()["world"].get("size") == 3, 120)
    assert pods(job) == {"digits-w0-0", "digits-w1-0", "digits-w2-0"}
    job.until_complete()
    job.expect_samples()
    job.expect_restarts("total", 0)
