"""How a job ends and where its workers live, on real kubelets: worker 0 decides, or the nodes' own network."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from support.e2e.driver import Job
from support.e2e.install import install
from support.scenarios.lines import Asked

pytestmark = [pytest.mark.kind, pytest.mark.long]

# Worker 0 is the learner; the others serve it, and never end by themselves.
ROLES = 'if [ "$EVERSTEP_WORKER_INDEX" = 0 ]; then sleep 3; echo learned; else exec sleep infinity; fi'


def test_job_is_complete_when_worker_0_has_succeeded_and_the_others_are_ended(new_job: Callable[..., Job]) -> None:
    job = new_job()
    manifest = job.elastic(steps=1, pause=0.0)
    spec = manifest["spec"]
    del spec["elastic"], spec["checkpoint"]
    spec |= {"replicas": 3, "successPolicy": "Worker0"}
    spec["template"]["spec"]["containers"][0]["command"] = ["sh", "-c", ROLES]
    spec["template"]["spec"]["terminationGracePeriodSeconds"] = 2
    job.submit(manifest)
    job.until_complete(120)
    job.expect_ended()
    (complete,) = [c for c in job.status()["conditions"] if c["type"] == "Complete"]
    assert "worker 0 succeeded" in complete["message"]
    assert job.status()["restarts"].get("total", 0) == 0


@pytest.mark.alone
def test_workers_in_their_nodes_network_train_and_recover(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.asked = Asked(3, 600, 0.05, 100, launcher="everstep-run", script="ledger")
    job.workers, job.sizes_seen = 3, {3}
    manifest = job.manifest(job.asked)
    manifest["spec"]["template"]["spec"]["hostNetwork"] = True
    refused = job.cluster.kubectl("-n", job.namespace, "apply", "-f", "-", input=json.dumps(manifest))
    assert refused.returncode != 0
    assert "policy.allowHostNetwork" in refused.stderr
    try:
        install(job.cluster, "policy.allowHostNetwork=true")
        job.submit(manifest)
        job.until_step(20)
        addresses = [(pod["status"]["podIP"], pod["status"]["hostIP"]) for pod in job.pods()]
        assert len(addresses) == 3
        assert all(of_pod == of_node for of_pod, of_node in addresses)
        job.delete_pod(1)
        job.until_recovered()
        job.until_complete()
        job.expect_undisturbed()
    finally:
        install(job.cluster)
