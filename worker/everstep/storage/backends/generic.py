"""Any fsspec scheme without a backend of its own: sftp, ftp, smb, hdfs, and what a user has registered.

Most of these are file systems, on which a file is visible while it is still being written. Invariant: where the file
system can rename, a file appears under its final name only whole. The bytes go to a temporary file in the same folder,
which is then renamed. Where it cannot, the file is written in place, and `Capabilities.whole` tells the readers.

Some file systems (sftp) replace the target of a rename, others (smb, hdfs) refuse, and some (WebHDFS) refuse without an
error. Where it is refused, `put` deletes the old file first: for a moment there is none, and a process that dies then
leaves none.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.spec import AbstractFileSystem

from everstep.storage.backends.fsspec_store import FsspecStore
from everstep.storage.base import Capabilities, ObjectInfo

# Names of this form are never listed; a process that dies before the rename leaves one behind.
_TEMPORARY: Final = ".tmp-"
# Another program's may begin alike.
_OURS: Final = re.compile(rf"{re.escape(_TEMPORARY)}([0-9]+)-[0-9a-f]{{16}}-(.+)")


class GenericStore(FsspecStore):
    """Objects below the URL of any other scheme. `options` go to its file system."""

    # Without I/O it is not known whether the file system can rename: some connect when they are made.
    offers = Capabilities(multipart=False, whole=False)

    def list(self, folder: str = "") -> list[ObjectInfo]:
        return [info for info in super().list(folder) if not _is_temporary(info.name)]

    def files(self, fs: Any, top: str) -> Mapping[str, Mapping[str, Any]]:
        """fsspec's own `find` leaves a folder out when the server does not answer."""
        if type(fs).find is not AbstractFileSystem.find:
            return super().files(fs, top)
        files: dict[str, Mapping[str, Any]] = {}
        stack = [top]
        while stack:
            folder = stack.pop()
            try:
                entries = fs.ls(folder, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                continue
            for info in entries:
                if info["type"] != "directory":
                    files[info["name"]] = info
                elif info["name"].rstrip("/") != folder:
                    stack.append(info["name"].rstrip("/"))
        return files

    def sweep_uploads(self, older_than: float, dead: Callable[[str], bool] = lambda name: False) -> int:
        swept = 0
        for info in super().list():
            folder, slash, last = info.name.rpartition("/")
            if (ours := _OURS.fullmatch(last)) is None:
                continue
            is_dead = dead(f"{folder}{slash}{ours[2]}")
            if is_dead or time.time() - int(ours[1]) > older_than:
                self.delete(info.name)
                swept += 1
        return swept

    def _make_folder(self, name: str) -> bool:
        """fsspec's way fails where the ranks of a save make its folder at the same time: each looks, then makes it. It
        also takes a lost connection for a missing folder."""
        with self.translated("making the folder of", name):
            fs, root = self.fs()
            if not _is_there(fs, root[: root.find("/", 1)] if "/" in root[1:] else root):
                return False
            folder = f"{root}/{name}".rpartition("/")[0]
            for left in range(folder.count("/"), -1, -1):  # another rank may be faster at each level
                try:
                    fs.makedirs(folder, exist_ok=True)
                    break
                except Exception:
                    if not left and not _is_there(fs, folder):
                        raise
            return True

    def _pipe(self, name: str, data: bytes | bytearray, mode: str) -> None:
        with self.translated("writing", name):
            fs, root = self.fs()
            final = f"{root}/{name}"
            if not _renames(fs):
                _check_free(fs, final, mode)
                fs.pipe_file(final, data, mode=mode)
                return
            folder, _, last = final.rpartition("/")
            temporary = f"{folder}/{_TEMPORARY}{int(time.time())}-{secrets.token_hex(8)}-{last}"
            try:
                fs.pipe_file(temporary, data)
                _check_free(fs, final, mode)
                self._rename(fs, temporary, final, mode)
            except BaseException:
                with contextlib.suppress(Exception):
                    fs.rm_file(temporary)
                raise

    def move(self, fs: Any, temporary: str, final: str, mode: str) -> None:
        """Rename the file. For `mode` "create" it should fail if the name is taken, where the server can tell."""
        fs.mv(temporary, final)

    def _rename(self, fs: Any, temporary: str, final: str, mode: str) -> None:
        error: Exception | None = None
        try:
            self.move(fs, temporary, final, mode)
        except Exception as e:
            error = e
        if error is None and not _is_there(fs, temporary):
            return
        if not _is_there(fs, temporary) or not _is_there(fs, final):
            raise error or OSError(errno.EIO, "the file system did not rename the file, and gave no reason", temporary)
        _check_free(fs, final, mode)
        fs.rm_file(final)
        self.move(fs, temporary, final, mode)


def _renames(fs: Any) -> bool:
    """Whether the file system has a rename of its own: fsspec's is a copy, which is as visible as any other write."""
    while isinstance(fs, DirFileSystem):
        fs = fs.fs
    return type(fs).mv is not AbstractFileSystem.mv


def _check_free(fs: Any, final: str, mode: str) -> None:
    if mode == "create" and _is_there(fs, final):
        raise FileExistsError(errno.EEXIST, "exists", final)


def _is_there(fs: Any, path: str) -> bool:
    """Whether there is such a file or folder. fsspec's `exists` says no, too, when the server does not answer."""
    try:
        fs.info(path)
    except FileNotFoundError:
        return False
    return True


def _is_temporary(name: str) -> bool:
    return name.rpartition("/")[2].startswith(_TEMPORARY)
