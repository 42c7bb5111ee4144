"""Azure Blob Storage: adlfs gives the credentials and the client, the requests go through Azure's own SDK.

Parts are blocks. Uncommitted blocks belong to the blob's name, not to an upload, so their ids carry a random prefix:
two writers of one name cannot mix; the blocks of the one that commits last are the blob. Blocks that nobody commits are
deleted by the service after a week.
"""

from __future__ import annotations

import base64
import secrets
from typing import Any, Final, TypeVar

from everstep.contract.forks import ForkLock
from everstep.storage.backends.fsspec_store import FsspecStore, bucket_missing
from everstep.storage.base import (
    Capabilities,
    ObjectInfo,
    check_folder,
    check_name,
    part_size_for,
    scatter,
    truncated,
    views_of,
)
from everstep.storage.errors import NotFound, Truncated
from everstep.storage.upload import Data

T = TypeVar("T")

SCHEMES: Final = frozenset({"az", "abfs", "abfss"})
_ONCE: Final = {"retry_total": 0, "connection_timeout": 5, "read_timeout": 60}


class AzureStore(FsspecStore):
    """Objects below `az://container/prefix`. `options` go to adlfs."""

    offers = Capabilities()

    def create(self, name: str, data: Data) -> None:
        self._upload(check_name(name), data, overwrite=False)

    def put(self, name: str, data: Data) -> None:
        self._upload(check_name(name), data, overwrite=True)

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        check_name(name)
        first = start or 0
        if end is not None and first >= end:
            return b""

        async def read(fs: Any) -> bytes:
            length = None if end is None else end - first
            async with self.blob(fs, name) as blob:
                answer = await blob.download_blob(offset=first, length=length, **_ONCE)
                return bytes(await answer.readall())

        try:
            return self.run("reading", name, read)
        except Truncated:
            return b""

    def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
        check_name(name)
        views, wanted = views_of(buffers)
        if not wanted:
            return

        async def read(fs: Any) -> int:
            done = 0
            async with self.blob(fs, name) as blob:
                answer = await blob.download_blob(offset=start, length=wanted, **_ONCE)
                async for data in answer.chunks():
                    scatter(memoryview(data), views, done)
                    done += len(data)
            return done

        try:
            got = self.run("reading", name, read)
        except Truncated:
            got = 0
        if got < wanted:
            raise truncated(self.url, name, start, wanted, got)

    def size(self, name: str) -> int | None:
        check_name(name)

        async def look(fs: Any) -> int:
            async with self.blob(fs, name) as blob:
                return int((await blob.get_blob_properties(**_ONCE)).size)

        try:
            return self.run("looking at", name, look)
        except NotFound:
            return None

    def list(self, folder: str = "") -> list[ObjectInfo]:
        check_folder(folder)

        async def collect(fs: Any) -> list[ObjectInfo]:
            container, prefix = self.at(folder)
            root = len(prefix) - len(folder)
            async with fs.service_client.get_container_client(container) as client:
                blobs = client.list_blobs(name_starts_with=prefix, **_ONCE)
                return sorted([ObjectInfo(b.name[root:], int(b.size)) async for b in blobs if not b.name.endswith("/")])

        try:
            return self.run("listing", folder, collect)
        except NotFound:
            return []

    def delete(self, name: str) -> None:
        check_name(name)

        async def remove(fs: Any) -> None:
            async with self.blob(fs, name) as blob:
                await blob.delete_blob(**_ONCE)

        try:
            self.run("deleting", name, remove)
        except NotFound:
            return

    def start_upload(self, name: str, size_hint: int | None = None) -> AzureUpload:
        return AzureUpload(self, check_name(name), part_size_for(self.capabilities.part_size, size_hint))

    def at(self, name: str) -> tuple[str, str]:
        """Container and blob of a name."""
        _, root = self.fs()
        container, _, prefix = root.partition("/")
        return container, f"{prefix}/{name}" if prefix else name

    def blob(self, fs: Any, name: str) -> Any:
        """A client of one blob, for `async with`."""
        container, key = self.at(name)
        return fs.service_client.get_blob_client(container=container, blob=key)

    def _upload(self, name: str, data: Data, *, overwrite: bool) -> None:
        async def write(fs: Any) -> None:
            async with self.blob(fs, name) as blob:
                await blob.upload_blob(_body(data), overwrite=overwrite, **_ONCE)

        try:
            self.run("writing", name, write)
        except NotFound as e:
            raise bucket_missing(e) from e


class AzureUpload:
    """Blocks and their list."""

    def __init__(self, store: AzureStore, name: str, part_size: int) -> None:
        self._store = store
        self._name = name
        self.part_size = part_size
        self._id = secrets.token_hex(8)
        self._lock = ForkLock()
        self._numbers: set[int] = set()

    def write_part(self, number: int, data: Data) -> None:
        async def stage(fs: Any) -> None:
            async with self._store.blob(fs, self._name) as blob:
                await blob.stage_block(self._block(number), _body(data), length=memoryview(data).nbytes, **_ONCE)

        try:
            self._store.run(f"writing part {number} of", self._name, stage)
        except NotFound as e:
            raise bucket_missing(e) from e
        with self._lock:
            self._numbers.add(number)

    def commit(self) -> None:
        from azure.storage.blob import BlobBlock  # noqa: PLC0415  an extra

        # Each id stands for its newest block: after a commit whose answer was lost, for that of the blob itself.
        blocks = [BlobBlock(self._block(number)) for number in sorted(self._numbers)]

        async def finish(fs: Any) -> None:
            async with self._store.blob(fs, self._name) as blob:
                await blob.commit_block_list(blocks, **_ONCE)

        self._store.run("committing", self._name, finish)

    def abort(self) -> None:
        """Uncommitted blocks cannot be deleted; the service does so after a week."""

    def _block(self, number: int) -> str:
        return base64.b64encode(f"{self._id}-{number:06}".encode()).decode()


def _body(data: Data) -> bytes:
    return data if isinstance(data, bytes) else bytes(data)
