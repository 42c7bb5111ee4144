"""Files below the machine's temporary folder, which others may write to as well.

A name that can be guessed may be there already: a link to a file that only this user may write, or a folder that
somebody else fills. So a folder is used only if it is a folder, this user's, and closed to others; and a file is made
new, and takes its place by renaming, which replaces a link and does not follow it. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def folder(purpose: str, parent: Path | None = None) -> Path:
    """`<temporary folder>/everstep-<purpose>-<uid>`, made if it is missing, mode 0700.

    Raises PermissionError if something else has that name: the text says what to do.
    """
    path = (parent or Path(tempfile.gettempdir())) / f"everstep-{purpose}-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    require_private(path)
    return path


def require_private(path: Path) -> None:
    """Raises PermissionError unless it is a folder, of this user, that nobody else can open."""
    info = path.stat(follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(f"{path} is not a folder that only this user can open: remove it, or set TMPDIR")


def write(path: Path, data: bytes) -> None:
    """Put a file with this content in the place of whatever has that name, mode 0600. Follows no link.

    Its folder is not judged: see `folder`. Raises OSError.
    """
    directory = os.open(path.parent, FOLDER_FLAGS)
    try:
        temporary = f".{path.name[:100]}.{secrets.token_hex(8)}"
        with open(os.open(temporary, NEW_FILE_FLAGS, 0o600, dir_fd=directory), "wb") as file:
            file.write(data)
        try:
            os.replace(temporary, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            os.unlink(temporary, dir_fd=directory)
            raise
    finally:
        os.close(directory)
