"""Ends what a training process has started and left behind: its process group.

A helper (`subprocess`, `multiprocessing`) that outlives its training process holds ports, files and a device's memory
that the next process needs, and nobody waits for it. The rules:

- The process failed, was killed, or was asked to end: its group gets SIGTERM at once, and SIGKILL `TERM_SECONDS` later.
- It ended with 0: what it left may finish its work for as long as the job goes on, and is ended with the job, or when
  another process takes the place.
- A process in a group or session of its own was set free on purpose, and is left alone.

Invariants: a signal goes only to a group that one of our processes has led. Every wait has a bound.
It runs in the fork server, and uses the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

TERM_SECONDS = 2.0  # from SIGTERM to SIGKILL; Python's own resource tracker ignores the one, and cleans up meanwhile
KILL_SECONDS = 3.0  # from SIGKILL until a group is given up: a system call can be uninterruptible
LOOK_SECONDS = 0.01
MOST_NAMED = 5  # processes in a line of the log
SET_FREE = "start it in a session of its own (subprocess: start_new_session=True) if it is to outlive the job"


@dataclass(slots=True)
class _Group:
    """The group of a process that has ended. `since`: when it was sent `sent`."""

    sent: int
    since: float = field(default_factory=time.monotonic)


class Leftovers:
    """The process groups of the fork server's children, from their start until they are empty."""

    def __init__(self) -> None:
        self._slots: dict[int, int | None] = {}  # of the children that run; None: it is no training process
        self._kept: dict[int, int | None] = {}  # the same of those that ended with 0 and left something
        self._ending: dict[int, _Group] = {}

    @property
    def are_ending(self) -> bool:
        return bool(self._ending)

    def started(self, pid: int, slot: int | None) -> None:
        """The child leads a group from now on."""
        self._slots[pid] = slot

    def ended(self, pid: int, code: int) -> bool:
        """Whether it was such a child. Call it just after the child was reaped.

        A group keeps its number while it has a process. The kernel gives the number of an empty one away only after
        all others, so it cannot be a stranger's yet."""
        if pid not in self._slots:
            return False
        slot = self._slots.pop(pid)
        if code == 0 and _exists(pid):
            self._kept[pid] = slot
        elif code != 0:
            self._end(pid)
        return True

    def must_end_before(self, slot: int | None) -> bool:
        """Whether a process for that place has to wait. What an earlier one left in it is ended."""
        for pid in [pid for pid, kept in self._kept.items() if kept == slot]:
            del self._kept[pid]
            self._end(pid)
        return self.are_ending

    def look(self) -> None:
        """Forget the groups that are empty, and kill those whose time is over."""
        for pid, group in list(self._ending.items()):
            waited = time.monotonic() - group.since
            if not _exists(pid):
                del self._ending[pid]
            elif group.sent == signal.SIGTERM and waited > TERM_SECONDS:
                _say(pid, f"did not end within {TERM_SECONDS:g} s of SIGTERM and is killed")
                self._ending[pid] = _Group(signal.SIGKILL)
                _send(pid, signal.SIGKILL)
            elif group.sent == signal.SIGKILL and waited > KILL_SECONDS:
                _say(pid, "could not be killed and is left behind")
                del self._ending[pid]

    def end_all(self, reap: Callable[[], None]) -> None:
        """Kill the children that run, and end all that any child has left. `reap`: collect the children that ended."""
        for pid in self._slots:
            self._ending[pid] = _Group(signal.SIGKILL)
            _send(pid, signal.SIGKILL)
        self._slots.clear()
        for pid in self._kept:
            if _exists(pid):
                _say(pid, f"is ended with the job; {SET_FREE}")
                self._end(pid)
        self._kept.clear()
        while self._ending:
            reap()
            self.look()
            time.sleep(LOOK_SECONDS if self._ending else 0)

    def _end(self, pid: int) -> None:
        if _send(pid, signal.SIGTERM):
            self._ending[pid] = _Group(signal.SIGTERM)


def _send(group: int, number: int) -> bool:
    """Whether the group has a process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user, which may have changed into one
        return True
    return True


def _exists(group: int) -> bool:
    return _send(group, 0)


def _say(group: int, what: str) -> None:
    """A line in the log about the group's processes."""
    named = ", ".join(_members(group)) or f"of group {group}"
    sys.stderr.write(f"everstep-run: a process that training process {group} started ({named}) {what}\n")
    sys.stderr.flush()


def _members(group: int) -> list[str]:
    """The first of the group's processes, as pid and name."""
    members: list[str] = []
    for entry in sorted(os.listdir("/proc")) if os.path.isdir("/proc") else ():
        if entry.isdecimal() and len(members) < MOST_NAMED:
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", errors="replace") as file:
                # The name may contain blanks and brackets. The fields begin after the last bracket.
                before, _, fields = file.read().rpartition(")")
                if int(fields.split()[2]) == group:
                    members.append(f"pid {entry}: {before.partition('(')[2]}")
    return members
