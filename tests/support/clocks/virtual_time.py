"""An event loop whose time passes only when all wait for it, and then at once, to the next timer.

For code that reads the loop's own clock. What takes seconds there takes none here, and how busy the machine is changes
nothing. It is not for sockets or processes: nobody would wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            timers = [one.when() for one in self._scheduled if not one.cancelled()]  # type: ignore[attr-defined]
            self._now = max(self._now, min(timers, default=self._now))
        super()._run_once()  # type: ignore[misc]


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run this test in such a loop."""

    @wraps(test)
    def run(**arguments: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(**arguments))

    return run
