"""The warm parent and the processes that it forks, without the agent."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.processes import WarmParent

pytestmark = pytest.mark.timeout(120)


def program(folder: Path) -> dict[str, Any]:
    """A process that goes on for ever."""
    script = folder / "sleep.py"
    script.write_text("import time\ntime.sleep(10_000)\n")
    return {
        "kind": "program", "target": str(script), "arguments": [], "module": False, "executable": False,
        "environment": dict(os.environ), "stdout": None, "stderr": None, "stacks": str(folder / "stacks"),
    }  # fmt: skip


async def test_a_signal_that_follows_the_fork_at_once_reaches_the_process(tmp_path: Path) -> None:
    ended: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    warm = WarmParent([], os.environ, lambda pid, code: ended.put_nowait((pid, code)))
    await warm.start()
    try:
        for _ in range(30):
            pid = await warm.fork(program(tmp_path))
            warm.signal(pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                assert await ended.get() == (pid, -signal.SIGKILL)
    finally:
        await warm.close()
