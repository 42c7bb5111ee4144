"""Local mode with real processes: an in-memory cluster, and kubelets that run its pods here.

Every test that uses `machine` also proves that nothing is left of it: no process, folder, open file or reserved port.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from support.local import kubelet_world


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await machine(**options of LocalNodes)` starts one; it is stopped and searched for remains after the test."""
    before = kubelet_world.remains(tmp_path)
    async with AsyncExitStack() as stack:

        async def start(**options: Any) -> Any:
            return await stack.enter_async_context(kubelet_world.started(tmp_path, **options))

        yield start
    await asyncio.sleep(0)
    # What an earlier test of this process dropped may be collected meanwhile, so less than before is no fault.
    assert kubelet_world.remains(tmp_path) - before == set()
