"""The warm parent and the processes that it forks, without the agent."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
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


# The end of a process that ended just before its parent began to wait was told with the next one: 2 of 8,000.
FORKS = int(os.environ.get("EVERSTEP_FORKS", "300"))


async def test_a_signal_that_follows_the_fork_at_once_reaches_the_process_and_its_end_is_told(tmp_path: Path) -> None:
    seed = int(os.environ.get("EVERSTEP_SEED", random.randrange(10**6)))
    print(f"EVERSTEP_SEED={seed}")
    chance, asked = random.Random(seed), program(tmp_path)
    ended: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    warm = WarmParent([], os.environ, lambda pid, code: ended.put_nowait((pid, code)))
    await warm.start()
    try:
        for _ in range(FORKS):
            pid = await warm.fork(asked)
            until = time.perf_counter() + chance.random() * 3e-4
            while time.perf_counter() < until:
                pass  # no sleep is as short
            warm.signal(pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                assert await ended.get() == (pid, -signal.SIGKILL)
    finally:
        await warm.close()
