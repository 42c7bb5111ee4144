"""Objects as files below a folder, on any POSIX file system with hard links.

Invariant: a file appears under its final name only whole and synced. The bytes go to a temporary file in the same
folder, which is synced; `link` then gives it its name, and fails if the name is taken, which is what makes `create` a
true conditional create between processes and, over NFS, between machines. The folder is synced last, so that the name
itself survives a power cut.

Linux says once that bytes could not be written, and drops them; the next fsync succeeds. So none is repeated: after one
that failed, the file is written anew. A name whose folder was not synced is synced before anything rests on it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from everstep.contract.forks import ForkLock
from everstep.storage.base import (
    Capabilities,
    ObjectInfo,
    ObjectStore,
    check_folder,
    check_name,
    part_size_for,
    truncated,
    views_of,
)
from everstep.storage.errors import (
    AlreadyExists,
    NotFound,
    RetryableError,
    StorageError,
    StoreUnusable,
    TerminalError,
    Unsynced,
)
from everstep.storage.upload import Data

# --- descriptors
# Whole reads and writes at places of an open file: the kernel may take or give less than it is asked for at once. All
# raise `OSError`.

_VECTORS: Final = 1024  # the kernel's bound on the buffers of one read


def write(descriptor: int, offset: int, data: Data) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def read(descriptor: int, offset: int, views: list[memoryview]) -> int:
    """Fill the views, one after the other, from the file; how many bytes there were."""
    left, done = [view for view in views if view], 0
    while left:
        count = os.preadv(descriptor, left[:_VECTORS], offset + done)
        if not count:
            break
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return done


# --- uncached
# Writes whole pages of a file around the page cache (O_DIRECT), where the file system and the memory allow it. A
# checkpoint is written once and seldom read, and copying it into the page cache costs a training machine more CPU time
# than everything else in a save: measured on ext4, 20 times as much. What cannot go around is left to the caller, who
# writes it as usual; the two may be mixed in one file. Invariant: nothing is counted as written that the kernel did not
# take. Durability is still `fsync`'s.

# Offsets, sizes and addresses have to be multiples of the device's block; no disk has larger ones.
BLOCK: Final = 4096
# Below this the page cache costs less than waiting for the disk.
LEAST: Final = 2**20


class UncachedWriter:
    """A second descriptor of the file at `path`. Several threads may write."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None
        try:
            self._descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._descriptor = None  # the file system has no such thing
        self._usable = self._descriptor is not None and hasattr(os, "O_DIRECT")

    def write(self, offset: int, view: memoryview) -> int:
        """Write the beginning of `view` at `offset`; how many bytes of it, which may be none. Raises `OSError`."""
        done, end = 0, len(view) // BLOCK * BLOCK
        if offset % BLOCK or end < LEAST:
            return 0
        while done < end and self._usable:
            assert self._descriptor is not None
            try:
                count = os.pwrite(self._descriptor, view[done:end], offset + done)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self._usable = False  # this memory is not aligned, or the file system changed its mind
                break
            done += count // BLOCK * BLOCK  # what is left of a broken-off block is written again
            if count % BLOCK:
                break
        return done

    def close(self) -> None:
        """The other methods must not be called afterwards."""
        self._usable = False
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


# --- local

# Names of this form are never listed; a crash between write and link leaves one behind.
_TEMPORARY = ".tmp-"
_OURS = re.compile(rf"{re.escape(_TEMPORARY)}[0-9a-f]{{16}}-(.+)")  # another program's may begin alike
# Small enough that a processor's own cache holds what was read until the reader has checked it, large enough that
# opening the file (10 us) does not count.
_READ_SIZE = 2**20

_RETRYABLE = {errno.EINTR, errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT}
# The errors of `link` on a file system without hard links; vfat and some FUSE mounts give EPERM.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


