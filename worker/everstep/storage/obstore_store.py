"""Whole objects and ranges through obstore (Rust), everything else through the fsspec backend of the same URL.

obstore has no conditional multipart upload, cannot list or sweep uploads, and its runtime does not survive a fork. So
it carries what it is good at: requests with many bytes. The backend beside it keeps the credentials, the parts and the
listings, and in a forked child of a process that has used obstore it does everything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from everstep.storage.base import (
    Capabilities,
    Data,
    ObjectInfo,
    ObjectStore,
    Upload,
    check_name,
    scatter,
    truncated,
    views_of,
)
from everstep.storage.errors import AlreadyExists, NotFound, StorageError, TerminalError
from everstep.storage.fsspec_store import FsspecStore, bucket_missing
from everstep.storage.locks import ForkLock
from everstep.storage.translate import EXPIRED_CODES, server_code, translate

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

ONE_PIECE: Final = 64 * 2**20
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")

# The process in which obstore's runtime was started; its threads exist there and in no child.
_runtime: list[int] = []


class ObstoreStore(ObjectStore):
    """The objects of `inner`, an S3 or Azure backend."""

    def __init__(self, inner: FsspecStore) -> None:
        self._inner = inner
        self._lock = ForkLock()
        self._client: Client | None = None

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        known = self._inner.capabilities
        return replace(known, one_piece=max(ONE_PIECE, known.part_size))

    def create(self, name: str, data: Data) -> None:
        limit = self.capabilities.one_piece or 0
        if memoryview(data).nbytes > limit or not _usable():
            self._inner.create(name, data)
            return
        try:
            self._put(check_name(name), data, "create")
        except AlreadyExists:
            if self._inner.size(name) is not None:
                raise
            self._inner.create(name, data)  # it knows what else may hold a name

    def put(self, name: str, data: Data) -> None:
        limit = self.capabilities.one_piece or 0
        if memoryview(data).nbytes > limit or not _usable():
            self._inner.put(name, data)
        else:
            self._put(check_name(name), data, "overwrite")

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        check_name(name)
        first = start or 0
        if not _usable() or (end is not None and first >= end):
            return self._inner.get(name, start, end)
        return bytes(self._get(name, None if start is None and end is None else (first, end)))

    def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
        check_name(name)
        views, wanted = views_of(buffers)
        if not wanted or not _usable():
            self._inner.get_into(name, start, *views)
            return
        data = memoryview(self._get(name, (start, start + wanted)))
        if len(data) < wanted:
            raise truncated(self.url, name, start, wanted, len(data))
        scatter(data, views)

    def size(self, name: str) -> int | None:
        return self._inner.size(name)

    def list(self, folder: str = "") -> list[ObjectInfo]:
        return self._inner.list(folder)

    def delete(self, name: str) -> None:
        self._inner.delete(name)

    def start_upload(self, name: str, size_hint: int | None = None) -> Upload:
        return self._inner.start_upload(name, size_hint)

    def sweep_uploads(self, older_than: float) -> int:
        return self._inner.sweep_uploads(older_than)

    def _put(self, name: str, data: Data, mode: str) -> None:
        import obstore  # noqa: PLC0415  an extra

        view = memoryview(data).cast("B")
        try:
            with self._translated("writing", name):
                obstore.put(self._made(), name, view, mode=mode, use_multipart=False)  # type: ignore[arg-type]
        except NotFound as e:
            raise bucket_missing(e) from e

    def _get(self, name: str, span: tuple[int, int | None] | None) -> Any:
        """The object's bytes, or those of a span, in a buffer of obstore's; nothing after the object's end."""
        import obstore  # noqa: PLC0415

        try:
            with self._translated("reading", name):
                client = self._made()
                if span is None:
                    return obstore.get(client, name).bytes()
                options: Any = {"range": span if span[1] is not None else {"offset": span[0]}}
                return obstore.get(client, name, options=options).bytes()
        except TerminalError as e:
            if e.__cause__ is not None and server_code(e.__cause__)[1] == 416:
                return b""
            raise

    def _made(self) -> Client:
        with self._lock:
            if self._client is None:
                from everstep.storage import obstore_clients  # noqa: PLC0415

                _runtime[:] = [os.getpid()]
                self._client = obstore_clients.connect(self._inner)
            return self._client

    @contextmanager
    def _translated(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as e:
            told = _Told(e)
            if server_code(told)[0] in EXPIRED_CODES:
                self._inner.forget()
                self._client = None
            where = f"{self.url}: {doing} {name}"
            raise translate(told, where, bare_404_is_missing=self._inner.bare_404_is_missing) from told


class _Told(Exception):
    """An error of obstore in the shape that `translate` reads: it tells status and code in its words only."""

    def __init__(self, e: Exception) -> None:
        words = str(e)
        status, code = _STATUS.search(words), _CODE.search(words)
        super().__init__(words.split("Debug source:", maxsplit=1)[0].strip()[:500])
        self.__cause__ = e
        if status:
            self.response = {
                "Error": {"Code": code[1] if code else ""},
                "ResponseMetadata": {"HTTPStatusCode": int(status[1])},
            }
        elif "Wanted range starting at" in words:
            self.response = {"Error": {"Code": "InvalidRange"}, "ResponseMetadata": {"HTTPStatusCode": 416}}
        elif "HTTP error" in words:
            self.response = {"Error": {"Code": "NoAnswer"}, "ResponseMetadata": {"HTTPStatusCode": 500}}


def _usable() -> bool:
    return not _runtime or _runtime[0] == os.getpid()
