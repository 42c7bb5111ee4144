"""Nodes that new pods avoid, with a real kube-scheduler at a real API server (ADR 0066).

The scheduler serves only pods that name it, because other tests bind theirs by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from everstep_operator.controller import observe
from everstep_operator.kube.errors import NotFound
from everstep_operator.kube.resources import EVENTS, NODES, PODS
from everstep_operator.plan.render import pods
from everstep_operator.plan.snapshot import JobView, Settings
from support.apiserver.operators import TEMPLATE, Operators, Place
from support.apiserver.waiting import eventually
from support.conformity.bodies import BINDINGS
from testcluster import programs
from testcluster import scheduler as schedulers
from testcluster.controlplane import ControlPlane

pytestmark = pytest.mark.apiserver

NAME = "everstep-test"
ROOM = 3  # pods for which each node has room


@pytest.fixture(scope="module")
def scheduler(crd: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name that a pod gives to be scheduled by kube-scheduler, with its default plugins and weights."""
    folder = tmp_path_factory.mktemp("scheduler")
    daemon = schedulers.scheduler(crd, folder, programs.kubernetes() / "kube-scheduler", NAME)
    daemon.start()
    yield NAME
    daemon.kill()


class TwoNodes:
    """Two nodes with the hands of their kubelets. Only pods of this test go there."""

    def __init__(self, place: Place) -> None:
        self._client, self._place = place.client, place
        self.names = [f"{place.namespace[-8:]}-{letter}" for letter in "ab"]
        self.labels = {"everstep-test": place.namespace[-8:]}

    async def make(self) -> None:
        for name in self.names:
            labels = {**self.labels, "kubernetes.io/hostname": name}  # as each kubelet sets it
            await self._client.create(NODES, None, {"metadata": {"name": name, "labels": labels}})
            await self.says(name)

        async def taken() -> bool:
            nodes = [await self._client.get(NODES, None, name) for name in self.names]
            return not any(taint.key.endswith("not-ready") for node in nodes for taint in node.spec.taints)

        await eventually("the node controller takes the nodes for ready", taken)

    async def says(self, name: str, *faults: str) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        conditions = [
            {
                "type": type_, "status": "True", "reason": "Said", "message": "task docker:7 blocked",
                "lastTransitionTime": at, "lastHeartbeatTime": at,
            }
            for type_ in ("Ready", *faults)
        ]  # fmt: skip
        capacity = {"cpu": "8", "memory": "16Gi", "pods": str(ROOM)}
        node = await self._client.get(NODES, None, name)
        gone = {condition.type for condition in node.status.conditions} - {"Ready", *faults}
        ended = [{**conditions[0], "type": type_, "status": "False"} for type_ in sorted(gone)]
        status = {"conditions": [*conditions, *ended], "capacity": capacity, "allocatable": capacity}
        await self._client.patch_status(NODES, None, name, status)

    def template(self, scheduler: str = "") -> dict[str, Any]:
        spec: dict[str, Any] = {**TEMPLATE["spec"], "nodeSelector": self.labels}
        return {"spec": {**spec, **({"schedulerName": scheduler} if scheduler else {})}}

    async def bind(self, pod: str, node: str) -> None:
        body = {"metadata": {"name": pod}, "target": {"kind": "Node", "name": node}}
        await self._client.create(BINDINGS, self._place.namespace, body)

    async def confirm_ends(self) -> None:
        """The kubelets confirm that the containers of deleted pods have ended."""
        for name, pod in (await self._place.pods()).items():
            if pod.metadata.deletion_timestamp is not None:
                with contextlib.suppress(NotFound):
                    await self._client.delete(PODS, self._place.namespace, name, grace_seconds=0)

    async def remove(self) -> None:
        for name in self.names:
            await self._client.delete(NODES, None, name)


@pytest.fixture
async def nodes(place: Place) -> AsyncIterator[TwoNodes]:
    made = TwoNodes(place)
    await made.make()
    yield made
    await made.remove()


async def node_of(place: Place, job: JobView, index: int, avoided: tuple[str, ...]) -> str:
    """Create a worker that avoids these nodes, and wait until it is scheduled."""
    body = pods.avoid(job, pods.agent_pod(job, index, 0, Settings()), avoided)
    name = body["metadata"]["name"]
    await place.client.create(PODS, place.namespace, body)

    async def scheduled() -> bool:
        return bool((await place.client.get(PODS, place.namespace, name)).spec.node_name)

    await eventually(f"{name} is scheduled", scheduled)
    return (await place.client.get(PODS, place.namespace, name)).spec.node_name