class LocalStore(ObjectStore):
    """Files below `root`, which is created when first written to, and never again: where it was and is not, its mount
    has fallen away or somebody has deleted it, and what is written to a new one is lost when it comes back."""

    def __init__(self, root: str | Path, part_size: int | None = None, *, single_committer: bool = False) -> None:
        self._root = Path(root).absolute()
        self._part_size = part_size
        self._single_committer = single_committer
        self._was_there = False
        self._unsynced: set[Path] = set()  # folders that were made here, and whose name may not survive a power cut

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(read_size=_READ_SIZE, local=True).with_part_size(self._part_size)

    def create(self, name: str, data: Data) -> None:
        with self._translated(name), self._written(name, data) as (temporary, final):
            try:
                self._link(temporary, final)
            except FileExistsError:
                self._sync_taken(final)
                raise

    def put(self, name: str, data: Data) -> None:
        with self._translated(name), self._written(name, data) as (temporary, final):
            os.replace(temporary, final)

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        path = self._path(name)
        with self._translated(name), path.open("rb", buffering=0) as file:
            self._was_there = True
            first, last, _ = slice(start, end).indices(os.fstat(file.fileno()).st_size)
            data = bytearray(max(0, last - first))
            done = read(file.fileno(), first, [memoryview(data)])
            return bytes(memoryview(data)[:done])

    def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
        path = self._path(name)
        views, wanted = views_of(buffers)
        with self._translated(name), path.open("rb", buffering=0) as file:
            done = read(file.fileno(), start, views)
        if done < wanted:
            raise truncated(self.url, name, start, wanted, done)

    def size(self, name: str) -> int | None:
        path = self._path(name)
        with self._translated(name):
            try:
                status = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def list(self, folder: str = "") -> list[ObjectInfo]:
        top = self._root / check_folder(folder)
        with self._translated(folder):
            self._check_no_file()
            return sorted(ObjectInfo(path.relative_to(self._root).as_posix(), size) for path, size in _files(top))

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._translated(name):
            try:
                self._unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return

    def start_upload(self, name: str, size_hint: int | None = None) -> LocalUpload:
        return LocalUpload(self, check_name(name), part_size_for(self.capabilities.part_size, size_hint))

    def sweep_uploads(self, older_than: float, dead: Callable[[str], bool] = lambda name: False) -> int:
        swept = 0
        with self._translated(""):
            for path in _walk(self._root):
                if (ours := _OURS.fullmatch(path.name)) is None:
                    continue
                is_dead = dead(path.relative_to(self._root).with_name(ours[1]).as_posix())
                try:
                    if is_dead or time.time() - path.lstat().st_mtime > older_than:
                        self._unlink(path)
                        swept += 1
                except FileNotFoundError:
                    continue
        return swept

    def _unlink(self, path: Path) -> None:
        """Remove a file, and its folder with the last one: object stores have no folders either."""
        path.unlink()
        try:
            if path.parent != self._root:
                path.parent.rmdir()
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def _check_no_file(self) -> None:
        """Raises `StoreUnusable` where the root is a file or lies below one: it would look like an empty folder."""
        try:
            is_file = stat.S_ISREG(self._root.stat().st_mode)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            is_file = True
        if is_file:
            raise StoreUnusable(f"{self.url}: is a file or lies below one: give the folder that holds the checkpoint")

    def _make_folder(self, folder: Path) -> None:
        """The folder and those above it; a new one's name is synced too, or a power cut takes what is in it."""
        if folder.is_dir():
            if folder not in self._unsynced:
                return
        else:
            if folder == self._root and self._was_there:
                raise TerminalError(
                    f"{self.url}: this folder was there, and is gone: it was deleted or renamed, or its mount has "
                    "fallen away. Nothing is written to a new one. Bring it back, or end this process and start again"
                )
            if folder.parent != folder:
                self._make_folder(folder.parent)
            self._unsynced.add(folder)
            try:
                folder.mkdir(exist_ok=True)
            except FileExistsError as e:
                if os.path.lexists(folder) and not folder.is_dir():
                    raise StoreUnusable(
                        f"{self.url}: {folder} is a file, or a link to no folder: move it away, or use another URL"
                    ) from e
                return self._make_folder(folder)  # another process removed it again, empty as it was
        _sync(folder.parent)
        self._unsynced.discard(folder)

    def _sync_taken(self, final: Path) -> None:
        """What has the name may come of an attempt before this one, which could not sync it. Whoever finds it there
        rests on it."""
        try:
            _sync(final)
            _sync(final.parent)
        except FileNotFoundError:
            return  # it was deleted meanwhile

    @contextmanager
    def _written(self, name: str, data: Data) -> Iterator[tuple[Path, Path]]:
        """A synced temporary file beside the final name; the body gives it that name."""
        descriptor, temporary, final = self._temporary(name)
        try:
            try:
                write(descriptor, 0, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            yield temporary, final
            _sync(final.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def _temporary(self, name: str) -> tuple[int, Path, Path]:
        """A new file open for writing, its path, and the final path beside it."""
        final = self._path(name)
        # By chance: processes of two containers that share this folder may have one number.
        temporary = final.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}-{final.name}")
        while True:
            self._make_folder(final.parent)
            self._was_there = True
            try:
                return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), temporary, final
            except FileNotFoundError:
                continue  # another process removed the empty folder between the two calls

    def _link(self, temporary: Path, final: Path) -> None:
        """Give the file its name, unless the name is taken: one step, which no other process can come between."""
        try:
            os.link(temporary, final)
        except OSError as e:
            if e.errno not in _NO_LINKS or not os.access(final.parent, os.W_OK):
                raise
            if not self._single_committer:
                raise StoreUnusable(
                    f"{self.url}: this file system has no hard links ({e.strerror}), as many FUSE and network mounts, "
                    "so two writers could both commit. Use another file system or an object store's URL, or pass "
                    "single_committer=True (EVERSTEP_SINGLE_COMMITTER=1) if only one job ever writes there"
                ) from e
            if final.exists():
                raise FileExistsError(errno.EEXIST, "exists", str(final)) from e
            temporary.replace(final)

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileExistsError as e:
            raise AlreadyExists(f"{self.url}: {name} exists") from e
        except (FileNotFoundError, IsADirectoryError) as e:
            raise NotFound(f"{self.url}: no object {name}") from e
        except OSError as e:
            raise self._error(e, name) from e

    def _error(self, e: OSError, name: str) -> StorageError:
        text = f"{self.url}: {name}: {e.strerror or e}"
        if e.errno in _FORBIDDEN:
            return StoreUnusable(f"{text}. The process may not write there: mount it read-write, or use another URL")
        return RetryableError(text) if e.errno in _RETRYABLE else TerminalError(text)


