"""The operator before an API server whose creates are slow: what is urgent waits for none of them.

Nothing here is measured in seconds of a clock, which runs faster than a busy machine: a wait is measured in the creates
that the API server is asked for meanwhile, or against one create that takes longer than all that must not wait for it.
"""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from everstep.contract.labels import TOKEN_AUDIENCE
from everstep.contract.rounds import DOCUMENT_PATH
from everstep_operator.kube.resources import LEASES
from support.apiserver.operators import Place
from support.apiserver.replica import Replica
from support.apiserver.slow_webhook import SlowWebhook
from support.apiserver.waiting import eventually

pytestmark = pytest.mark.apiserver

CREATE_SECONDS = 2.5
LEASE_SECONDS = 6  # that of a new installation
LARGE_JOBS, LARGE = 16, 100  # more jobs than passes that a new installation made at a time
AT_ONCE, OF_JOB = 48, 24  # creates under way
LONG_SECONDS = 15.0  # a create of these is under way when all is done that must not wait for it
OBSERVED_SECONDS = 20.0  # several terms of the Lease


@pytest.fixture
async def replica(crd: Any, place: Place, tmp_path: Path) -> AsyncGenerator[Replica, None]:
    made = Replica(crd, place.namespace, "replica-a", tmp_path, LEASE_SECONDS)

    async def leads() -> bool:
        return await made.is_ready() and await made.leads()

    try:
        await eventually("the operator leads", leads)
        yield made
    finally:
        made.end()


@asynccontextmanager
async def slow_creates(place: Place, plane: Any, seconds: float = CREATE_SECONDS) -> AsyncGenerator[SlowWebhook, None]:
    """Large jobs whose pods are being created, as many at a time as the operator likes."""
    async with SlowWebhook(place.client, plane, place.namespace, seconds) as webhook:
        for number in range(LARGE_JOBS):
            await place.create_job(f"large{number}", replicas=LARGE)
        await eventually("many creates wait for the webhook", lambda: webhook.waiting >= 32)
        yield webhook


async def transitions(place: Place) -> int:
    return (await place.client.get(LEASES, place.namespace, "everstep-operator")).spec.lease_transitions or 0


def token_of(plane: Any, namespace: str, pod: str, uid: str) -> str:
    bound = ("--bound-object-kind", "Pod", "--bound-object-name", pod, "--bound-object-uid", uid)
    done = plane.kubectl("create", "token", "default", "-n", namespace, "--audience", TOKEN_AUDIENCE, *bound)
    assert done.returncode == 0, done.stderr
    return str(done.stdout.strip())


def read_round(replica: Replica, token: str) -> int:
    """The status of an agent's first call: its token has to be reviewed, and its document read."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{replica.port}{DOCUMENT_PATH}", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.long
async def test_leader_keeps_its_lease_while_creates_take_seconds(
    place: Place, control_plane: Any, replica: Replica
) -> None:
    before = await transitions(place)
    async with slow_creates(place, control_plane) as webhook:
        deadline = time.monotonic() + OBSERVED_SECONDS
        while time.monotonic() < deadline:
            assert await transitions(place) == before
            await asyncio.sleep(0.2)
        assert webhook.waiting >= 32
    assert not [line for line in replica.lines() if line["msg"] in ("term ended", "lease attempt failed")]


@pytest.mark.long
async def test_second_job_is_created_while_the_creates_of_large_jobs_wait(
    place: Place, control_plane: Any, replica: Replica
) -> None:
    async with slow_creates(place, control_plane) as webhook:
        await place.create_job("small", replicas=2)

        async def published() -> bool:
            return "world" in await place.status("small")

        await eventually("the operator has planned the small job", published)
        before = len(webhook.pods)

        async def created() -> bool:
            return {"small-w0-0", "small-w1-0"} <= set(await place.names())

        await eventually("the pods of the small job exist", created)
        # All places are taken. The next free ones go to the job that waits longest, and not to the large ones' rest.
        others = webhook.pods[before : 1 + max(map(webhook.pods.index, ("small-w0-0", "small-w1-0")))]
        assert len(others) <= 4 * AT_ONCE, others


async def test_suspend_ends_the_creation_of_a_large_job(place: Place, control_plane: Any, replica: Replica) -> None:
    async with slow_creates(place, control_plane) as webhook:
        before = len(webhook.pods)
        await place.edit_job("large0", suspend=True)

        async def suspended() -> bool:
            return await place.reason("large0") == "Suspended"

        await eventually("the job is suspended", suspended)

        async def gone() -> bool:
            return not [name for name in await place.names() if name.startswith("large0-")]

        await eventually("its pods are gone, and no more come", gone)
        more = [name for name in webhook.pods[before:] if name.startswith("large0-")]
        assert len(more) <= OF_JOB, "what was under way, and no more"


@pytest.mark.long
async def test_agents_calls_are_answered_while_creates_wait(place: Place, control_plane: Any, replica: Replica) -> None:
    await place.create_job("quick", replicas=8, rendezvous={"backend": "everstep"})

    async def exists() -> bool:
        return len(await place.names()) == 8

    await eventually("its pods exist", exists)
    tokens = [
        token_of(control_plane, place.namespace, name, pod.metadata.uid) for name, pod in (await place.pods()).items()
    ]
    async with slow_creates(place, control_plane, LONG_SECONDS):
        for token in tokens:  # each is one that the operator has never seen
            began = time.monotonic()
            assert await asyncio.to_thread(read_round, replica, token) in (200, 204)
            assert time.monotonic() - began < LONG_SECONDS
