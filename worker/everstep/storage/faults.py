"""A store that fails on purpose: the crash and fault tests enumerate its calls.

Each call of the wrapped store has a number from 0. A fault at a number happens before the call, or after it where the
name says so. Shipped, not test code, so that those who write a backend can put it through the same faults.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, assert_never

from everstep.storage.base import Data, ObjectInfo, ObjectStore
from everstep.storage.errors import RetryableError

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
    """Write only the first half of the bytes under the name, then die: a store without atomic writes."""


@dataclass(frozen=True, slots=True)
class Die:
    """SIGKILL this process before the call."""


@dataclass(frozen=True, slots=True)
class DieAfter:
    """SIGKILL this process after the call."""


Fault = Fail | LoseResponse | Delay | Tear | Die | DieAfter


class FaultStore:
    """`inner` with faults by call number. `calls` records every call as `"operation name"`."""

    def __init__(self, inner: ObjectStore, faults: Mapping[int, Fault] | None = None) -> None:
        self._inner = inner
        self._faults = dict(faults or {})
        self._lock = threading.Lock()
        self.calls: list[str] = []

    @property
    def url(self) -> str:
        return self._inner.url

    def create(self, name: str, data: Data) -> None:
        self._call("create", name, lambda: self._inner.create(name, data), data)

    def put(self, name: str, data: Data) -> None:
        self._call("put", name, lambda: self._inner.put(name, data), data)

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._call("get", name, lambda: self._inner.get(name, start, end))

    def size(self, name: str) -> int | None:
        return self._call("size", name, lambda: self._inner.size(name))

    def list(self, folder: str = "") -> list[ObjectInfo]:
        return self._call("list", folder, lambda: self._inner.list(folder))

    def delete(self, name: str) -> None:
        self._call("delete", name, lambda: self._inner.delete(name))

    def _call(self, operation: str, name: str, act: Callable[[], T], data: Data = b"") -> T:
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
                if data:
                    self._inner.put(name, memoryview(data).cast("B")[: len(data) // 2])
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
