"""The files of a dataset: on this machine's disks, or far away and through a cache.

Knows no format. Invariant: a file that is not as large as the index says is never read.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from everstep.data.errors import DataError, DatasetUnusable
from everstep.data.shards import Shard, ShardedDataset
from everstep_sources.cache import Cache, CachedFile, Unpack
from everstep_sources.errors import CacheError

log = logging.getLogger("everstep.data")


@dataclass(frozen=True)
class Files:
    """The files below `root`, a folder or URL. With a cache, all of them are read through it."""

    root: str
    cache: Cache | None

    def read(self, name: str) -> bytes:
        """A small file, such as an index, whole. Raises DatasetUnusable."""
        url = self._url(name)
        options = (self.cache.storage_options if self.cache else None) or {}
        try:
            content: bytes = fsspec.filesystem(_scheme(url), **options).cat_file(_path(url))
        except Exception as e:
            raise DatasetUnusable(f"{url} cannot be read: {e!r}") from e
        return content

    def hold(
        self,
        name: str,
        *,
        size: int | None,
        version: str = "",
        stored: int | None = None,
        unpack: Unpack | None = None,
        called: str | None = None,
    ) -> CachedFile:
        """A file to open, until the result is closed. Arguments are those of `Cache.hold`; without a cache nothing is
        unpacked. Raises CacheError, DatasetUnusable."""
        if self.cache is not None:
            url = self._url(name)
            called = called or Path(name).name
            return self.cache.hold(url, version=version, size=size, stored=stored, unpack=unpack, name=called)
        path = Path(_path(self._url(name)))
        if not path.is_file():
            raise DatasetUnusable(f"{path}: the index names this file, and it is not there")
        if size is not None and path.stat().st_size != size:
            raise DatasetUnusable(f"{path} has {path.stat().st_size} bytes, and the index says {size}")
        return CachedFile(path)

    @property
    def local(self) -> bool:
        return _scheme(self.root) == "file"

    def check(self) -> None:
        """Raises DataError for files that are far away and have no cache."""
        if not self.local and self.cache is None:
            raise DataError(
                f"{self.root} is not on this machine: pass cache=everstep_sources.Cache('/a/local/folder',"
                " limit='20 GiB'), which all processes of the node may share"
            )

    def _url(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}" if self.root else name


class Opener(ABC):
    """Opens a shard of one format: a base for those of `everstep_sources`. Has to be picklable."""

    def __init__(self, files: Files) -> None:
        self.files = files

    @abstractmethod
    def __call__(self, name: str) -> Sequence[Any]: ...


class Opened(Sequence[Any]):
    """A shard whose samples `read` gives by their number; it is held until `close`."""

    def __init__(
        self, file: CachedFile, length: int, read: Callable[[int], Any], end: Callable[[], None] = lambda: None
    ):
        self._file, self._length, self._read, self._end = file, length, read, end

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return self._read(index)

    def close(self) -> None:
        try:
            self._end()
        finally:
            self._file.close()


def sharded(
    shards: Sequence[Shard],
    opener: Opener,
    *,
    transform: Callable[[Any], Any] | None,
    open_limit: int,
    identity: str,
    sizes: Mapping[str, int],
) -> ShardedDataset:
    """The dataset, once its cache is known to hold as many shards as may be open. `sizes`: bytes, by shard."""
    cache = opener.files.cache
    if cache is not None and sizes:
        largest = sum(sorted(sizes.values(), reverse=True)[:open_limit])
        if largest > cache.bytes:
            raise CacheError(
                f"open_limit={open_limit} shards take up to {largest} bytes, and the cache's limit is {cache.bytes}:"
                " pass a larger limit= to Cache (for each process of a node that shares it), or a smaller open_limit="
            )
        if sum(sizes.values()) > cache.bytes:
            log.info(
                "%s: %d bytes of shards through a cache of %d: shuffle=Blocks(window=…) fetches each about once an"
                " epoch, shuffle=True many times", opener.files.root, sum(sizes.values()), cache.bytes,
            )  # fmt: skip
    return ShardedDataset(shards, opener, transform=transform, open_limit=open_limit, identity=identity)


def library(module: str, reads: str, package: str) -> Any:
    """A module of an optional library. `reads`: what needs it and for what, in words. Raises DataError."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise DataError(f"{reads}, which cannot be imported ({e}): pip install {package}") from e


def _scheme(url: str) -> str:
    return url.split("://", 1)[0] if "://" in url else "file"


def _path(url: str) -> str:
    return url.split("://", 1)[1] if url.startswith("file://") else url
