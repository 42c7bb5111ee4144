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
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fsspec
import xxhash

from everstep.data.errors import DataError
from everstep_sources.errors import CacheError, CacheFull

# --- room
# Room in a cache: what is counted against its limit, and what goes when more is needed. An entry is a directory of 32
# hexadecimal digits; what is being fetched is a directory whose name begins with its size, and which its process holds
# exclusively. Invariant: whoever counts, removes and reserves does so alone on this node (`room.lock`), so that two
# reservations never take the same room.

_ROOM_POLL: Final = 0.02
_ENTRY: Final = re.compile(r"[0-9a-f]{32}")
_PART: Final = re.compile(r"part-(\d+)-\d+-[0-9a-f]+")
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|[kKMGT]i?B)?\s*")
_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{i}B": (1024 if i else 1000) ** power
    for power, letters in enumerate(("kK", "M", "G", "T"), 1)
    for letter in letters
    for i in ("", "i")
}


def bytes_of(limit: int | str) -> int:
    """Bytes of a limit as users write it: 20000000, "20 GB", "20 GiB". Raises DataError."""
    if isinstance(limit, str):
        match = _SIZE.fullmatch(limit)
        size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    else:
        size = limit if isinstance(limit, int) and not isinstance(limit, bool) else 0
    if size < 1:
        raise DataError(f"limit={limit!r}: bytes are expected, as a number or like '20 GiB'")
    return size


def part_of(root: Path, size: int) -> Path:
    """A new directory to fetch a file of so many bytes into."""
    return root / f"part-{size}-{os.getpid()}-{secrets.token_hex(4)}"


def opened(folder: Path, mode: int) -> int | None:
    """A lock on a directory, at once: its descriptor, or None if it does not exist or another process is in the way."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == folder.stat().st_ino:  # else it was removed, or replaced, in between
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


class Turn:
    """A lock that one process of the node has at a time. Raises CacheError, with `problem`, at the time `until`."""

    def __init__(self, path: Path, until: float, problem: str) -> None:
        self._path, self._until, self._problem = path, until, problem
        self._fd = -1

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        while True:
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > self._until:
                    os.close(self._fd)
                    raise CacheError(
                        f"{self._problem} (lock {self._path}) for longer than Cache(patience=…) allows: look for a"
                        " process that hangs"
                    ) from None
                time.sleep(_ROOM_POLL)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def make_room(root: Path, part: Path, limit: int, until: float, url: str) -> int:
    """Reserve the room that the name of `part` says: makes it, and returns the lock on it. Raises CacheFull."""
    size = int(part.name.split("-")[1])
    if size > limit:
        raise CacheFull(f"{url} has {size} bytes, and the cache's limit is {limit}: pass a larger limit= to Cache")
    while True:
        with Turn(root / "room.lock", until, f"{url}: another process of this node counts or removes files there"):
            taken = _evict(root, limit - size)
            if taken + size <= limit:
                part.mkdir()
                lock = opened(part, fcntl.LOCK_EX)
                if lock is not None:
                    return lock
                raise CacheFull(f"{part} cannot be locked: the folder of a Cache has to be on a disk of this node")
        if time.monotonic() > until:
            raise CacheFull(
                f"{url} needs {size} bytes, and {taken} of the cache's limit of {limit} are open in processes of this"
                f" node, or being fetched: pass a limit= of {taken + size} or more, or a smaller open_limit= to the"
                " sources that share it"
            )
        time.sleep(_ROOM_POLL)


def _evict(root: Path, most: int) -> int:
    """Remove what nobody holds, least recently used first, until `most` bytes are left; how many are."""
    total, entries = 0, []
    for entry in os.scandir(root):
        path = Path(entry.path)
        if match := _PART.fullmatch(entry.name):
            if (lock := opened(path, fcntl.LOCK_EX)) is not None:  # its process is gone
                remove(path, lock)
            else:
                total += int(match[1])
        elif _ENTRY.fullmatch(entry.name):
            size, used = _measure(path)
            total += size
            entries.append((used, size, path))
    for _, size, path in sorted(entries):
        if total <= most:
            break
        if (lock := opened(path, fcntl.LOCK_EX)) is not None:
            remove(path, lock)
            total -= size
    return total


def _measure(entry: Path) -> tuple[int, int]:
    """Bytes of an entry's files, and when it was last used (ns)."""
    try:
        return sum(f.stat().st_size for f in entry.iterdir() if f.name != ".whole"), entry.stat().st_mtime_ns
    except FileNotFoundError:
        return 0, 0


def remove(path: Path, lock: int) -> None:
    """Remove a directory whose lock, `lock`, is held exclusively. Its name is free at once."""
    try:
        gone = part_of(path.parent, 0)  # if this process ends here, the next that makes room removes it
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    finally:
        os.close(lock)


# --- cache

_PIECE: Final = 1 << 20
_POLL: Final = 0.05
_ATTEMPTS: Final = 3
_LOCKS: Final = 256  # files that order who fetches; two URLs may share one

Unpack = Callable[[bytes], bytes]


@dataclass(slots=True)
class CachedFile:
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
    ) -> CachedFile:
        """The file at `url`, fetched if it is not here; close what is returned.

        `version`: what else tells this content from what was at the URL before. `stored`: bytes that the store must
        give; `size`: of what is kept, which is another number with `unpack`, a function of the whole content. `name`:
        of the file in the cache. Raises CacheError.
        """
        key = hashlib.blake2b(f"{url}\0{version}".encode(), digest_size=16).hexdigest()
        root = self._made()
        until = time.monotonic() + self.patience
        if (file := self._whole(root / key, until)) is not None:
            return file
        lock = root / "locks" / f"{int(key, 16) % _LOCKS:02x}"
        with Turn(lock, until, f"{url}: another process of this node fetches it, or a file that shares its lock"):
            if (file := self._whole(root / key, until)) is not None:
                return file
            self._fetch(root, key, url, name or url.rsplit("/", 1)[-1], size, stored, unpack, until)
            if (file := self._whole(root / key, until)) is not None:
                return file
        raise CacheError(f"{url}: what was fetched into {root} was damaged at once: check the disk")

    def _made(self) -> Path:
        root = Path(self.folder)
        try:
            (root / "locks").mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CacheError(f"Cache({str(root)!r}): the folder cannot be made ({e}): pass another folder") from e
        return root

    def _whole(self, entry: Path, until: float) -> CachedFile | None:
        """The entry, held; None if there is none. A damaged one is removed."""
        while (lock := opened(entry, fcntl.LOCK_SH)) is not None:
            path = _checked(entry)
            if path is not None:
                with suppress(OSError):
                    os.utime(entry)
                return CachedFile(path, lock)
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
        size = fs.size(path)
    except OSError as e:
        raise CacheError(f"{url} cannot be fetched: {e!r}") from e
    if size is None:
        raise CacheError(f"{url}: its store does not say how large it is, so no room can be kept: pass its size")
    return int(size)


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
    summary = {"url": url, "file": name, "bytes": size, "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
    with (part / ".whole").open("w") as file:
        json.dump(summary, file)
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
        summary = json.loads((entry / ".whole").read_text())
        path = entry / summary["file"]
        if path.stat().st_size != summary["bytes"]:
            return None
        digest = xxhash.xxh3_128()
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        return path if digest.hexdigest() == summary["xxh3_128"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
