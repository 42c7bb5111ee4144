"""Shows a local run on the command line: as a table on a terminal, as plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from everstep.cli.printing import cell
from everstep_local.run.history import ActionTaken, Entry, EventSeen, History, StatusSeen
from everstep_local.run.view import View

STYLES = {"training": "green", "starting": "yellow", "Failed": "red", "Terminating": "yellow", "Succeeded": "cyan"}


def render(view: View) -> Group:
    """The job's line, a row a worker, then the newest events."""
    head = Text()
    head.append(f"{view.job}  ", "bold")
    head.append(f"{view.status}  ", "green" if view.status in ("Running", "Complete") else "yellow")
    head.append(
        f"step {_shown(view.step)}/{_shown(view.total_steps)}  committed {_shown(view.committed)}  "
        f"world {view.size}  round {view.round}  restarts {view.restarts}  goodput {view.goodput or '–'}"
    )
    if view.rehearsed:
        head.append(f"  rehearsed ({view.rehearsed})")
    table = Table(box=None, pad_edge=False, header_style="dim")
    device = any(row.device_memory is not None for row in view.workers)
    figures = ("RANK", "STEP", "RESTARTS", "PEAK RAM", *(("PEAK DEVICE",) if device else ()))
    for column in ("WORKER", "NODE", "STATE", *figures, "POD", "PID"):
        table.add_column(column, justify="right" if column in (*figures, "PID") else "left")
    for row in view.workers:
        state = cell(row.state, STYLES.get(row.state, ""))
        memory = (_bytes(row.memory), *((_bytes(row.device_memory),) if device else ()))
        cells = (_shown(row.rank), _shown(row.step), str(row.restarts), *memory, row.pod, _shown(row.pid))
        table.add_row(str(row.worker), cell(row.node), state, *map(cell, cells))
    events = Table(box=None, pad_edge=False, show_header=False)
    for event in view.events:
        style = "red" if event.type == "Warning" else ""
        # It is shown as text, because a message of the program may look like markup.
        events.add_row(cell(event.at, "dim"), cell(event.reason, style), cell(event.message))
    notice = [cell(view.notice, "red")] if view.notice else []
    return Group(head, cell(view.message, "dim"), *notice, table, events)


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


def _bytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**30:.2f} GiB"


def _shown(value: int | None) -> str:
    return "–" if value is None else str(value)
