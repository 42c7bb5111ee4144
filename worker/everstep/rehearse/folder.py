"""The folder in which a rehearsal has its runs. It goes with the rehearsal; where that was killed, with the next one.

A rehearsal holds a lock on a file in its folder, and the kernel releases it at the end of the process, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path

PREFIX = "everstep-rehearsal-"
OWNER = "owner"  # the locked file; a folder that is kept has none


class Folder:
    """A new one, at `path`. `kept`: whether it is to stay. Raises `OSError`."""

    def __init__(self) -> None:
        self.kept = False
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        begun = self.path / f"{OWNER}-begun"
        self._owner = begun.open("w")
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        begun.rename(self.path / OWNER)  # locked from the moment at which others can find it

    def leave(self) -> None:
        """Remove it, unless it is kept."""
        if self.kept:
            (self.path / OWNER).unlink(missing_ok=True)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        self._owner.close()


def remove_abandoned() -> None:
    """Remove the folders of rehearsals that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (path / OWNER).open("r+") as owner:  # another user's, or one that is kept
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
