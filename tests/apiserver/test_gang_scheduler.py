"""The workers of a job with a PodGroup are placed together or not at all, by the scheduler of the newest Kubernetes.

API server and scheduler are real, and have the feature gate GenericWorkload. The nodes are objects without a kubelet.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from everstep_operator.api.types import GangScheduler
from everstep_operator.kube.credentials import KubeConfig
from everstep_operator.kube.resources import NODES
from everstep_operator.kube.transport import HttpKubeClient
from support import ROOT
from support.apiserver.operators import Operators, Place
from support.apiserver.waiting import eventually, make_namespace
from testcluster import programs, versions
from testcluster.controlplane import ControlPlane
from testcluster.scheduler import scheduler

pytestmark = [
    pytest.mark.apiserver, pytest.mark.long,
    pytest.mark.usefixtures("control_plane", "newest_api_server", "newest_scheduler"),
]  # fmt: skip

GATES = "GenericWorkload=true"
SCHEDULING = {"podGroup": {"scheduler": "Kubernetes"}}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("gangs")
    flags = (f"--feature-gates={GATES}", "--runtime-config=scheduling.k8s.io/v1beta1=true")
    made = ControlPlane(folder / "plane", programs.api_server(versions.NEWEST_KUBERNETES), flags)
    made.start()
    done = made.kubectl("apply", "--server-side", "-f", str(ROOT / "manifests/crd.yaml"))
    assert done.returncode == 0, done.stderr
    done = made.kubectl("wait", "--for=condition=Established", "crd/trainingjobs.everstep.dev", "--timeout=30s")
    assert done.returncode == 0, done.stderr
    (folder / "scheduler").mkdir()
    daemon = scheduler(made, folder / "scheduler", programs.newest_scheduler(), "default-scheduler", GATES)
    daemon.start()
    yield made
    daemon.kill()
    made.stop()


class Nodes:
    """Nodes for the jobs of one place alone."""

    def __init__(self, place: Place) -> None:
        self._place, self._made = place, list[str]()
        self._labels = {"everstep-test": place.namespace[-8:]}

    async def add(self, pods: int) -> None:
        """One with room for so many pods."""
        client, name = self._place.client, f"{self._place.namespace[-8:]}-{len(self._made)}"
        self._made.append(name)
        await client.create(NODES, None, {"metadata": {"name": name, "labels": self._labels}})
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": at, "lastHeartbeatTime": at}
        capacity = {"cpu": "8", "memory": "16Gi", "pods": str(pods)}
        status = {"conditions": [ready], "capacity": capacity, "allocatable": capacity}
        await client.patch_status(NODES, None, name, status)

    def template(self) -> dict[str, Any]:
        container = {"name": "worker", "image": "train:1", "command": ["everstep-run", "train.py"]}
        return {"spec": {"containers": [container], "nodeSelector": self._labels}}

    async def remove(self) -> None:
        for name in self._made:
            await self._place.client.delete(NODES, None, name)


@pytest.fixture
async def own_place(plane: ControlPlane) -> AsyncIterator[Place]:
    async with HttpKubeClient(KubeConfig(str(plane.kubeconfig))) as client:
        name = f"test-{uuid.uuid4().hex[:16]}"
        await make_namespace(client, name)
        yield Place(client, name)


@pytest.fixture
async def nodes(own_place: Place) -> AsyncIterator[Nodes]:
    made = Nodes(own_place)
    yield made
    await made.remove()


def bound(place: Place, *jobs: tuple[str, int]) -> Callable[[], Any]:
    """Whether so many pods of each of these jobs are there and all of them are bound; of no other job any is."""

    async def holds() -> bool:
        pods = (await place.pods()).items()
        placed = sorted(name for name, pod in pods if pod.spec.node_name)
        wanted = dict(jobs)
        return all(sum(name.startswith(f"{job}-w") for name in placed) == n for job, n in wanted.items()) and (
            len(placed) == sum(wanted.values())
        )

    return holds


def refused(place: Place, count: int) -> Callable[[], Any]:
    """Whether the scheduler has looked at so many pods, and placed none of them."""

    async def holds() -> bool:
        conditions = [{c.type: c.status for c in p.status.conditions} for p in (await place.pods()).values()]
        return sum(each.get("PodScheduled") == "False" for each in conditions) == count

    return holds


async def test_none_of_three_workers_is_placed_where_two_have_room_and_a_replacement_is_alone(
    own_place: Place, nodes: Nodes
) -> None:
    place = own_place
    await nodes.add(2)
    await place.create_job(
        replicas=3, rendezvous={"backend": "everstep"}, scheduling=SCHEDULING, template=nodes.template()
    )
    async with Operators(place).run(pod_groups=(GangScheduler.KUBERNETES,)):
        await eventually("the scheduler has refused all three", refused(place, 3))
        assert await bound(place)(), "the other two would have room"

        await nodes.add(1)
        await eventually("all are placed", bound(place, ("digits", 3)))
        await place.start_all()
        await place.end("digits-w1-0", 1)

        async def replaced() -> bool:
            pod = (await place.pods()).get("digits-w1-1")
            return pod is not None and bool(pod.spec.node_name)

        await eventually("the replacement is placed, for which no group has to wait", replaced)
        assert (await place.pods()).keys() >= {"digits-w0-0", "digits-w2-0"}


async def test_of_two_jobs_that_do_not_both_fit_one_has_all_workers_and_the_other_none(
    own_place: Place, nodes: Nodes
) -> None:
    place = own_place
    await nodes.add(3)
    for name in ("first", "second"):
        await place.create_job(name, scheduling=SCHEDULING, template=nodes.template())
    async with Operators(place).run(pod_groups=(GangScheduler.KUBERNETES,)):
        one: list[str] = []

        async def one_runs() -> bool:
            one[:] = [name for name in ("first", "second") if await bound(place, (name, 2))()]
            return bool(one) and await refused(place, 2)()

        await eventually("one job is placed, and the scheduler has refused the other", one_runs)
        (runs,) = one
        other = "second" if runs == "first" else "first"
        await place.start_all()
        for pod in await place.names():
            if pod.startswith(f"{runs}-"):
                await place.end(pod, 0)
        await eventually("the other has room then", bound(place, (runs, 2), (other, 2)))
