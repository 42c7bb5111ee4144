"""In a training process of a rehearsal: names files outside of the script's folder that a step reads and an earlier one
has written. No run of a rehearsal has a copy of them, another machine does not have them, and after a restart they are
of a later step than the commit.

Python reports each file that is opened (an audit hook). Only what the script opens itself counts, or has a library open
for it: a compiler's cache is opened from far below.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

from everstep.rehearse.record import IN_FILES
from everstep.rehearse.watch import Watch
from everstep.train.guards.script_objects import is_script

FRAMES = 8  # between the script and what opens the file
_WRITES = os.O_WRONLY | os.O_RDWR
_SYSTEM = ("/dev/", "/proc/", "/sys/")


class FileState:
    """Of one process, beside its `watch`."""

    def __init__(self, watch: Watch, folder: Path) -> None:
        self._watch, self._folder = watch, folder
        self._written = dict[str, int]()  # by path, the first step that has opened it to write
        self._noted = set[str]()

    def install(self) -> None:
        """Look at each file that is opened, until the process ends."""
        sys.addaudithook(self._heeds)

    def _heeds(self, event: str, arguments: tuple[object, ...]) -> None:
        step = self._watch.step
        if event != "open" or step is None or not isinstance(arguments[0], str | os.PathLike):
            return
        flags = arguments[2]
        path = os.path.abspath(arguments[0])
        if path in self._noted or not isinstance(flags, int) or path.startswith((f"{self._folder}/", *_SYSTEM)):
            return
        if flags & os.O_ACCMODE != os.O_WRONLY and self._written.get(path, step) < step:
            self._noted.add(path)
            (self._folder / IN_FILES.replace("*", str(os.getpid()))).write_text("\n".join(self._noted))
        elif flags & _WRITES and _is_by_script(sys._getframe(1)):
            self._written.setdefault(path, step)


def _is_by_script(frame: FrameType | None) -> bool:
    for _ in range(FRAMES):
        if frame is None:
            return False
        if is_script(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False
