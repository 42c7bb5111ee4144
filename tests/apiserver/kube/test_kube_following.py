"""What lasts: watches, informers and leadership, while the network and the API server fail under them."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import pytest

from everstep_operator.kube.client import Bookmark, Changed, EventType
from everstep_operator.kube.resources import LEASES, PODS
from everstep_operator.kube.transport import HttpKubeClient
from everstep_operator.kube.wire import Pod
from everstep_operator.runtime.cache import Added, Deleted, Delta
from everstep_operator.runtime.clock import SystemClock
from everstep_operator.runtime.informer import Informer, Timing
from everstep_operator.runtime.leader import LeaderElector
from support.apiserver.network import Network
from support.apiserver.waiting import compact, eventually
from support.conformity.bodies import pod

pytestmark = pytest.mark.apiserver

CLOCK = SystemClock()


@asynccontextmanager
async def running(*coroutines: Any) -> AsyncGenerator[list["asyncio.Task[None]"], None]:
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_watch_tells_every_change_and_ends_with_a_bookmark(client: HttpKubeClient, namespace: str) -> None:
    start = (await client.list(PODS, namespace)).resource_version
    events: list[Any] = []

    async def collect() -> None:
        async with aclosing(client.watch(PODS, namespace, resource_version=start, timeout_seconds=6)) as stream:
            async for event in stream:
                events.append(event)

    collecting = asyncio.create_task(collect())
    made = await client.create(PODS, namespace, pod("w0", job="a"))
    await client.patch_status(PODS, namespace, "w0", {"phase": "Running"})
    await client.delete(PODS, namespace, "w0", grace_seconds=0)
    await collecting
    changes = [event for event in events if isinstance(event, Changed)]
    assert changes[0].type is EventType.ADDED
    assert changes[-1].type is EventType.DELETED
    assert {change.object.metadata.uid for change in changes} == {made.metadata.uid}
    versions = [int(event.resource_version) for event in events]
    assert versions == sorted(versions)
    assert isinstance(events[-1], Bookmark)


@pytest.mark.long
async def test_object_that_leaves_a_selector_is_deleted_for_its_watcher(client: HttpKubeClient, namespace: str) -> None:
    informer = Informer(
        client, PODS, clock=CLOCK, rng=lambda: 0.5, namespace=namespace, label_selector="job=a",
        indexers={"job": lambda pod: [pod.metadata.labels["job"]]},
    )  # fmt: skip
    async with running(informer.run()):
        await client.create(PODS, namespace, pod("w0", job="a"))
        await client.create(PODS, namespace, pod("x0", job="b"))
        await eventually("the pod is seen", lambda: len(informer.by_index("job", "a")) == 1)
        await client.merge_patch(PODS, namespace, "w0", {"metadata": {"labels": {"job": "b"}}})
        await eventually("the pod is gone", lambda: informer.list() == ())


class Follower:
    """An informer of the pods of one namespace behind the breakable network."""

    def __init__(self, client: HttpKubeClient, namespace: str) -> None:
        self.deltas: list[Delta[Pod]] = []
        self.informer: Informer[Pod] = Informer(
            client, PODS, clock=CLOCK, rng=lambda: 0.5, namespace=namespace,
            timing=Timing(watch_seconds=2, silence_seconds=4.0),
        )  # fmt: skip
        self.informer.add_handler(self.deltas.append)

    def names(self) -> list[str]:
        return [pod.metadata.name for pod in self.informer.list()]

    def deleted(self) -> list[str]:
        return [delta.object.metadata.name for delta in self.deltas if isinstance(delta, Deleted)]


@pytest.mark.long
async def test_delete_missed_behind_a_cut_and_compacted_away_is_found(
    client: HttpKubeClient, far_client: HttpKubeClient, network: Network, namespace: str, control_plane: Any
) -> None:
    follower = Follower(far_client, namespace)
    async with running(follower.informer.run()):
        for name in ("w0", "w1"):
            await client.create(PODS, namespace, pod(name))
        await eventually("both are seen", lambda: follower.names() == ["w0", "w1"])
        network.cut()
        await client.delete(PODS, namespace, "w0", grace_seconds=0)
        replaced = await client.get(PODS, namespace, "w1")
        await client.delete(PODS, namespace, "w1", uid=replaced.metadata.uid, grace_seconds=0)
        again = await client.create(PODS, namespace, pod("w1"))
        # A restarted server has no history older than its start: the watch must meet 410.
        await asyncio.to_thread(control_plane.stop_apiserver)
        await asyncio.to_thread(compact, control_plane, again.metadata.resource_version)
        await asyncio.to_thread(control_plane.start_apiserver)
        network.heal()
        await eventually("the cache is right", lambda: follower.names() == ["w1"])
        assert follower.deleted() == ["w0", "w1"]
        current = follower.informer.get(namespace, "w1")
        assert current is not None
        assert current.metadata.uid == again.metadata.uid


def interruptions(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why an informer had to pause, as its log says."""
    return [str(r.__dict__["error"]) for r in caplog.records if r.message == "informer interrupted"]


