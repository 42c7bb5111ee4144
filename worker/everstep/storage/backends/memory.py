"""A store in a dict: the oracle that other backends are compared with, and the fastest one for tests.

Invariant: one lock around each operation, so `create` is atomic between threads. Nothing outlives the process.
"""

from __future__ import annotations

from everstep.contract.forks import ForkLock
from everstep.storage.base import Capabilities, ObjectInfo, ObjectStore, check_folder, check_name, part_size_for
from everstep.storage.errors import AlreadyExists, NotFound
from everstep.storage.upload import Data


class MemoryStore(ObjectStore):
    """Objects in this process. `objects` is open to tests that damage them on purpose."""

    def __init__(self, name: str = "", part_size: int | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self._name = name
        self._part_size = part_size
        self._lock = ForkLock()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities().with_part_size(self._part_size)

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

    def start_upload(self, name: str, size_hint: int | None = None) -> MemoryUpload:
        return MemoryUpload(self, check_name(name), part_size_for(self.capabilities.part_size, size_hint))


class MemoryUpload:
    """Parts in a dict."""

    def __init__(self, store: MemoryStore, name: str, part_size: int) -> None:
        self._store = store
        self._name = name
        self.part_size = part_size
        self._parts: dict[int, bytes] = {}

    def write_part(self, number: int, data: Data) -> None:
        self._parts[number] = bytes(data)

    def commit(self) -> None:
        self._store.put(self._name, b"".join(self._parts[n] for n in range(len(self._parts))))

    def abort(self) -> None:
        self._parts = {}
