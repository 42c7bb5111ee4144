"""What may be waited for at a real API server, and namespaces in which pods can be made."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import NotFound
from support.conformity.bodies import ACCOUNTS, NAMESPACES

LIMIT = 40.0  # seconds that any wait may take


async def eventually(what: str, holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + LIMIT
    while True:
        answer = holds()
        if await answer if isinstance(answer, Awaitable) else answer:
            return
        assert time.monotonic() < deadline, f"not within {LIMIT:.0f} s: {what}"
        await asyncio.sleep(0.03)


async def make_namespace(client: KubeClient, name: str) -> None:
    """One in which pods can be made: with its service account."""
    await client.create(NAMESPACES, None, {"metadata": {"name": name}})

    async def has_account() -> bool:
        try:
            await client.get(ACCOUNTS, name, "default")
        except NotFound:
            return False
        return True

    await eventually("the namespace has its service account", has_account)


def compact(control_plane: Any, resource_version: str) -> None:
    """Make etcd forget every older revision."""
    endpoint = next(value for value in control_plane.etcd.argv if value.startswith("http://127.0.0.1:"))
    body = json.dumps({"revision": resource_version, "physical": True}).encode()
    with urllib.request.urlopen(f"{endpoint}/v3/kv/compaction", data=body, timeout=10) as reply:
        assert reply.status == 200
