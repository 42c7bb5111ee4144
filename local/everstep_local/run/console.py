"""Shows a local run as plain lines, where no terminal shows the table of `everstep.cli.jobs.tables`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from everstep.jobs.history import ActionTaken, Entry, EventSeen, History, StatusSeen


class Plain:
    """The history as lines, for pipes and logs: each call prints what is new."""

    def __init__(self, console: Console, history: History) -> None:
        self._console = console
        self._history = history
        self._done = 0
        self._status = ("", "")

    def update(self) -> None:
        for entry in self._history.since(self._done):
            self._done += 1
            for line in self._lines(entry):
                self._console.print(f"{entry.at:7.1f}s  {line}", highlight=False, markup=False, soft_wrap=True)

    def _lines(self, entry: Entry) -> Iterator[str]:
        match entry:
            case EventSeen():
                yield f"{entry.reason}: {entry.message}"
            case ActionTaken():
                yield f"> {entry.text}"
            case StatusSeen() if (status := (entry.reason, _why(entry.message))) != self._status:
                self._status = status
                yield f"status {entry.reason}: {entry.message}"
            case _:
                pass


def _why(message: str) -> str:
    """The reason why the job waits, without the count of ready workers before it."""
    return message.partition(": ")[2]
