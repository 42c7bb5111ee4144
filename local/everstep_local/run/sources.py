"""Local runs as `everstep.cli.jobs` asks them: those that are alive over their sockets, and what others have left.

Invariant: a run that has ended is read from its folder alone, and refuses to be changed.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from everstep.cli.jobs.source import JobError, Source, Unreachable
from everstep.cli.jobs.view import EventRow, View, clock_time, moment
from everstep_local.run import control
from everstep_local.run.history import Entry, EventSeen, History, HistoryError

RUNS = Path(".everstep")
STATUS, HISTORY, LOGS = "status.json", "history.jsonl", "logs"


def alive() -> list[Source]:
    """The runs of this user that are alive, the oldest first."""
    try:
        return [LiveRun(address) for address in control.alive()]
    except control.ControlError as e:
        raise JobError(str(e)) from e


def ended(out: str | None) -> list[Source]:
    """The run that left this folder, or all that left one under `.everstep`, newest first. Raises `JobError`."""
    if out is not None and not (Path(out) / STATUS).is_file():
        raise JobError(f"{out} has no {STATUS}: it is no folder of a run that has ended")
    files = [Path(out) / STATUS] if out is not None else list(RUNS.glob(f"*/{STATUS}"))
    return [EndedRun(file.parent) for file in sorted(files, key=lambda file: -file.stat().st_mtime)]


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that answers on its socket."""

    address: control.RunAddress

    @property
    def title(self) -> str:
        return f"local run {self.address.name}"

    def jobs(self) -> list[View]:
        return [replace(self.view(self.address.name), workers=(), events=())]

    def view(self, job: str) -> View:
        del job  # a run has one
        return replace(View.from_json(self._ask("status")["view"]), job=self.address.name)

    def events(self, job: str) -> list[EventRow]:
        del job
        return [EventRow(**row) for row in self._ask("events")["events"]]

    def objects(self, job: str) -> dict[str, Any]:
        del job
        return {}  # a view has all

    def logs(self, job: str, pod: str, *, follow: bool, tail: int | None) -> Iterator[str]:
        del job
        try:
            for answer in control.ask(self.address, "logs", pod=pod, follow=follow, tail=tail):
                yield answer["line"]
        except control.ControlError as e:
            raise JobError(str(e)) from e

    def scale(self, job: str, replicas: int) -> None:
        self._ask("scale", replicas=replicas)

    def suspend(self, job: str, wanted: bool) -> None:
        self._ask("suspend", wanted=wanted)

    def delete(self, job: str) -> None:
        self._ask("delete-job")

    def kill(self, job: str, pod: str, *, delete: bool) -> str:
        return str(self._ask("delete" if delete else "kill", pod=pod)["done"])

    def disturb(self, job: str, verb: str, **arguments: str) -> str:
        del job
        return str(self._ask(verb, **arguments)["done"])

    def _ask(self, verb: str, **arguments: Any) -> Any:
        try:
            answers = list(control.ask(self.address, verb, **arguments))
        except control.ControlError as e:
            raise JobError(str(e)) from e
        if not answers:
            raise Unreachable(f"run {self.address.name} has just ended")
        return answers[0]


@dataclass(frozen=True, slots=True)
class EndedRun:
    """What a run left in its folder."""

    folder: Path

    @property
    def title(self) -> str:
        return f"ended, in {self.folder}"

    def jobs(self) -> list[View]:
        return [replace(self.view(""), workers=(), events=())]

    def view(self, job: str) -> View:
        del job
        try:
            return View.from_json(json.loads((self.folder / STATUS).read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise JobError(f"{self.folder / STATUS} cannot be read: {e}") from e

    def events(self, job: str) -> list[EventRow]:
        try:
            return event_rows(History.load(self.folder / HISTORY), self.view(job).began)
        except (OSError, HistoryError) as e:
            raise JobError(f"the events of this run cannot be read: {e}") from e

    def objects(self, job: str) -> dict[str, Any]:
        del job
        return {}  # a view has all

    def logs(self, job: str, pod: str, *, follow: bool, tail: int | None) -> Iterator[str]:
        del job, follow  # nothing more is written
        yield from kept_log(self.folder, pod, tail)

    def scale(self, job: str, replicas: int) -> None:
        self._refuse()

    def suspend(self, job: str, wanted: bool) -> None:
        self._refuse()

    def delete(self, job: str) -> None:
        self._refuse()

    def kill(self, job: str, pod: str, *, delete: bool) -> str:
        self._refuse()

    def disturb(self, job: str, verb: str, **arguments: str) -> str:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise JobError(f"this run has ended; what it left is in {self.folder}")


def event_rows(entries: Iterable[Entry], began: str) -> list[EventRow]:
    """The events among the entries of a history that began then."""
    start = moment(began)

    def at(entry: EventSeen) -> str:
        return clock_time(start + timedelta(seconds=entry.at)) if start is not None else f"{entry.at:.1f}s"

    return [EventRow(at(e), e.type, e.reason, e.message) for e in entries if isinstance(e, EventSeen)]


def kept_log(folder: Path, pod: str, tail: int | None) -> Iterator[str]:
    """The lines of a pod's log that a run keeps in its folder, without their times. Raises `JobError`."""
    path = folder / LOGS / f"{pod}.log"
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file if tail is None else deque(file, tail):
                yield line.rstrip("\n").partition(" ")[2]
    except OSError as e:
        kept = sorted(each.stem for each in (folder / LOGS).glob("*.log"))
        raise JobError(f"no log of {pod!r}; there are {', '.join(kept) or 'none'}") from e
