"""Traces of recoveries on a cluster with nodes, sent by the operator's image to a collector that the chart names."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from support.e2e.driver import Job
from support.e2e.install import install

pytestmark = [pytest.mark.long, pytest.mark.kind, pytest.mark.alone]

STAGES = {"detect": "detectMs", "form": "rendezvousMs", "restore": "restoreMs", "first-step": "firstStepMs"}


def test_trace_of_a_lost_worker_reaches_the_collector_that_the_chart_names(new_job: Callable[..., Job]) -> None:
    from support.telemetry.collector import Collector  # noqa: PLC0415 - it loads OpenTelemetry

    job = new_job()
    collector = Collector(host=job.cluster.machine)
    with collector:
        try:
            install(job.cluster, f"traces.endpoint={collector.endpoint}")
            job.submit(job.elastic(steps=2000, pause=0.05))
            job.until_step(20)
            # By force: a worker that may leave in order is replaced first, which loses nobody.
            job.kubectl("delete", "pod", job.pod(1)["metadata"]["name"], "--force", "--grace-period=0")
            record = job.until_recovered()

            def sent() -> list[Any]:
                return [each for each in collector.recoveries() if {"form", "first-step"} <= each[1].keys()]

            ((root, children),) = job.wait("the trace of the recovery", sent, 60)
        finally:
            install(job.cluster)
    assert {name: children[name].milliseconds for name in STAGES if name in children} == {
        name: record[field] for name, field in STAGES.items() if name in children
    }
    ordered = list(children.values())
    assert (root.start, root.end) == (ordered[0].start, ordered[-1].end)
    assert all(before.end == after.start for before, after in pairwise(ordered))
    stored = json.loads(job.kubectl("get", "tjob", job.name, "-o", "json"))["metadata"]
    wanted = {
        "k8s.namespace.name": job.namespace, "everstep.job.name": job.name, "everstep.job.uid": stored["uid"],
        "everstep.recovery.cause": "PodDeleted", "everstep.recovery.worker": 1,
        "everstep.recovery.outcome": "recovered",
    }  # fmt: skip
    assert root.attributes.items() >= wanted.items()
    assert root.resource["service.name"] == "everstep-operator"
    assert str(root.resource["service.instance.id"]).startswith("everstep-"), "the replica that leads"
