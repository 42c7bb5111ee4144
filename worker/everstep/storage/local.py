"""Objects as files below a folder, on any POSIX file system with hard links.

Invariant: a file appears under its final name only whole and synced. The bytes go to a temporary file in the same
folder, which is synced; `link` then gives it its name, and fails if the name is taken, which is what makes `create` a
true conditional create between processes and, over NFS, between machines. The folder is synced last, so that the name
itself survives a power cut.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.storage.base import Data, ObjectInfo, check_folder, check_name
from everstep.storage.errors import AlreadyExists, NotFound, RetryableError, StorageError, StoreUnusable, TerminalError

# Names of this form are never listed; a crash between write and link leaves one behind.
_TEMPORARY = ".tmp-"
_counter = itertools.count()

_RETRYABLE = {errno.EINTR, errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class LocalStore:
    """Files below `root`, which is created when first written to."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).absolute()

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def create(self, name: str, data: Data) -> None:
        with self._translated(name), self._written(name, data) as (temporary, final):
            os.link(temporary, final)

    def put(self, name: str, data: Data) -> None:
        with self._translated(name), self._written(name, data) as (temporary, final):
            os.replace(temporary, final)

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        path = self._path(name)
        with self._translated(name), path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            first, last, _ = slice(start, end).indices(size)
            file.seek(first)
            data = bytearray(max(0, last - first))
            view, done = memoryview(data), 0
            while done < len(data):
                count = file.readinto(view[done:])
                if not count:
                    break
                done += count
            return bytes(view[:done])

    def size(self, name: str) -> int | None:
        path = self._path(name)
        with self._translated(name):
            try:
                return path.stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def list(self, folder: str = "") -> list[ObjectInfo]:
        top = self._root / check_folder(folder)
        with self._translated(folder):
            return sorted(ObjectInfo(path.relative_to(self._root).as_posix(), size) for path, size in _files(top))

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._translated(name):
            try:
                path.unlink()
                path.parent.rmdir()  # only when empty: object stores have no folders either
            except OSError as e:
                if e.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def _make_folder(self, folder: Path) -> None:
        """The folder and those above it; a new one's name is synced too, or a power cut takes what is in it."""
        if folder.is_dir():
            return
        if folder.parent != folder:
            self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)

    @contextmanager
    def _written(self, name: str, data: Data) -> Iterator[tuple[Path, Path]]:
        """A synced temporary file beside the final name; the body gives it that name."""
        final = self._path(name)
        temporary = final.with_name(f"{_TEMPORARY}{os.getpid()}-{next(_counter)}-{final.name}")
        while True:
            self._make_folder(final.parent)
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                break
            except FileNotFoundError:
                continue  # another process removed the empty folder between the two calls
        try:
            try:
                view = memoryview(data).cast("B")
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            yield temporary, final
            _sync_folder(final.parent)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileExistsError as e:
            raise AlreadyExists(f"{self.url}: {name} exists") from e
        except FileNotFoundError as e:
            raise NotFound(f"{self.url}: no object {name}") from e
        except OSError as e:
            raise self._error(e, name) from e

    def _error(self, e: OSError, name: str) -> StorageError:
        text = f"{self.url}: {name}: {e.strerror or e}"
        if e.errno in _FORBIDDEN:
            return StoreUnusable(f"{text}. The process may not write there: mount it read-write, or use another URL")
        return RetryableError(text) if e.errno in _RETRYABLE else TerminalError(text)


def _files(top: Path) -> Iterator[tuple[Path, int]]:
    """Every finished file below `top`; what vanishes while we look was deleted, and is not listed."""
    stack = [top]
    while stack:
        try:
            entries = list(os.scandir(stack.pop()))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                stack.append(Path(entry.path))
            elif not entry.name.startswith(_TEMPORARY):
                try:
                    yield Path(entry.path), entry.stat().st_size
                except FileNotFoundError:
                    continue


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
