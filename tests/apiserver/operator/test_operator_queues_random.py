"""A job of a queue under random resizes, evictions, losses and deaths of its operator, with Kueue's own account as the
measure: its pods never have more than quota is taken for, and at rest exactly that, and all that is to be had.

Kueue's webhooks refuse what its controller takes. A control plane without nodes does not call them, so each change of a
Workload is checked against their rules here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest

from everstep_operator.controller.queues import workload_view
from everstep_operator.kube.errors import KubeError, NotFound
from everstep_operator.kube.resources import PODS, QUEUES, WORKLOADS, Resource
from everstep_operator.kube.wire import Unstructured
from support.apiserver.operators import Operators, Place
from support.apiserver.queues import Queue, make_queue
from support.conformity.bodies import BINDINGS
from testcluster.controlplane import ControlPlane
from testcluster.kueue import Kueue

pytestmark = [pytest.mark.apiserver, pytest.mark.usefixtures("kueue_programs")]

CPUS = 6
SECONDS = 60.0  # without any change, until what is not at rest counts as stuck: a busy machine is slow
MOST = 300.0  # until all is at rest
CLUSTER_QUEUES = Resource(QUEUES, "v1beta2", "clusterqueues", "ClusterQueue", Unstructured, namespaced=False)
CONTAINER = {"name": "worker", "image": "train:1", "command": ["torchrun"], "resources": {"requests": {"cpu": "1"}}}
SPEC: dict[str, Any] = {
    "replicas": 3,
    "elastic": {"minReplicas": 1, "maxReplicas": CPUS},
    "rendezvous": {"backend": "etcd", "etcd": {"endpoints": ["http://etcd:2379"]}},
    "recovery": {"noProgressLimit": 100, "maxRestarts": 1000},
    "template": {"spec": {"containers": [CONTAINER], "terminationGracePeriodSeconds": 300}},
}


@dataclass
class History:
    """What is asked for, and what was seen to be wrong."""

    place: Place
    queue: Queue
    rng: random.Random
    replicas: int = 3
    suspended: bool = False
    other: int = 0  # CPUs of a job of a higher priority
    orphans: frozenset[str] = frozenset()  # pods whose Workload somebody has deleted: they leave
    wrong: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    @property
    def expected(self) -> int:
        return 0 if self.suspended else min(self.replicas, CPUS - self.other)

    async def act(self) -> None:
        """One thing happens."""
        match self.rng.randrange(7):
            case 0 | 1 | 2:
                self.replicas = self.rng.randint(1, CPUS)
                self.done.append(f"replicas {self.replicas}")
                await self.place.edit_job(replicas=self.replicas)
            case 3 | 4:
                with contextlib.suppress(NotFound):
                    await self.place.client.delete(WORKLOADS, self.place.namespace, f"other-{self.other}")
                self.other = self.rng.randint(0, CPUS) if not self.other else 0
                self.done.append(f"another takes {self.other}")
                if self.other:
                    body = self.queue.workload(f"other-{self.other}", self.other, priority=100)
                    await self.place.client.create(WORKLOADS, self.place.namespace, body)
            case 5:
                self.suspended = not self.suspended
                self.done.append(f"suspend {self.suspended}")
                await self.place.edit_job(suspend=self.suspended)
            case _:
                self.done.append("a pod or a Workload is deleted")
                await self._delete_something()

    async def _delete_something(self) -> None:
        client, namespace = self.place.client, self.place.namespace
        pods: list[tuple[Resource[Any], str]] = [(PODS, name) for name in sorted(await self.place.pods())]
        workloads = [(WORKLOADS, w.metadata.name) for w in await self.workloads()]
        if objects := [*pods, *workloads]:
            resource, name = self.rng.choice(objects)
            if resource is WORKLOADS:
                self.orphans |= {pod for _, pod in pods}
            with contextlib.suppress(NotFound):
                await client.delete(resource, namespace, name, grace_seconds=0)

    async def workloads(self) -> list[Unstructured]:
        listed = (await self.place.client.list(WORKLOADS, self.place.namespace)).items
        return [each for each in listed if not each.metadata.name.startswith("other")]

    async def kubelets(self) -> int:
        """Pods that are to end do so, one at a time; others begin. Returns how many live, and compares them with the
        quota that was taken before and after they were counted."""
        before = await self.workloads()
        pods = await self.place.pods()
        if [w.metadata.resource_version for w in before] == [
            w.metadata.resource_version for w in await self.workloads()
        ]:
            taken = sum(view.charged for view in map(workload_view, before) if view.finished is None)
            # Between two of them: Kueue has ended the smaller one, and admits the larger one in another write.
            gap = not taken and any(workload_view(w).finished == "WorkloadSliceReplaced" for w in before)
            if len(pods.keys() - self.orphans) > taken and not gap:
                self.wrong.append(f"{len(pods)} pods with quota for {taken} after {self.done}")
        ending = [name for name, pod in pods.items() if pod.metadata.deletion_timestamp is not None]
        for name, pod in pods.items():
            with contextlib.suppress(KubeError):
                if name in ending[:1]:
                    await self.place.client.delete(PODS, self.place.namespace, name, grace_seconds=0)
                elif not pod.spec.node_name:
                    target = {"metadata": {"name": name}, "target": {"kind": "Node", "name": "n1"}}
                    await self.place.client.create(BINDINGS, self.place.namespace, target)
        with contextlib.suppress(KubeError):
            await self.place.start_all()
        return len(pods)

    async def rest(self) -> None:
        """Wait until Kueue counts what lives, and that is all that is to be had."""
        began = changed = time.monotonic()
        before: object = None
        while True:
            pods, used = await self.kubelets(), await self._used()
            if pods == self.expected and used == pods + self.other and await self._is_seen():
                return
            listed = (await self.place.client.list(WORKLOADS, self.place.namespace)).items
            now = pods, used, [one.metadata.resource_version for one in listed]
            changed, before = (changed if now == before else time.monotonic()), now
            state = f"{pods} pods of {self.expected}, Kueue counts {used}, another has {self.other}"
            if time.monotonic() >= min(changed + SECONDS, began + MOST):
                shown = [(one.metadata.name, one.metadata.annotations, one.spec, one.status) for one in listed]
                raise AssertionError(
                    f"{state} for {time.monotonic() - changed:.0f} s after {self.done}: "
                    f"{await self.place.status()}\n{shown}"
                )
            await asyncio.sleep(0.05)

    async def _used(self) -> int:
        queue = await self.place.client.get(CLUSTER_QUEUES, None, self.place.namespace)
        return sum(int(flavor["resources"][0]["total"]) for flavor in queue.status.get("flavorsUsage", ()))

    async def _is_seen(self) -> bool:
        job = await self.place.job()
        return bool(job.status.get("observedGeneration") == job.metadata.generation)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncGenerator[None, None]:
        """Each change of a Workload meanwhile is one that Kueue's webhooks would let through."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _watch(self) -> None:
        known: dict[str, Unstructured] = {}
        listed = await self.place.client.list(WORKLOADS, self.place.namespace)
        stream = self.place.client.watch(
            WORKLOADS, self.place.namespace, resource_version=listed.resource_version, timeout_seconds=3000
        )
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                obj = getattr(event, "object", None)
                if obj is None:
                    continue
                if (old := known.get(obj.metadata.uid)) is not None:
                    self.wrong += [f"{obj.metadata.name}: {rule}" for rule in broken_rules(old, obj)]
                known[obj.metadata.uid] = obj


