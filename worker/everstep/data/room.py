"""Room in a cache: what is counted against its limit, and what goes when more is needed.

An entry is a directory of 32 hexadecimal digits; what is being fetched is a directory whose name begins with its size,
and which its process holds exclusively. Invariant: whoever counts, removes and reserves does so alone on this node
(`room.lock`), so that two reservations never take the same room.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Final

from everstep.data.errors import CacheError, CacheFull, DataError

_POLL: Final = 0.02
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
        found = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    else:
        found = limit if isinstance(limit, int) and not isinstance(limit, bool) else 0
    if found < 1:
        raise DataError(f"limit={limit!r}: bytes are expected, as a number or like '20 GiB'")
    return found


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
                time.sleep(_POLL)

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
        time.sleep(_POLL)


def _evict(root: Path, most: int) -> int:
    """Remove what nobody holds, least recently used first, until `most` bytes are left; how many are."""
    total, entries = 0, []
    for one in os.scandir(root):
        path = Path(one.path)
        if match := _PART.fullmatch(one.name):
            if (lock := opened(path, fcntl.LOCK_EX)) is not None:  # its process is gone
                remove(path, lock)
            else:
                total += int(match[1])
        elif _ENTRY.fullmatch(one.name):
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