class LocalUpload:
    """Parts at their places in a temporary file."""

    def __init__(self, store: LocalStore, name: str, part_size: int) -> None:
        self._store = store
        self._name = name
        self.part_size = part_size
        # A file takes one writer at a time through the page cache, and those who wait in the kernel for their turn keep
        # a core busy.
        self._turn = ForkLock()
        with store._translated(name):
            self._descriptor, self._temporary, self._final = store._temporary(name)
            self._uncached = UncachedWriter(self._temporary)
        self._open, self._synced = True, False

    def write_part(self, number: int, data: Data) -> None:
        offset, view = number * self.part_size, memoryview(data).cast("B")
        with self._store._translated(self._name):
            done = self._uncached.write(offset, view)
            if done < len(view):
                with self._turn:
                    write(self._descriptor, offset + done, view[done:])

    def commit(self) -> None:
        if not self._open:
            return
        try:
            with self._store._translated(self._name):
                if not self._synced:
                    self._sync()
                os.replace(self._temporary, self._final)
                with self._durable():
                    _sync(self._final.parent)
        except RetryableError:
            raise  # the file is synced, and stays for the next attempt to name it
        except NotFound as e:
            self.abort()
            why = f"the unfinished file of {self._name} was removed by another process's clean-up"
            raise TerminalError(f"{self._store.url}: {why}") from e
        except StorageError:
            self.abort()
            raise
        self.abort()

    def abort(self) -> None:
        if self._open:
            self._open = False
            with self._store._translated(self._name):
                try:
                    self._close()
                finally:
                    self._temporary.unlink(missing_ok=True)

    def _sync(self) -> None:
        with self._durable():
            os.fsync(self._descriptor)
            self._close()  # a network file system may say only now that it could not write
        self._synced = True

    @contextmanager
    def _durable(self) -> Iterator[None]:
        """Raises `Unsynced` for what the kernel says only once."""
        try:
            yield
        except OSError as e:
            raise Unsynced(
                f"{self._store.url}: {self._name}: {e.strerror or e}: it could not be made durable, and what was "
                "written of it may be lost: write it anew"
            ) from e

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if descriptor >= 0:
                os.close(descriptor)
        finally:
            self._uncached.close()


def _files(top: Path) -> Iterator[tuple[Path, int]]:
    """Every finished file below `top`."""
    for path in _walk(top):
        if not path.name.startswith(_TEMPORARY):
            try:
                yield path, path.stat().st_size
            except FileNotFoundError:
                continue


def _walk(top: Path) -> Iterator[Path]:
    """Every file below `top`; what vanishes while we look was deleted, and is not given."""
    stack = [top]
    while stack:
        try:
            entries = list(os.scandir(stack.pop()))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                stack.append(Path(entry.path))
            else:
                yield Path(entry.path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
