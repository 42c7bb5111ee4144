"""Nodes that are not ready, at a real API server: who is lost, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from everstep_operator.kube.resources import NODES
from support.apiserver.operators import Operators, Place
from support.apiserver.waiting import eventually
from support.conformity.bodies import BINDINGS

pytestmark = pytest.mark.apiserver


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class OneNode:
    """A node, with the hands of its kubelet and of the node controller. (Pods that are bound to no node are deleted at
    once, because no kubelet has to confirm their end.)"""

    def __init__(self, place: Place) -> None:
        self._place, self._name = place, f"{place.namespace}-n1"

    async def make(self) -> None:
        await self._place.client.create(NODES, None, {"metadata": {"name": self._name}})
        await self.says("True", "KubeletReady")

    async def says(self, status: str, reason: str) -> None:
        condition = {
            "type": "Ready", "status": status, "reason": reason, "message": reason,
            "lastTransitionTime": now(), "lastHeartbeatTime": now(),
        }  # fmt: skip
        await self._place.client.patch_status(NODES, None, self._name, {"conditions": [condition]})

    async def bind(self, pod: str) -> None:
        async def exists() -> bool:
            return pod in await self._place.names()

        await eventually(f"{pod} exists", exists)
        body = {"metadata": {"name": pod}, "target": {"kind": "Node", "name": self._name}}
        await self._place.client.create(BINDINGS, self._place.namespace, body)

    async def remove(self) -> None:
        await self._place.client.delete(NODES, None, self._name)


@pytest.fixture
async def node(place: Place) -> AsyncIterator[OneNode]:
    made = OneNode(place)
    await made.make()
    yield made
    await made.remove()


@pytest.mark.long
async def test_node_that_is_not_ready_for_a_moment_costs_nothing(place: Place, node: OneNode) -> None:
    await place.create_job()
    async with Operators(place).run():
        await node.bind("digits-w1-0")
        await place.running("digits-w0-0", "digits-w1-0")
        await node.says("False", "KubeletNotReady")
        await asyncio.sleep(1.5)  # the whole fault: nothing may happen in it
        await node.says("True", "KubeletReady")
        await place.edit_job(replicas=2, ttlSecondsAfterFinished=5)  # one more pass, whose end can be seen
        generation = (await place.job()).metadata.generation
        await eventually("it is acted on", lambda: acted_on(place, generation))
        assert await place.names() == ["digits-w0-0", "digits-w1-0"]
        assert (await place.status())["restarts"].get("total", 0) == 0


async def test_silent_node_takes_its_worker_at_once(place: Place, node: OneNode) -> None:
    await place.create_job()
    async with Operators(place).run():
        await node.bind("digits-w1-0")
        await place.running("digits-w0-0", "digits-w1-0")
        began = time.monotonic()
        await node.says("Unknown", "NodeStatusUnknown")
        await place.running("digits-w0-1", "digits-w1-1")
        assert time.monotonic() - began < 20  # far below the grace of a node whose kubelet lives
        assert (await place.status())["recoveries"][0]["cause"] == "NodeLost"


async def test_node_that_stays_not_ready_takes_its_worker_when_the_grace_of_the_job_is_over(
    place: Place, node: OneNode
) -> None:
    """No event tells the end of the grace: the operator looks again by itself."""
    await place.create_job(recovery={"nodeGraceSeconds": 3})
    async with Operators(place).run():
        await node.bind("digits-w1-0")
        await place.running("digits-w0-0", "digits-w1-0")
        began = time.monotonic()
        await node.says("False", "KubeletNotReady")
        await place.running("digits-w0-1", "digits-w1-1")
        assert time.monotonic() - began > 1.9  # times of nodes are whole seconds
        assert (await place.status())["recoveries"][0]["cause"] == "NodeLost"


async def acted_on(place: Place, generation: int) -> bool:
    return bool((await place.status()).get("observedGeneration") == generation)
