"""Local mode with real processes: an in-memory cluster, and kubelets that run its pods here.

Every test that uses `machine` also proves that nothing is left of it: no process, folder, open file or reserved port.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def kubelet_world() -> ModuleType:
    return _load("kubelet_world")


@pytest.fixture
async def machine(kubelet_world: ModuleType, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await machine(**options of LocalNodes)` starts one; it is stopped and searched for remains after the test."""
    before = kubelet_world.Remains.now(tmp_path)
    async with AsyncExitStack() as stack:

        async def start(**options: Any) -> Any:
            return await stack.enter_async_context(kubelet_world.started(tmp_path, **options))

        yield start
    await asyncio.sleep(0)
    assert kubelet_world.Remains.now(tmp_path) == before
