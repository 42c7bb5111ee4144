"""A store around another: each call, also of an upload, goes through one method, which may repeat it or let it fail."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

from everstep.storage.base import Capabilities, ObjectInfo, ObjectStore
from everstep.storage.upload import Data, Upload

T = TypeVar("T")


class WrappedStore(ObjectStore):
    """Passes the calls on to `inner` by `call`."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner

    @abstractmethod
    def call(self, operation: str, name: str, act: Callable[[], T], tear: Callable[[], None] = lambda: None) -> T:
        """Do `act`. `operation`: the name of a method, or of one of an upload. `tear` writes the first half of the
        bytes that `act` would write: for stores that fail on purpose."""

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
        return WrappedUpload(self, name, self.call("start", name, lambda: self._inner.start_upload(name, size_hint)))

    def sweep_uploads(self, older_than: float, dead: Callable[[str], bool] = lambda name: False) -> int:
        return self.call("sweep", "", lambda: self._inner.sweep_uploads(older_than, dead))

    def _tear(self, name: str, data: Data) -> None:
        self._inner.put(name, _half(data))


class WrappedUpload:
    """The upload of a `WrappedStore`: its parts are passed on one by one."""

    def __init__(self, store: WrappedStore, name: str, inner: Upload) -> None:
        self._store, self._name, self._inner = store, name, inner
        self.part_size = inner.part_size

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
