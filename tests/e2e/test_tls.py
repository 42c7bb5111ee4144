"""TLS is switched on under a running job: its workers keep the plain address, those that come later have the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from everstep.contract import env
from support.e2e.driver import SYSTEM, Job
from support.e2e.install import LIMIT, RELEASE, helm, install

pytestmark = [pytest.mark.kind, pytest.mark.alone]

PAUSE = 0.05
REST = 180.0  # seconds of training for an upgrade, the helm test and a loss, on a machine that does much else


def schemes(job: Job) -> list[str]:
    """By which each worker reaches the operator."""
    found = []
    for _, pod in sorted(job.newest_pods().items()):
        variables: dict[str, Any] = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        scheme = str(variables[env.REPORT_URL]).partition(":")[0]
        assert (env.CA_CERTIFICATES in variables) == (scheme == "https")
        found.append(scheme)
    return found


@pytest.mark.long
def test_job_trains_on_while_tls_is_switched_on_and_workers_of_both_kinds_train_together(
    new_job: Callable[..., Job],
) -> None:
    job = new_job()
    job.apply(workers=3, steps=int(REST / PAUSE), pause=PAUSE, every=200, script="ledger")
    job.until_step(20)
    before, processes = job.containers(), job.told("start")
    assert schemes(job) == ["http"] * 3
    try:
        install(job.cluster, "tls.enabled=true")
        shown = helm(job.cluster, SYSTEM, "test", RELEASE, "--logs", "--timeout", LIMIT)
        assert "the operator answers at https://everstep.everstep-system.svc" in shown
        job.until_further(20)
        assert (job.containers(), job.told("start")) == (before, processes)
        job.delete_pod(1)
        job.until_recovered()
        assert sorted(schemes(job)) == ["http", "http", "https"]  # which number the other one has is not said
        second = new_job("encrypted")
        second.submit(second.elastic(steps=400, pause=PAUSE))
        second.until_step(20)
        second.delete_pod(0)
        second.until_recovered()
        second.until_complete()
        assert set(schemes(second)) == {"https"}
        job.until_complete(seconds=420)
        job.expect_undisturbed()
    finally:
        install(job.cluster)  # without TLS: a worker that has its address could not reach the operator any more
