"""What the commands about jobs print: tables for people, and the same facts as JSON, YAML or names."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from importlib import import_module
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from everstep.cli.printing import SafeConsole, cell, say
from everstep.jobs.source import JobError
from everstep.jobs.view import EventRow, View, age, clock_time

PIPE_WIDTH = 4096  # characters of a line
EARLIER_SHOWN = 3  # runs before a rerun
STYLES = {
    "training": "green",
    "starting": "yellow",
    "spare": "cyan",
    "Failed": "red",
    "Terminating": "yellow",
    "Succeeded": "cyan",
}


class Output(StrEnum):
    """`-o`."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


def put(output: Output, data: Any, names: Iterable[str], table: Callable[[bool], Any]) -> None:
    """Print `data` as asked for. `table(wide)` makes the table."""
    match output:
        case Output.JSON:
            say(json.dumps(data, indent=2))
        case Output.YAML:
            try:
                yaml = import_module("yaml")
            except ModuleNotFoundError:
                raise JobError("-o yaml needs the package pyyaml: pip install pyyaml, or take -o json") from None
            say(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), end="")
        case Output.NAME:
            for name in names:
                say(name)
        case Output.TABLE | Output.WIDE:
            # Whoever reads through a pipe wants a row a line, and whole names.
            console = SafeConsole() if sys.stdout.isatty() else SafeConsole(width=PIPE_WIDTH)
            console.print(table(output is Output.WIDE))


def columns(names: Iterable[str], *, right: Container[str] = (), wraps: Container[str] = ()) -> Table:
    """An empty table without lines. Of the columns `right` the cells end alike; those in `wraps` may be broken."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name not in wraps)
    return table


def job(view: View) -> Group:
    """The job's line, a row a worker, then the newest events."""
    head = Text()
    spares = f"spares {view.spares}  " if view.spares else ""
    head.append(f"{view.job}  ", "bold")
    head.append(f"{view.status}  ", "green" if view.status in ("Running", "Complete") else "yellow")
    head.append(
        f"step {shown(view.step)}/{shown(view.total_steps)}  committed {shown(view.committed)}  "
        f"world {view.size}  {spares}round {view.round}  restarts {view.restarts}  goodput {view.goodput or '–'}"
    )
    if view.rehearsed:
        head.append(f"  rehearsed ({view.rehearsed})")
    notice = [cell(view.notice, "red")] if view.notice else []
    earlier = [cell(f"earlier run: {text}", "dim") for text in view.earlier_runs[:EARLIER_SHOWN]]
    return Group(head, cell(view.message, "dim"), *earlier, *notice, _workers(view), events(view.events))


def _workers(view: View) -> Table:
    """A column for what nobody knows of any worker is left out."""
    rows = view.workers
    known: list[tuple[str, str, list[str]]] = [
        ("WORKER", "left", [str(row.worker) for row in rows]),
        ("NODE", "left", [row.node for row in rows]),
        ("STATE", "left", [row.state for row in rows]),
        ("RANK", "right", [shown(row.rank) for row in rows]),
        ("STEP", "right", [shown(row.step) for row in rows]),
        ("INCARNATION", "right", [str(row.incarnation) for row in rows]),
        ("PEAK RAM", "right", [_gibibytes(row.memory) for row in rows]),
        ("PEAK DEVICE", "right", [_gibibytes(row.device_memory) for row in rows]),
        ("POD", "left", [row.pod for row in rows]),
        ("PID", "right", [shown(row.pid) for row in rows]),
    ]
    kept = [column for column in known if not rows or any(text != "–" for text in column[2])]
    if view.namespace == "":  # a local run's columns stay where they are from its first second on
        kept = [column for column in known if column in kept or column[0] != "PEAK DEVICE"]
    table = columns((name for name, _, _ in kept), right=[name for name, side, _ in kept if side == "right"])
    for index in range(len(rows)):
        texts = [(name, column[index]) for name, _, column in kept]
        table.add_row(*(cell(text, STYLES.get(text, "") if name == "STATE" else "") for name, text in texts))
    return table


def events(rows: Iterable[EventRow]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for event in rows:
        # Shown as text, because a message of the program may look like markup.
        style = "red" if event.type == "Warning" else ""
        table.add_row(cell(clock_time(event.at), "dim"), cell(event.reason, style), cell(event.message))
    return table


def jobs(views: Sequence[tuple[str, View]], wide: bool) -> Table:
    """A row a job, with the title of its source."""
    now = datetime.now(UTC)
    names = ["NAME", "STATUS", "STEP", "COMMITTED", "WORKERS", "RESTARTS", "GOODPUT", "AGE", "WHERE"]
    table = columns([*names, *(["MESSAGE"] if wide else [])], wraps=["MESSAGE"])
    for title, view in views:
        total = f"/{view.total_steps}" if view.total_steps is not None else ""
        texts = [
            view.job, view.status, f"{shown(view.step)}{total}", shown(view.committed),
            f"{view.ready}/{view.wanted}",
            str(view.restarts), view.goodput or "–", age(view.began, now) or "–", title,
        ]  # fmt: skip
        table.add_row(*map(cell, [*texts, *([view.message] if wide else [])]))
    return table


def _gibibytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 2**30:.2f} GiB"


def shown(value: int | None) -> str:
    return "–" if value is None else str(value)
