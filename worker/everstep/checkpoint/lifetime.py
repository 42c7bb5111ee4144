"""How long a Checkpointer can be used: in the process that has its thread, until it is closed."""

from __future__ import annotations

import os

from everstep.checkpoint.errors import SettingUnusable
from everstep.checkpoint.save import at_exit


class Lifetime:
    """Of `checkpointer`, which saves to `url`."""

    def __init__(self, checkpointer: at_exit.Closable, url: str) -> None:
        self._checkpointer, self._url = checkpointer, url
        self._process = 0  # in which the thread is; none yet
        self.closed = False  # no save is taken any more
        self.over = False  # and the last one has ended

    def starts(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process has the thread; a forked child has not."""
        return self._process == os.getpid()

    def check_process(self) -> None:
        if self._process and not self.is_here:
            raise SettingUnusable(
                f"{self._url}: this process was forked from the one that the Checkpointer belongs to, and has no "
                "thread that writes: make a Checkpointer in the child, with a URL of its own"
            )

    def check_open(self) -> None:
        self.check_process()
        if self.closed:
            raise SettingUnusable(f"the Checkpointer is closed{at_exit.late(self._checkpointer)}")

    def check_still_open(self, step: int) -> None:
        """A save of this step is being made."""
        if self.closed:
            raise SettingUnusable(
                f"step {step} was not saved: meanwhile the Checkpointer was closed, by a handler of signals or by "
                "another thread"
            )
