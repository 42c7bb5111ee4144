"""A store in a dict: the oracle that other backends are compared with, and the fastest one for tests.

Invariant: one lock around each operation, so `create` is atomic between threads. Nothing outlives the process.
"""

from __future__ import annotations

import threading

from everstep.storage.base import Data, ObjectInfo, check_folder, check_name
from everstep.storage.errors import AlreadyExists, NotFound


class MemoryStore:
    """Objects in this process. `objects` is open to tests that damage them on purpose."""

    def __init__(self, name: str = "") -> None:
        self.objects: dict[str, bytes] = {}
        self._name = name
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def create(self, name: str, data: Data) -> None:
        check_name(name)
        with self._lock:
            if name in self.objects:
                raise AlreadyExists(f"{self.url}: {name} exists")
            self.objects[name] = bytes(data)

    def put(self, name: str, data: Data) -> None:
        check_name(name)
        with self._lock:
            self.objects[name] = bytes(data)

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        check_name(name)
        with self._lock:
            if name not in self.objects:
                raise NotFound(f"{self.url}: no object {name}")
            return self.objects[name][start:end]

    def size(self, name: str) -> int | None:
        check_name(name)
        with self._lock:
            data = self.objects.get(name)
        return None if data is None else len(data)

    def list(self, folder: str = "") -> list[ObjectInfo]:
        check_folder(folder)
        with self._lock:
            return sorted(ObjectInfo(name, len(data)) for name, data in self.objects.items() if name.startswith(folder))

    def delete(self, name: str) -> None:
        check_name(name)
        with self._lock:
            self.objects.pop(name, None)
