"""Waits until a job is as somebody wants it, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable

from everstep.jobs.source import JobError
from everstep.jobs.view import DELETED, View, ended

POLL_SECONDS = 1.0


class EndedBefore(JobError):
    """The job has ended, and never was as it was waited for."""


class NotInTime(JobError):
    """The job was not as it was waited for when the time was over."""


def wait_until(
    look: Callable[[], View],
    done: Callable[[View], bool],
    what: str,
    seconds: float,
    *,
    waiting: Callable[[View], None] = lambda _: None,
) -> View:
    """The first view that is about the spec as it is now and is `done`. `what` is waited for `seconds`; `waiting` is
    called with each view before that one. Raises `EndedBefore` and `NotInTime`, and what `look` raises."""
    until = time.monotonic() + seconds
    while True:
        view = look()
        if view.observed and done(view):
            return view
        if ended(view.raw_status) or view.status == DELETED:
            raise EndedBefore(f"{view.job} has ended: {view.status}: {view.message}")
        left = until - time.monotonic()
        if left <= 0:
            raise NotInTime(f"{what}: not within {seconds:g} s: {view.status}: {view.message}")
        waiting(view)
        time.sleep(min(POLL_SECONDS, left))