async def test_avoided_node_that_is_empty_gets_no_pod_while_another_has_room_and_then_it_does(
    place: Place, nodes: TwoNodes, scheduler: str
) -> None:
    """An empty node is the best by resources, and by our own spread."""
    full, empty = nodes.names
    obj = await place.create_job(template=nodes.template(scheduler), rendezvous={"backend": "everstep"})
    job = observe.job_view(obj)
    for index in range(ROOM - 1):
        body = pods.agent_pod(job, index, 0, Settings())
        body["spec"]["schedulerName"] = "none"
        await place.client.create(PODS, place.namespace, body)
        await nodes.bind(body["metadata"]["name"], full)
    assert await node_of(place, job, ROOM, (empty,)) == full
    assert await node_of(place, job, ROOM + 1, (empty,)) == empty, "it is the only one with room"


async def test_empty_node_is_the_first_choice_where_it_is_not_avoided(
    place: Place, nodes: TwoNodes, scheduler: str
) -> None:
    obj = await place.create_job(template=nodes.template(scheduler), rendezvous={"backend": "everstep"})
    job = observe.job_view(obj)
    first = await node_of(place, job, 0, ())
    assert await node_of(place, job, 1, ()) != first


async def test_node_whose_condition_names_a_fault_gets_no_new_pod_and_the_job_says_why(
    place: Place, nodes: TwoNodes, scheduler: str
) -> None:
    bad, good = nodes.names
    await place.create_job(template=nodes.template(scheduler))
    async with Operators(place).run():
        await place.running("digits-w0-0", "digits-w1-0")
        await nodes.says(bad, "KernelDeadlock")
        failed = next(name for name, pod in (await place.pods()).items() if pod.spec.node_name == bad)
        await place.end(failed, 1)

        async def replaced() -> bool:
            await nodes.confirm_ends()
            if all(pod.spec.node_name for pod in (await place.pods()).values()):
                await place.start_all()
            return await place.names() == ["digits-w0-1", "digits-w1-1"] and await place.reason() == "Running"

        await eventually("others run", replaced)
        assert {pod.spec.node_name for pod in (await place.pods()).values()} == {good}
        (excluded,) = (await place.status())["excludedNodes"]
        assert excluded == {"name": bad, "reasons": ["KernelDeadlock (task docker:7 blocked)"]}
        notes = [event.note for event in (await place.client.list(EVENTS, place.namespace)).items]
        assert [n for n in notes if n.startswith(f"new pods avoid node {bad} as long as its status says this")]
        await nodes.says(bad)
        await place.edit_job(ttlSecondsAfterFinished=5)  # a pass

        async def forgotten() -> bool:
            return not (await place.status()).get("excludedNodes")

        await eventually("the job takes the node again", forgotten)


async def test_node_that_rejects_pods_is_avoided_also_by_the_next_leader(place: Place, nodes: TwoNodes) -> None:
    bad, _ = nodes.names
    await place.create_job(template=nodes.template(), replicas=1)
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy devices"}
    async with Operators(place).run():
        for number in range(2):
            name = f"digits-w0-{number}"

            async def created(name: str = name) -> bool:
                return name in await place.names()

            await eventually(f"{name} exists", created)
            await nodes.bind(name, bad)
            if number:
                await asyncio.sleep(11)  # the time in which losses of one node count as one
            await place.set_pod(name, status)

        async def excluded() -> bool:
            return [node["name"] for node in (await place.status()).get("excludedNodes", ())] == [bad]

        await eventually("the node is excluded", excluded)
    async with Operators(place).run():

        async def replaced() -> bool:
            await nodes.confirm_ends()
            await place.start_all()
            return await place.names() == ["digits-w0-2"]

        await eventually("another exists", replaced)
        assert await excluded()
        reasons = (await place.status())["excludedNodes"][0]
        assert reasons["reasons"] == ["Rejected"]
        assert reasons["until"] > (await place.job()).metadata.creation_timestamp.strftime("%Y-%m-%dT%H:%M:%SZ")  # type: ignore[union-attr]
