"""Follows the logs of all workers of a job at once: a thread reads each pod's, and pods that come later are found.

Bounds: a queue of lines, beyond which a pod's log waits for whoever prints. A log that breaks off is named, and not
begun again: its lines would come twice.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from everstep.jobs.source import JobError, NoSuchJob, RunEnded, Source, Unreachable
from everstep.jobs.view import View, ended

LOOK_SECONDS = 3.0  # from one look for new pods to the next
LAST_SECONDS = 10.0  # for the logs' ends, when the job has ended
POLL_SECONDS = 0.2
MAX_LINES = 1000


@dataclass(frozen=True, slots=True)
class Line:
    """Of a pod's log; `problem`: why there is no more of it."""

    pod: str
    text: str
    problem: bool = False


def follow(source: Source, job: str, view: View, tail: int | None) -> Iterator[Line]:
    """The lines of all pods as they come, until the job has ended or is gone. `tail`: of the pods of `view`, only so
    many of the lines that are there. Raises as `source` does."""
    logs = _Logs(source, job)
    for row in view.workers:
        logs.read(row.pod, tail)
    until: float | None = None  # when the logs' ends are no longer waited for
    looked = time.monotonic()
    while until is None or (time.monotonic() < until and logs.are_read()):
        yield from logs.next()
        if until is None and time.monotonic() - looked >= LOOK_SECONDS:
            looked = time.monotonic()
            until = looked + LAST_SECONDS if logs.look() else None
    while not logs.lines.empty():
        yield from logs.next()


class _Logs:
    def __init__(self, source: Source, job: str) -> None:
        self._source, self._job = source, job
        self.lines: queue.Queue[Line] = queue.Queue(MAX_LINES)
        self._readers: dict[str, threading.Thread] = {}
        self._begun: set[str] = set()  # pods with a line

    def read(self, pod: str, tail: int | None) -> None:
        def read() -> None:
            try:
                for text in self._source.logs(self._job, pod, follow=True, tail=tail):
                    self.lines.put(Line(pod, text))
            except (JobError, Unreachable) as e:
                self.lines.put(Line(pod, str(e), problem=True))

        self._readers[pod] = threading.Thread(target=read, name=f"log of {pod}", daemon=True)
        self._readers[pod].start()

    def are_read(self) -> bool:
        """Whether a log may have more lines."""
        return any(reader.is_alive() for reader in self._readers.values())

    def next(self) -> Iterator[Line]:
        """A line, if one comes soon. A log that breaks off before its first line is no problem: its container has not
        started, and it is asked for again."""
        try:
            line = self.lines.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        if not line.problem:
            self._begun.add(line.pod)
        if line.pod in self._begun:
            yield line

    def look(self) -> bool:
        """Read the logs of pods that have none yet. Whether the job has ended."""
        try:
            view = self._source.view(self._job)
        except (NoSuchJob, RunEnded):
            return True
        for pod in {row.pod for row in view.workers} - self._begun:
            if pod not in self._readers or not self._readers[pod].is_alive():
                self.read(pod, None)
        return ended(view.raw_status)
