"""A store that fails on purpose: the crash and fault tests enumerate its calls.

Each call of the wrapped store has a number from 0; the start, each part, the commit and the abort of an upload are
calls of their own. A fault at a number happens before the call, or after it where the name says so. Shipped, not test
code, so that those who write a backend can put it through the same faults.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, assert_never

from everstep.storage.base import ObjectStore
from everstep.storage.errors import RetryableError
from everstep.storage.wrapped import WrappedStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise `error` instead of the call."""

    error: Exception


@dataclass(frozen=True, slots=True)
class LoseResponse:
    """Do the call, then raise `RetryableError`, as when the connection breaks after the server has written."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait `seconds`, then do the call."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tear:
    """Write only the first half of the bytes (of an object, or of a part), then die: a store without atomic writes."""


@dataclass(frozen=True, slots=True)
class Die:
    """SIGKILL this process before the call."""


@dataclass(frozen=True, slots=True)
class DieAfter:
    """SIGKILL this process after the call."""


Fault = Fail | LoseResponse | Delay | Tear | Die | DieAfter


class FaultStore(WrappedStore):
    """`inner` with faults by call number. `calls` records every call as `"operation name"`; a part is
    `"part name#number"`."""

    def __init__(self, inner: ObjectStore, faults: Mapping[int, Fault] | None = None) -> None:
        super().__init__(inner)
        self._faults = dict(faults or {})
        self._lock = threading.Lock()
        self.calls: list[str] = []

    def call(self, operation: str, name: str, act: Callable[[], T], tear: Callable[[], None] = lambda: None) -> T:
        """Record the call and do it, or what the fault of its number says."""
        with self._lock:
            fault = self._faults.get(len(self.calls))
            self.calls.append(f"{operation} {name}")
        match fault:
            case None:
                return act()
            case Fail(error):
                raise error
            case LoseResponse():
                act()
                raise RetryableError(f"response to {operation} {name} lost")
            case Delay(seconds):
                time.sleep(seconds)
                return act()
            case Tear():
                tear()
                _die()
            case Die():
                _die()
            case DieAfter():
                act()
                _die()
            case _:
                assert_never(fault)
        raise AssertionError("unreachable: the process was killed")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is delivered before this returns
