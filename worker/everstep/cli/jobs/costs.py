"""`everstep goodput` and `everstep nodes`: where the time of a job went, which nodes cost recoveries, and
which are avoided."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Table

from everstep.cli.jobs import tables
from everstep.cli.jobs.commands import Context, Format, Job, Kubeconfig, Namespace, Out, gather
from everstep.cli.jobs.tables import Output
from everstep.cli.printing import cell, say_error
from everstep.jobs.costs import MEANINGS, NodeCost, by_node, seconds_by_state
from everstep.jobs.source import JobError, Unreachable, Where, pick

app = typer.Typer(add_completion=False)
EXPECTED = (JobError, Unreachable)


@app.command()
def goodput(
    job: Job = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    out: Out = None,
    output: Format = Output.TABLE,
) -> None:
    """Where the time of a job went: seconds by state. They add up to the time for which it was not suspended."""
    source, name = pick(job, Where(namespace, context, kubeconfig, out))
    view = source.summary(name)
    seconds = seconds_by_state(view, datetime.now(UTC))
    total = sum(seconds.values())
    if total and not view.raw_status.get("stateSeconds"):
        say_error(f"note: the status of {name} has no seconds by state: its operator is older, or has not written yet")
    data = {"job": name, "namespace": view.namespace, "seconds": seconds, "total": total}
    tables.put(output, data, [name], lambda _: _states(seconds, total))


def _states(seconds: dict[str, int], total: int) -> Table:
    names = ("STATE", "SECONDS", "SHARE", "MEANING")
    table = tables.columns(names, right=names[1:3], wraps=names)
    for state, meaning in MEANINGS.items():
        share = f"{100 * seconds[state] / total:.1f}%" if total else "–"
        table.add_row(*map(cell, (state, str(seconds[state]), share)), cell(meaning, "dim"))
    whole = cell("the time for which the job was not suspended", "dim")
    table.add_row("total", str(total), "100%" if total else "–", whole)
    return table


@app.command()
def nodes(
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    every: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    over: Annotated[bool, typer.Option("--ended", help="Also what ended runs left under .everstep.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """Which node cost how many recoveries and seconds, by the last ten recoveries of each job, and which nodes new pods
    avoid."""
    views, _ = gather(Where(namespace, context, kubeconfig, every=every), over=over)
    costs = by_node(views, datetime.now(UTC))
    if not costs and output in (Output.TABLE, Output.WIDE):
        say_error(f"no recovery, and no node that is avoided, in the statuses of {len(views)} jobs")
        return
    names = [cost.node for cost in costs if cost.node is not None]
    tables.put(output, [cost.to_json() for cost in costs], names, lambda wide: _nodes(costs, wide))


def _nodes(costs: list[NodeCost], wide: bool) -> Table:
    names = [
        "NODE",
        "RECOVERIES",
        "SECONDS",
        "LOST STEPS",
        "CAUSES",
        "LAST",
        "AVOIDED",
        "WHERE",
        *(["JOBS"] if wide else []),
    ]
    table = tables.columns(names, right=names[1:4], wraps=("AVOIDED", "JOBS"))
    for cost in costs:
        causes = ", ".join(f"{cause} {count}" for cause, count in sorted(cost.causes.items()))
        texts = [
            cost.node or "–", str(cost.recoveries), f"{cost.seconds:.1f}", str(cost.lost_steps), causes, cost.last,
            _avoided(cost), cost.where, *([", ".join(dict.fromkeys([*cost.jobs, *cost.excluded_by]))] if wide else []),
        ]  # fmt: skip
        table.add_row(*map(cell, texts))
    return table


def _avoided(cost: NodeCost) -> str:
    if not cost.excluded_by:
        return "–"
    number = len(cost.excluded_by)
    end = f"until {cost.excluded_until}" if cost.excluded_until else "as long as its status says this"
    return f"by {number} job{'' if number == 1 else 's'} {end}: {'; '.join(cost.reasons)}"
