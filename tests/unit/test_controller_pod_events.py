"""Why a pod does not start, as its events say: which pod is asked about, how often, and what is shown."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from everstep_local.apiserver.cluster import MemoryCluster
from everstep_local.apiserver.faults import Faults, Refuse
from everstep_operator.controller.pod_events import PodEvents, PodReason
from everstep_operator.controller.pod_start import NOT_PREPARED
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.resources import EVENTS
from everstep_operator.plan.snapshot import PodPhase, WorkerPod
from support.clocks.manual import ManualClock

MOUNT = 'MountVolume.SetUp failed for volume "data" : secret "missing" not found'


class Place:
    def __init__(self, faults: Faults | None = None) -> None:
        self.clock = ManualClock()
        cluster = MemoryCluster(self.clock)
        self.client: KubeClient = cluster.client()
        self.events = PodEvents(cluster.client(faults=faults), self.clock)
        self.pod = WorkerPod(
            "digits-w0-0", "u0", 0, 0, None, PodPhase.PENDING, created_at=self.clock.now(), starting=NOT_PREPARED
        )

    async def write(
        self, name: str, note: str, reason: str = "FailedMount", uid: str = "u0", type_: str = "Warning"
    ) -> None:
        body: dict[str, Any] = {
            "metadata": {"name": name},
            "eventTime": self.clock.now().strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": "kubelet",
            "reportingInstance": "n1",
            "action": "Mount",
            "reason": reason,
            "type": type_,
            "note": note,
            "regarding": {"kind": "Pod", "namespace": "default", "name": "digits-w0-0", "uid": uid},
        }
        await self.client.create(EVENTS, "default", body)

    async def read(self, *pods: WorkerPod, known: PodReason | None = None) -> PodReason | None:
        return await self.events.read("default", pods or (self.pod,), known)


async def test_newest_event_of_the_kubelet_is_the_reason() -> None:
    place = Place()
    await place.write("a", "no route to the network", "FailedCreatePodSandBox")
    await place.clock.advance(31)
    await place.write("b", f"{MOUNT}\n")
    await place.write("c", "of another pod", uid="u1")
    await place.write("d", "pulled", "Pulled", type_="Normal")
    await place.write("e", "the back-off of something else", "BackOff")
    found = await place.read()
    assert found is not None
    assert found.reason == f"FailedMount: {MOUNT}"


async def test_first_worker_that_waits_long_for_its_volumes_is_read_once_a_minute() -> None:
    place = Place()
    await place.write("a", MOUNT)
    assert await place.read() is None, "it has not waited long"
    await place.clock.advance(31)
    others = (
        replace(place.pod, uid="u1", index=1),
        replace(place.pod, uid="u2", starting="init container fetch runs"),
        replace(place.pod, uid="u3", deleted_at=place.clock.now()),
        place.pod,
    )
    first = await place.read(*others)
    assert first is not None
    assert first.pod_uid == "u0"
    await place.clock.advance(5)
    await place.write("b", "another reason")
    assert await place.read(known=first) == first
    await place.clock.advance(60)
    again = await place.read(known=first)
    assert again is not None
    assert again.reason == "FailedMount: another reason"


async def test_events_that_cannot_be_read_cost_the_reason_and_are_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "everstep")
    faults = Faults()
    faults.add(Refuse(403), "list", resource=EVENTS, times=1)
    place = Place(faults)
    await place.write("a", MOUNT)
    await place.clock.advance(31)
    refused = await place.read()
    assert refused == PodReason("u0", None, place.clock.now())
    assert "default/digits-w0-0" in str(caplog.records[0].__dict__)
    await place.clock.advance(timedelta(seconds=60).total_seconds())
    found = await place.read(known=refused)
    assert found is not None
    assert found.reason == f"FailedMount: {MOUNT}"
