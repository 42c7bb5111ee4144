"""The operator before an API server whose creates are slow: what is urgent waits for none of them."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable
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
# The slots of creates are all taken: the next one is free after one create, and it goes to the job that waits longest.
POD_SECONDS = 8 * CREATE_SECONDS  # half of it on a machine with nothing else to do
SUSPEND_SECONDS = 3 * CREATE_SECONDS
ANSWER_SECONDS = 2.0
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
async def slow_creates(place: Place, plane: Any) -> AsyncGenerator[SlowWebhook, None]:
    """Large jobs whose pods are being created, as many at a time as the operator likes."""
    async with SlowWebhook(place.client, plane, place.namespace, CREATE_SECONDS) as webhook:
        for number in range(LARGE_JOBS):
            await place.create_job(f"large{number}", replicas=LARGE)
        await eventually("many creates wait for the webhook", lambda: webhook.waiting >= 32)
        yield webhook


async def transitions(place: Place) -> int:
    return (await place.client.get(LEASES, place.namespace, "everstep-operator")).spec.lease_transitions or 0


async def seconds_until(what: str, holds: Callable[[], Awaitable[bool]]) -> float:
    began = time.monotonic()
    await eventually(what, holds)
    return time.monotonic() - began


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


async def test_second_job_is_created_while_the_creates_of_large_jobs_wait(
    place: Place, control_plane: Any, replica: Replica
) -> None:
    async with slow_creates(place, control_plane):
        await place.create_job("small", replicas=2)

        async def created() -> bool:
            return {"small-w0-0", "small-w1-0"} <= set(await place.names())

        assert await seconds_until("the pods of the small job exist", created) < POD_SECONDS


async def test_suspend_ends_the_creation_of_a_large_job(place: Place, control_plane: Any, replica: Replica) -> None:
    async with slow_creates(place, control_plane):
        await place.edit_job("large0", suspend=True)

        async def suspended() -> bool:
            return await place.reason("large0") == "Suspended"

        assert await seconds_until("the job is suspended", suspended) < SUSPEND_SECONDS

        async def gone() -> bool:
            return not [name for name in await place.names() if name.startswith("large0-")]

        await eventually("its pods are gone, and no more come", gone)


async def test_agents_calls_are_answered_while_creates_wait(place: Place, control_plane: Any, replica: Replica) -> None:
    await place.create_job("quick", replicas=8, rendezvous={"backend": "everstep"})

    async def exists() -> bool:
        return len(await place.names()) == 8

    await eventually("its pods exist", exists)
    tokens = [
        token_of(control_plane, place.namespace, name, pod.metadata.uid) for name, pod in (await place.pods()).items()
    ]
    async with slow_creates(place, control_plane):
        for token in tokens:  # each is one that the operator has never seen
            began = time.monotonic()
            assert await asyncio.to_thread(read_round, replica, token) in (200, 204)
            assert time.monotonic() - began < ANSWER_SECONDS
