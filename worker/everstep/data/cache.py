"""A folder for files that are far away, with a limit, shared by the processes of a node.

A file that is open is held: its entry's directory carries a shared `flock`, which the kernel drops with the process,
however that ends. Invariants:

- What is held is never removed. What nobody holds is removed when room is needed, least recently used first.
- An entry gets its name when it is complete, flushed to the disk and has its checksum beside it; each opening checks
  it. A half-written or damaged file is never given out: it is fetched again.
- Entries and what is being fetched take no more than the limit together. Room is reserved before the first byte.

`flock` does not reach other machines: the folder has to be on a disk of this node.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fsspec
import xxhash

from everstep.data.errors import CacheError, CacheFull, DataError
from everstep.data.room import Turn, bytes_of, make_room, opened, part_of, remove

_PIECE: Final = 1 << 20
_POLL: Final = 0.05
_ATTEMPTS: Final = 3
_LOCKS: Final = 256  # files that order who fetches; two URLs may share one

Unpack = Callable[[bytes], bytes]


@dataclass(slots=True)
class Held:
    """A file that stays where it is until `close`."""

    path: Path
    _lock: int = -1

    def close(self) -> None:
        """Twice does no harm."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)  # not LOCK_UN: a forked worker has the same lock, and may still read


@dataclass(frozen=True)
class Cache:
    """Files by URL, at most `limit` of them in bytes (an integer, or "20 GiB"), in `folder` on a disk of this node.

    Give the same folder and limit to all processes of the node. `patience`: seconds to wait for room that others hold,
    and for another process that fetches the same file. `storage_options`: for fsspec, beside what it finds in the
    environment.
    """

    folder: str | os.PathLike[str]
    limit: int | str
    patience: float = 600.0
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        bytes_of(self.limit)
        if not self.patience > 0:
            raise DataError(f"Cache(patience={self.patience}): more than 0 seconds are expected")

    @property
    def bytes(self) -> int:
        """The limit."""
        return bytes_of(self.limit)

    def hold(
        self,
        url: str,
        *,
        version: str = "",
        size: int | None = None,
        stored: int | None = None,
        unpack: Unpack | None = None,
        name: str | None = None,
    ) -> Held:
        """The file at `url`, fetched if it is not here; close what is returned.

        `version`: what else tells this content from what was at the URL before. `stored`: bytes that the store must
        give; `size`: of what is kept, which is another number with `unpack`, a function of the whole content. `name`:
        of the file in the cache. Raises CacheError.
        """
        key = hashlib.blake2b(f"{url}\0{version}".encode(), digest_size=16).hexdigest()
        root = self._made()
        until = time.monotonic() + self.patience
        if (found := self._whole(root / key, until)) is not None:
            return found
        lock = root / "locks" / f"{int(key, 16) % _LOCKS:02x}"
        with Turn(lock, until, f"{url}: another process of this node fetches it, or a file that shares its lock"):
            if (found := self._whole(root / key, until)) is not None:
                return found
            self._fetch(root, key, url, name or url.rsplit("/", 1)[-1], size, stored, unpack, until)
            if (found := self._whole(root / key, until)) is not None:
                return found
        raise CacheError(f"{url}: what was fetched into {root} was damaged at once: check the disk")

    def _made(self) -> Path:
        root = Path(self.folder)
        try:
            (root / "locks").mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CacheError(f"Cache({str(root)!r}): the folder cannot be made ({e}): pass another folder") from e
        return root

    def _whole(self, entry: Path, until: float) -> Held | None:
        """The entry, held; None if there is none. A damaged one is removed."""
        while (lock := opened(entry, fcntl.LOCK_SH)) is not None:
            path = _checked(entry)
            if path is not None:
                with suppress(OSError):
                    os.utime(entry)
                return Held(path, lock)
            os.close(lock)
            if (alone := opened(entry, fcntl.LOCK_EX)) is not None:
                remove(entry, alone)
            elif time.monotonic() > until:
                raise CacheError(f"{entry} is damaged, and other processes hold it: stop them, and remove that folder")
            else:
                time.sleep(_POLL)
        return None

    def _fetch(
        self,
        root: Path,
        key: str,
        url: str,
        name: str,
        size: int | None,
        stored: int | None,
        unpack: Unpack | None,
        until: float,
    ) -> None:
        fs, path = fsspec.core.url_to_fs(url, **(self.storage_options or {}))
        fetched = stored if stored is not None else _size(fs, path, url)
        kept = size if size is not None else fetched
        part = part_of(root, kept)
        lock = -1
        try:
            lock = make_room(root, part, self.bytes, until, url)
            content = _fetched(fs, path, url, fetched)
            _write(part, name, url, unpack(content) if unpack else content, kept)
            part.rename(root / key)
            _flush(root)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(root).free
                raise CacheFull(
                    f"{url}: the disk of {root} is full ({free} bytes free) before the cache has reached its limit of"
                    f" {self.bytes} bytes: pass a smaller limit= to Cache, or make room there"
                ) from e
            raise CacheError(f"{url} cannot be written into {root}: {e}") from e
        finally:
            shutil.rmtree(part, ignore_errors=True)  # it has another name where all went well
            if lock >= 0:
                os.close(lock)


def _size(fs: Any, path: str, url: str) -> int:
    try:
        found = fs.size(path)
    except OSError as e:
        raise CacheError(f"{url} cannot be fetched: {e!r}") from e
    if found is None:
        raise CacheError(f"{url}: its store does not say how large it is, so no room can be kept: pass its size")
    return int(found)


def _fetched(fs: Any, path: str, url: str, expected: int) -> bytes:
    for attempt in range(_ATTEMPTS):
        try:
            content: bytes = fs.cat_file(path)
            break
        except Exception as e:  # each store's client has errors of its own
            if isinstance(e, FileNotFoundError | PermissionError) or attempt == _ATTEMPTS - 1:
                raise CacheError(f"{url} cannot be fetched: {e!r}") from e
            time.sleep(2**attempt)
    if len(content) != expected:
        raise CacheError(f"{url} has {len(content)} bytes, and {expected} are expected: it is another file")
    return content


def _write(part: Path, name: str, url: str, content: bytes, size: int) -> None:
    if len(content) != size:
        raise CacheError(f"{url} holds {len(content)} bytes when it is unpacked, and the index says {size}")
    with (part / name).open("wb") as file:
        for at in range(0, len(content), _PIECE):
            file.write(content[at : at + _PIECE])
        file.flush()
        os.fsync(file.fileno())
    said = {"url": url, "file": name, "bytes": size, "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
    with (part / ".whole").open("w") as file:
        json.dump(said, file)
        file.flush()
        os.fsync(file.fileno())
    _flush(part)


def _flush(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checked(entry: Path) -> Path | None:
    """The file of an entry, if it has the bytes that it was written with."""
    try:
        said = json.loads((entry / ".whole").read_text())
        path = entry / said["file"]
        if path.stat().st_size != said["bytes"]:
            return None
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        return path if digest.hexdigest() == said["xxh3_128"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
