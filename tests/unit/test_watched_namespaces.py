"""An operator that watches some namespaces, or may not read nodes, over an API server in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everstep_local.apiserver.faults import Faults, Refuse
from everstep_operator.kube.resources import NODES, PODS, Resource
from everstep_operator.main import JOBS
from support.operator.operator_stage import JOB, SETTINGS, Stage, replaced

WATCHED = replace(SETTINGS, watch_namespaces=("default", "team-b"))
BLIND = replace(SETTINGS, read_nodes=False)


async def create(stage: Stage, namespace: str, name: str) -> None:
    await stage.client.create(JOBS, namespace, {**JOB, "metadata": {"name": name}})


async def made(stage: Stage, namespace: str) -> list[str]:
    return [each.metadata.name for each in (await stage.client.list(PODS, namespace)).items]


async def test_jobs_of_the_watched_namespaces_get_pods_and_others_are_not_even_read() -> None:
    stage = Stage()
    for namespace in ("team-a", "team-b"):
        stage.cluster.create_namespace(namespace)
    for namespace in ("default", "team-a", "team-b"):
        await create(stage, namespace, "digits")
    async with stage.operating(WATCHED) as operator:

        async def both() -> bool:
            return [len(await made(stage, namespace)) for namespace in ("default", "team-b")] == [3, 3]

        await stage.until("both jobs have their pods", both)
        assert await made(stage, "team-a") == []
        assert [job.key for job in operator.caches.jobs.list()] == [("default", "digits"), ("team-b", "digits")]
        assert operator.caches.jobs.get("team-a", "digits") is None
        assert {pod.metadata.namespace for pod in operator.caches.pods.list()} == {"default", "team-b"}


@pytest.mark.parametrize("refused", [JOBS, PODS], ids=["jobs", "pods"])
async def test_namespace_that_may_not_be_listed_keeps_the_operator_from_no_other(refused: Resource[Any]) -> None:
    """Its jobs are known when all is listed: with its jobs and without its pods every worker would count as lost."""
    faults = Faults()
    rule = faults.add(Refuse(403), "list", resource=refused, namespace="team-b")
    stage = Stage(faults)
    stage.cluster.create_namespace("team-b")
    for namespace in ("default", "team-b"):
        await create(stage, namespace, "digits")
    async with stage.operating(WATCHED) as operator:
        await stage.until("it leads", operator.elector.is_leader)
        assert operator.caches.waiting() is None
        assert operator.caches.jobs.get("team-b", "digits") is None
        faults.remove(rule)

        async def has_pods() -> bool:
            return len(await made(stage, "team-b")) == 3

        await stage.until("the other namespace's job has its pods", has_pods)


async def test_operator_that_may_not_read_nodes_reads_none_and_replaces_a_worker_whose_pod_is_deleted() -> None:
    faults = Faults()
    faults.add(Refuse(403), "list", resource=NODES)
    stage = Stage(faults)
    await create(stage, "default", "digits")
    async with stage.operating(BLIND) as operator:
        await stage.until("three pods run", lambda: replaced(stage, "digits-w2-0"))
        assert operator.caches.nodes is None
        # A minute after its creation: a node that is not there would have been taken for lost.
        await stage.clock.advance(60)
        assert sorted(await stage.pods()) == ["digits-w0-0", "digits-w1-0", "digits-w2-0"]
        await stage.client.delete(PODS, "default", "digits-w1-0")
        await stage.until("it is replaced", lambda: replaced(stage, "digits-w1-1"))
