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

from everstep.storage.base import Capabilities, ObjectInfo, ObjectStore
from everstep.storage.errors import RetryableError
from everstep.storage.upload import Data, Upload

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


class FaultStore(ObjectStore):
    """`inner` with faults by call number. `calls` records every call as `"operation name"`; a part is
    `"part name#number"`."""

    def __init__(self, inner: ObjectStore, faults: Mapping[int, Fault] | None = None) -> None:
        self._inner = inner
        self._faults = dict(faults or {})
        self._lock = threading.Lock()
        self.calls: list[str] = []

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def create(self, name: str, data: Data) -> None:
        self.call("create", name, lambda: self._inner.create(name, data), lambda: self._tear(name, data))

    def put(self, name: str, data: Data) -> None:
        self.call("put", name, lambda: self._inner.put(name, data), lambda: self._tear(name, data))

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        return self.call("get", name, lambda: self._inner.get(name, start, end))

    def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
        self.call("get_into", name, lambda: self._inner.get_into(name, start, *buffers))

    def size(self, name: str) -> int | None:
        return self.call("size", name, lambda: self._inner.size(name))

    def list(self, folder: str = "") -> list[ObjectInfo]:
        return self.call("list", folder, lambda: self._inner.list(folder))

    def delete(self, name: str) -> None:
        self.call("delete", name, lambda: self._inner.delete(name))

    def start_upload(self, name: str, size_hint: int | None = None) -> Upload:
        inner = self.call("start", name, lambda: self._inner.start_upload(name, size_hint))
        return FaultUpload(self, name, inner)

    def sweep_uploads(self, older_than: float, dead: Callable[[str], bool] = lambda name: False) -> int:
        return self.call("sweep", "", lambda: self._inner.sweep_uploads(older_than, dead))

    def call(self, operation: str, name: str, act: Callable[[], T], tear: Callable[[], None] = lambda: None) -> T:
        """Record the call and do it, or what the fault of its number says. `tear` does half of it."""
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

    def _tear(self, name: str, data: Data) -> None:
        self._inner.put(name, _half(data))


class FaultUpload:
    """The upload of a `FaultStore`: each of its calls counts among the store's."""

    def __init__(self, store: FaultStore, name: str, inner: Upload) -> None:
        self._store = store
        self._name = name
        self._inner = inner

    @property
    def part_size(self) -> int:
        return self._inner.part_size

    def write_part(self, number: int, data: Data) -> None:
        def tear() -> None:
            self._inner.write_part(number, _half(data))

        self._store.call("part", f"{self._name}#{number}", lambda: self._inner.write_part(number, data), tear)

    def commit(self) -> None:
        self._store.call("commit", self._name, self._inner.commit)

    def abort(self) -> None:
        self._store.call("abort", self._name, self._inner.abort)


def _half(data: Data) -> memoryview:
    view = memoryview(data).cast("B")
    return view[: len(view) // 2]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is delivered before this returns