@pytest.mark.long
async def test_frozen_connection_is_noticed_and_replaced(
    client: HttpKubeClient,
    far_client: HttpKubeClient,
    network: Network,
    namespace: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    follower = Follower(far_client, namespace)
    async with running(follower.informer.run()):
        await eventually("synced", lambda: follower.informer.has_synced)
        # With the first pod: then a watch is open, and not just being begun again.
        follower.informer.add_handler(lambda _: network.freeze() if follower.names() == ["w0"] else None)
        await client.create(PODS, namespace, pod("w0"))
        await eventually("silence is noticed", lambda: bool(interruptions(caplog)))
        assert "no event, bookmark or end for 4 s" in interruptions(caplog)[-1]
        await client.create(PODS, namespace, pod("w1"))
        assert follower.names() == ["w0"]
        network.heal()
        await eventually("the pod is seen", lambda: follower.names() == ["w0", "w1"])


async def test_informer_survives_an_api_server_restart(
    client: HttpKubeClient, namespace: str, control_plane: Any, caplog: pytest.LogCaptureFixture
) -> None:
    follower = Follower(client, namespace)
    async with running(follower.informer.run()) as tasks:
        await client.create(PODS, namespace, pod("w0"))
        await eventually("the pod is seen", lambda: follower.names() == ["w0"])
        await asyncio.to_thread(control_plane.stop_apiserver)
        await eventually("it is noticed", lambda: bool(interruptions(caplog)))
        assert follower.names() == ["w0"]
        await asyncio.to_thread(control_plane.start_apiserver)
        await client.create(PODS, namespace, pod("w1"))
        await eventually("the new pod is seen", lambda: follower.names() == ["w0", "w1"])
        assert [delta.object.metadata.name for delta in follower.deltas if isinstance(delta, Added)] == ["w0", "w1"]
        assert follower.deleted() == []
        assert not tasks[0].done()


def elector(client: HttpKubeClient, namespace: str, identity: str) -> LeaderElector:
    return LeaderElector(client, namespace=namespace, name="operator", identity=identity, clock=CLOCK, rng=lambda: 0.5)


class NeverTwo:
    """Samples leadership. `late`: seconds for which this process was held up meanwhile."""

    def __init__(self, *electors: LeaderElector) -> None:
        self._electors = electors
        self.late = 0.0

    async def run(self) -> None:
        """Until cancelled; ends with an error if two lead."""
        while True:
            assert sum(one.is_leader() for one in self._electors) <= 1
            due = time.monotonic() + 0.005
            await asyncio.sleep(0.005)
            over = time.monotonic() - due
            self.late += over if over > 0.05 else 0.0


@pytest.mark.long
async def test_leader_behind_a_dead_network_is_replaced_and_never_overlaps(
    client: HttpKubeClient, far_client: HttpKubeClient, network: Network, namespace: str
) -> None:
    first = elector(far_client, namespace, "a_10.0.0.1:8080")
    second = elector(client, namespace, "b_10.0.0.2:8080")
    never_two = NeverTwo(first, second)
    async with running(never_two.run(), first.run()) as (watcher, _):
        assert await asyncio.wait_for(first.wait_leading(), 20) == 1
        async with running(second.run()):
            await eventually("the second follows", lambda: second.holder_address() == "10.0.0.1:8080")
            network.freeze()
            cut, late = time.monotonic(), never_two.late
            await asyncio.wait_for(first.wait_lost(1), 20)
            lost = time.monotonic() - cut
            held_up = never_two.late - late
            assert await asyncio.wait_for(second.wait_leading(), 30) == 2
            taken = time.monotonic() - cut
            assert lost - held_up <= 4.5
            assert taken >= lost
            network.heal()
            await eventually("the first follows", lambda: first.holder_address() == "10.0.0.2:8080")
            assert second.require() == 2
        assert not watcher.done()
    lease = await client.get(LEASES, namespace, "operator")
    assert lease.spec.lease_transitions is not None
    assert lease.spec.lease_transitions >= 2
    assert lease.spec.renew_time is not None


async def test_graceful_end_hands_over_within_seconds(client: HttpKubeClient, namespace: str) -> None:
    first, second = elector(client, namespace, "a"), elector(client, namespace, "b")
    never_two = NeverTwo(first, second)
    async with running(never_two.run(), first.run()) as (watcher, leading):
        await asyncio.wait_for(first.wait_leading(), 20)
        async with running(second.run()):
            leading.cancel()
            with suppress(asyncio.CancelledError):
                await leading
            ended, late = time.monotonic(), never_two.late
            assert await asyncio.wait_for(second.wait_leading(), 20) == 2
            # Retry 1 s plus jitter and two requests; waiting the Lease out would take 6 s.
            assert time.monotonic() - ended - (never_two.late - late) < 4
        assert not watcher.done()
