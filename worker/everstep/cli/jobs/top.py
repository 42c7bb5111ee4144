"""`everstep top`: how fast each job trains now, and how long ago it committed."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from everstep.cli.jobs import tables
from everstep.cli.jobs.commands import Context, Format, Kubeconfig, Namespace, gather
from everstep.cli.jobs.tables import Output
from everstep.cli.printing import cell, say_error
from everstep.jobs.source import JobError, Unreachable, Where
from everstep.jobs.view import View, age, moment

app = typer.Typer(add_completion=False)
EXPECTED = (JobError, Unreachable)

REFRESH_SECONDS = 5.0  # the operator writes progress into the status about as often


@dataclass(frozen=True, slots=True)
class Row:
    where: str
    view: View
    rate: float | None  # steps a second

    def to_json(self) -> dict[str, Any]:
        view = self.view
        return {
            "where": self.where, "namespace": view.namespace, "job": view.job, "status": view.status,
            "ready": view.ready, "wanted": view.wanted, "step": view.step, "total_steps": view.total_steps,
            "steps_per_second": self.rate, "goodput": view.goodput, "committed": view.committed,
            "committed_at": view.committed_at or None,
        }  # fmt: skip


def rate(view: View, before: View | None) -> float | None:
    """Steps a second: between two statuses by their own times, else by the time that the rest will take. None: the
    status says neither, or the job does not run."""
    if not view.status.startswith("Running"):
        return None
    if before is not None and (measured := _measured(before.raw_status, view.raw_status)) is not None:
        return measured
    progress = view.raw_status.get("progress") or {}
    step, total, rest = (progress.get(name) for name in ("step", "totalSteps", "etaSeconds"))
    if step is None or total is None or not rest:
        return None
    return round((int(total) - int(step)) / int(rest), 3)


def _measured(before: Any, now: Any) -> float | None:
    old, new = before.get("progress") or {}, now.get("progress") or {}
    began, ended = moment(str(old.get("updatedAt") or "")), moment(str(new.get("updatedAt") or ""))
    if began is None or ended is None or ended <= began or old.get("step") is None or new.get("step") is None:
        return None
    return round(max(0, int(new["step"]) - int(old["step"])) / (ended - began).total_seconds(), 3)


@app.command()
def top(
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    every: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again every five seconds, until Ctrl-C.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """How fast each job trains, how much of its time it trained, and how long ago it committed."""
    where = Where(namespace, context, kubeconfig, every=every)
    before: dict[tuple[str, str, str], View] = {}
    while True:
        views, _ = gather(where, over=False)
        rows = []
        for title, view in views:
            key = (title, view.namespace, view.job)
            rows.append(Row(title, view, rate(view, before.get(key))))
        before = {(row.where, row.view.namespace, row.view.job): row.view for row in rows}
        _show(rows, output, clear=watch)
        if not watch:
            return
        time.sleep(REFRESH_SECONDS)


def _show(rows: list[Row], output: Output, *, clear: bool) -> None:
    for_people = output in (Output.TABLE, Output.WIDE)
    if not rows and for_people:
        say_error("no job; start one with `everstep run`, or kubectl apply")
        return
    if clear and for_people and sys.stdout.isatty():
        sys.stdout.write("\x1b[H\x1b[2J")
    tables.put(output, [row.to_json() for row in rows], [row.view.job for row in rows], lambda _: _table(rows))


def _table(rows: list[Row]) -> Table:
    now = datetime.now(UTC)
    names = ("JOB", "STATUS", "WORKERS", "STEP", "STEPS/S", "GOODPUT", "COMMITTED", "AGO", "WHERE")
    table = tables.columns(names)
    for row in rows:
        view = row.view
        total = f"/{view.total_steps}" if view.total_steps is not None else ""
        texts = [
            view.job, view.status, f"{view.ready}/{view.wanted}", f"{tables.shown(view.step)}{total}",
            "–" if row.rate is None else f"{row.rate:.3g}", view.goodput or "–", tables.shown(view.committed),
            age(view.committed_at, now) or "–", row.where,
        ]  # fmt: skip
        table.add_row(*map(cell, texts))
    return table
