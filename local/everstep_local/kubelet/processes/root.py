"""The folder for all files of one run of local mode. Folders of dead runs are found and removed.

Its name begins with `everstep-`, in the system's folder for temporary files. A lock on a file in it shows that its run
is alive, because the system drops the lock with the process. Process numbers are not used, because systems reuse them.
Invariant: a folder whose lock can be taken belongs to a dead run, and the next run removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

PREFIX = "everstep-"
NEW = ".new-everstep-"
LOCK = ".everstep-local.lock"  # no other program has such a file


class Root:
    """A new folder, mode 0700, which `close` removes. Its path is short, because a socket's path must fit into 104
    bytes."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        remove_stale(parent)
        made = Path(tempfile.mkdtemp(prefix=NEW, dir=parent))
        self._lock = os.open(made / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # It gets its final name only when it is locked, so that another run that starts now does not take it for stale.
        self.path = made.rename(parent / (PREFIX + made.name.removeprefix(NEW)))

    def __enter__(self) -> Root:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1


def remove_stale(parent: Path) -> tuple[Path, ...]:
    """Remove the folders of dead runs, and return them."""
    removed = []
    for folder in sorted(parent.glob(PREFIX + "*")):
        # Folders of other users, and of other programs with such a name, must not be touched.
        if folder.is_symlink() or not (folder / LOCK).is_file() or folder.stat().st_uid != os.getuid():
            continue
        with contextlib.suppress(OSError):
            fd = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
            finally:
                os.close(fd)
    return tuple(removed)