def broken_rules(old: Unstructured, new: Unstructured) -> list[str]:
    """As `pkg/webhooks/workload_webhook.go` of Kueue 0.17."""

    def reserved(obj: Unstructured) -> bool:
        return workload_view(obj).assigned is not None

    def admission(obj: Unstructured) -> Any:
        return obj.status.get("admission")

    rules = []
    if reserved(old) and old.spec["podSets"] != new.spec["podSets"]:
        rules.append("its pod sets were changed while quota was reserved")
    if reserved(old) and reserved(new) and workload_view(new).reclaimable < workload_view(old).reclaimable:
        rules.append("reclaimable pods became fewer while quota was reserved")
    if admission(old) and admission(new) and admission(old) != admission(new):
        rules.append("its admission was changed")
    return rules


async def play(crd: ControlPlane, kueue: Kueue, place: Place, seed: int, steps: int) -> None:
    queue = make_queue(crd, kueue, place.namespace, CPUS)
    history = History(place, queue, random.Random(seed))
    async with history.watched():
        await place.create_job(labels={"kueue.x-k8s.io/queue-name": "queue"}, **SPEC)
        for _ in range(steps):
            dies = history.rng.randint(0, 6) if history.rng.random() < 0.4 else None
            if dies is not None:
                history.done.append(f"the operator dies after {dies} writes")
                async with Operators(place).run(kueue=True, dies_after=dies):
                    await history.act()
                    for _ in range(6):
                        await history.kubelets()
                        await asyncio.sleep(0.05)
            async with Operators(place).run(kueue=True):
                if dies is None:
                    await history.act()
                await history.rest()
            assert history.wrong == [], history.done


async def test_pods_have_what_quota_is_taken_for_under_random_changes(
    crd: ControlPlane, kueue: Kueue, place: Place
) -> None:
    await play(crd, kueue, place, seed=68, steps=8)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(40))
async def test_pods_have_what_quota_is_taken_for_under_a_thousand_changes(
    crd: ControlPlane, kueue: Kueue, place: Place, part: int
) -> None:
    seed = int(os.environ.get("EVERSTEP_SEED") or secrets.randbelow(2**31))
    print(f"to play it again: EVERSTEP_SEED={seed} pytest -m '' {__file__} -k 'thousand and {part}'")
    await play(crd, kueue, place, seed, steps=25)
