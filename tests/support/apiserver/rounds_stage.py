"""A job whose rounds a real operator keeps: the test plays its kubelets, and its agents by the commands they give."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from everstep.contract import exit_codes
from everstep.contract.document import Document, decode, encode
from everstep.membership.commands import Command
from everstep.membership.machine import Rejected, apply
from everstep_operator.kube.resources import NODES, PODS
from everstep_operator.rounds.documents import JobRef
from everstep_operator.rounds.registry import RoundRegistry
from support.apiserver.operators import Operators, Place
from support.apiserver.waiting import eventually
from support.conformity.bodies import BINDINGS, CONFIGMAPS


class RoundsStage:
    """A job, two nodes for its workers, and an operator that keeps its rounds."""

    def __init__(self, place: Place, rounds: RoundRegistry, job: JobRef) -> None:
        self.place, self.rounds, self.job = place, rounds, job
        self.old, self.new = f"{place.namespace}-old", f"{place.namespace}-new"

    async def document(self) -> Document:
        kept = await self.place.client.get(CONFIGMAPS, self.place.namespace, f"{self.job.name}-rounds")
        return decode(kept.data["document"].encode())

    async def agents(self, *commands: Command) -> Document:
        """Agents change the document, one after the other, as the operator that keeps it answers them."""
        after = await self.document()
        for command in commands:

            async def taken(command: Command = command) -> bool:
                nonlocal after
                seen = await self.rounds.of(self.job).read(0)
                assert seen.document is not None
                made = apply(decode(seen.document.encode()), command)
                assert not isinstance(made, Rejected), f"{command}: {made.reason}"
                after = made
                return await self.rounds.of(self.job).swap(seen.version, encode(made)) is not None

            await eventually(f"{command} is taken", taken)
        return after

    async def make_nodes(self) -> None:
        for node in (self.old, self.new):
            await self.place.client.create(NODES, None, {"metadata": {"name": node}})
            await self.node_is(node, "True")

    async def node_is(self, node: str, ready: str) -> None:
        """The node's kubelet says that it is ready, or the node controller that it is silent (`Unknown`)."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        condition = {"type": "Ready", "status": ready, "reason": "Told", "message": "", "lastTransitionTime": at}
        await self.place.client.patch_status(NODES, None, node, {"conditions": [condition]})

    async def remove_nodes(self) -> None:
        for node in (self.old, self.new):
            await self.place.client.delete(NODES, None, node)

    async def start(self, *indices: int, node: str, incarnation: int = 0) -> None:
        """The pods of these workers exist, and run on the node."""
        for index in indices:
            name = pod_name(index, incarnation)
            await self.is_there(name)
            target = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
            await self.place.client.create(BINDINGS, self.place.namespace, target)
            await self.place.start(name)

    async def is_there(self, pod: str) -> None:
        """Wait until the operator has made this pod."""

        async def exists() -> bool:
            return pod in await self.place.names()

        await eventually(f"{pod} exists", exists)

    async def end(self, *indices: int) -> None:
        """The kubelet reports that their workers have left in order, and confirms the end of their pods."""
        for index in indices:
            await self.place.end(pod_name(index), exit_codes.PREEMPTED)
            await self.place.client.delete(PODS, self.place.namespace, pod_name(index), grace_seconds=0)

    async def announced(self, count: int) -> None:
        async def holds() -> bool:
            return (await self.document()).surge == count

        await eventually(f"{count} others are announced to the agents", holds)

    async def roster(self, first: int, last: int) -> None:
        """Wait until exactly these workers are published and have pods."""

        async def holds() -> bool:
            kept = [(part["first"], part["last"]) for part in (await self.place.status())["roster"]["workers"]]
            names = [pod_name(index) for index in range(first, last + 1)]
            return kept == [(first, last)] and await self.place.names() == names

        await eventually(f"workers {first} to {last} are left", holds)


@contextlib.asynccontextmanager
async def staged(place: Place, **spec: Any) -> AsyncIterator[RoundsStage]:
    """A job of this spec, whose operator runs meanwhile."""
    job = await place.create_job(**spec)
    async with Operators(place).run() as client:
        stage = RoundsStage(place, client.rounds, JobRef(place.namespace, "digits", job.metadata.uid))
        await stage.make_nodes()
        yield stage
        await stage.remove_nodes()


def pod_name(index: int, incarnation: int = 0) -> str:
    return f"digits-w{index}-{incarnation}"
