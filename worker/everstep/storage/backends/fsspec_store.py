"""Any object store that fsspec reaches, through the few calls whose meaning is the same on all of them.

The big three and web servers have backends of their own on the same file systems (`s3`, `gcs`, `azure`, `web`);
`generic` serves the rest.
Invariants:
- One attempt a call: the file systems' own retries are switched off, because the bound is `retry`'s to keep.
- No listing cache: a cached listing would hide another writer's commit.
- The file system belongs to the process that made it. Its event-loop thread does not survive a fork, so a child makes
  its own on first use.
- A client whose credentials the server calls expired is dropped; the next one reads them again.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import fsspec
import fsspec.asyn

from everstep.contract.forks import ForkLock
from everstep.storage.backends.translate import EXPIRED_CODES, cannot_open, server_code, translate
from everstep.storage.base import Capabilities, ObjectInfo, ObjectStore, check_folder, check_name
from everstep.storage.errors import NotFound, StorageError, StoreUnusable, Truncated
from everstep.storage.upload import Data

# Settings of the fsspec file system (keys, endpoint and the like), or a function that gives fresh ones to each client.
Options = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

T = TypeVar("T")

_FOLDERS: Final = 3  # made for one object: a folder goes when another writer deletes the last object in it


class FsspecStore(ObjectStore):
    """Objects below `url`. `part_size` is the store's `Capabilities.part_size`; None is the backend's own."""

    bare_404_is_missing = True
    offers = Capabilities(multipart=False)

    def __init__(self, url: str, options: Options | None = None, part_size: int | None = None) -> None:
        self._url = url.rstrip("/")
        self._scheme = url.split("://", 1)[0]
        self._options = options or {}
        self._part_size = part_size
        self._lock = ForkLock()
        self._made: tuple[int, Any, str] | None = None

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return self.offers.with_part_size(self._part_size)

    def create(self, name: str, data: Data) -> None:
        self._write(name, data, "create")

    def put(self, name: str, data: Data) -> None:
        self._write(name, data, "overwrite")

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        check_name(name)
        if start is not None and end is not None and start >= end:
            return b""  # no HTTP range means "nothing"
        try:
            with self.translated("reading", name):
                fs, root = self.fs()
                data = bytes(fs.cat_file(f"{root}/{name}", start=start, end=end))
        except Truncated:
            return b""  # a range after the end, which slices and files answer with nothing
        if start is not None and end is not None and start >= 0 and len(data) > end - start:
            return data[start:end]  # a plain HTTP server may ignore the range, and send all
        return data

    def size(self, name: str) -> int | None:
        check_name(name)
        try:
            with self.translated("looking at", name):
                fs, root = self.fs()
                info = fs.info(f"{root}/{name}")
                return int(info["size"] or 0) if info["type"] == "file" else None
        except NotFound:
            return None

    def list(self, folder: str = "") -> list[ObjectInfo]:
        check_folder(folder)
        try:
            with self.translated("listing", folder):
                fs, root = self.fs()
                files = self.files(fs, f"{root}/{folder}".rstrip("/"))
        except NotFound:
            return []
        prefix = f"{root}/".lstrip("/")
        listed = ((path.lstrip("/").removeprefix(prefix), info) for path, info in files.items())
        return sorted(ObjectInfo(name, int(info["size"] or 0)) for name, info in listed if name.startswith(folder))

    def files(self, fs: Any, top: str) -> Mapping[str, Mapping[str, Any]]:
        """By its path, what the file system says of every file below `top`."""
        listed: Mapping[str, Mapping[str, Any]] = fs.find(top, detail=True)
        return listed

    def delete(self, name: str) -> None:
        check_name(name)
        self.check_writable()
        try:
            with self.translated("deleting", name):
                fs, root = self.fs()
                fs.rm_file(f"{root}/{name}")
        except NotFound:
            return

    def _write(self, name: str, data: Data, mode: str) -> None:
        check_name(name)
        self.check_writable()
        body = bytes(data) if isinstance(data, memoryview) else data
        for _ in range(_FOLDERS):
            try:
                return self._pipe(name, body, mode)
            except NotFound as e:
                # Behind some schemes (sftp, smb) are real folders, which have to be made.
                if not self._make_folder(name):
                    raise bucket_missing(e) from e
        return self._pipe(name, body, mode)

    def _pipe(self, name: str, data: bytes | bytearray, mode: str) -> None:
        with self.translated("writing", name):
            fs, root = self.fs()
            fs.pipe_file(f"{root}/{name}", data, mode=mode)

    def _make_folder(self, name: str) -> bool:
        """Make the folder of an object; but never a bucket. False if there is no bucket."""
        with self.translated("making the folder of", name):
            fs, root = self.fs()
            top = root[: root.find("/", 1)] if "/" in root[1:] else root
            if not fs.isdir(top):
                return False
            fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            return True

    def check_writable(self) -> None:
        if not self.capabilities.writable:
            raise StoreUnusable(
                f"{self._url}: {self._scheme}:// can only be read. Checkpoints are restored from there; to save, use "
                "the object store's own URL (s3://, gs://, az://) or a folder"
            )

    def fs(self) -> tuple[Any, str]:
        """This process's file system, and the path of the store's root on it."""
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():
                try:
                    fs, root = self._open()
                except (ImportError, ValueError) as e:
                    raise StoreUnusable(cannot_open(self._url, self._scheme, e)) from e
                self._made = (os.getpid(), fs, str(root).rstrip("/"))
            return self._made[1], self._made[2]

    def run(self, doing: str, name: str, request: Callable[[Any], Awaitable[T]]) -> T:
        """Run one request on the loop of a file system that is asynchronous."""
        with self.translated(doing, name):
            fs, _ = self.fs()
            result: T = fsspec.asyn.sync(fs.loop, request, fs)
            return result

    def forget(self) -> None:
        """Drop the client, and the credentials that it read."""
        with self._lock:
            self._made = None

    def _open(self) -> tuple[Any, str]:
        fs, root = fsspec.core.url_to_fs(self._url, **self.arguments())
        return fs, str(root)

    def arguments(self) -> dict[str, Any]:
        """The arguments with which the file system is made."""
        options = self._options() if callable(self._options) else self._options
        return {"skip_instance_cache": True, "use_listings_cache": False, "asynchronous": False, **options}

    @contextmanager
    def translated(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as e:
            if server_code(e)[0] in EXPIRED_CODES:
                self.forget()
            where = f"{self._url}: {doing} {name or '/'}"
            raise translate(e, where, bare_404_is_missing=self.bare_404_is_missing) from e


def bucket_missing(e: NotFound) -> StoreUnusable:
    """Writing an object can meet nothing that is missing but the bucket."""
    return StoreUnusable(f"{e}. The bucket of this URL does not exist: create it or fix the URL")
