"""An event that a handler of signals may use while it interrupts the use of the same one.

`threading.Event` holds a lock while it is set, and while a wait begins. A handler runs between two instructions of the
main thread; one that sets or waits for the same event then waits for the thread that it interrupts. This one has no
lock of its own. For the same reason a queue that handlers may reach is a `queue.SimpleQueue`.
"""

from __future__ import annotations

import contextlib
import threading


class Flag:
    """Set once, and waited for by any number of threads.

    Invariant: who waits is in the list before it looks, and who sets it looks into the list afterwards. So one of the
    two sees the other, whatever runs in between.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[threading.Lock] = []  # one for each wait, held until the flag is set

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for lock in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # released already, where two set it
                lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is set, after `timeout` seconds at most."""
        lock = threading.Lock()
        lock.acquire()
        self._waiting.append(lock)
        try:
            if not self._set:
                lock.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))
        finally:
            self._waiting.remove(lock)
        return self._set
