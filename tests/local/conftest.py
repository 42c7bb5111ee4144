"""Local mode with real processes: an in-memory cluster, and kubelets that run its pods here.

Every test that uses `machine` also proves that nothing is left of it: no process, folder, open file or reserved port.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import kubelet_world as world


@pytest.fixture(scope="session")
def kubelet_world() -> ModuleType:
    return world


@pytest.fixture
async def machine(kubelet_world: ModuleType, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await machine(**options of LocalNodes)` starts one; it is stopped and searched for remains after the test."""
    before = kubelet_world.remains(tmp_path)
    async with AsyncExitStack() as stack:

        async def start(**options: Any) -> Any:
            return await stack.enter_async_context(kubelet_world.started(tmp_path, **options))

        yield start
    await asyncio.sleep(0)
    # What an earlier test of this process dropped may be collected meanwhile, so less than before is no fault.
    assert kubelet_world.remains(tmp_path) - before == set()
