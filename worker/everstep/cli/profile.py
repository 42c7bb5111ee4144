"""`everstep profile`: a trace of the next steps of every rank, in the job's storage, and what it says in one table."""

from __future__ import annotations

import secrets
import time
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from everstep.cli.agents import Answer, Format, Job, NoAgent, Output, ask, head, put_json
from everstep.cli.jobs.commands import Context, Kubeconfig, Namespace
from everstep.cli.printing import SafeConsole
from everstep.contract.agent_requests import MAX_STEPS, PROFILE
from everstep.jobs.source import JobError, Where

app = typer.Typer(add_completion=False)
EXPECTED = (NoAgent, JobError)


@app.command()
def profile(
    job: Job = None,
    steps: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="How many of the next steps.")] = 20,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="How long to wait for them.")] = 600,
    id_: Annotated[
        str | None, typer.Option("--id", metavar="NAME", help="The folder below profiles/; else the time.")
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Output = Format.TEXT,
) -> None:
    """Profile the next steps of a running job with torch.profiler: a Chrome trace of each rank, and a summary.

    The traces are in the job's checkpoint URL, below profiles/. Open them in https://ui.perfetto.dev.
    """
    where = Where(namespace, context, kubeconfig)
    name = id_ or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    command = ["profile", *([job] if job else []), "--steps", str(steps), "--seconds", str(seconds), "--id", name]
    answers = ask(job, where, PROFILE, seconds, command, steps=steps, id=name)
    if output is not Format.TEXT:
        put_json(answers, output)
    else:
        _show(answers)
    if any("error" in answer for answer in answers):
        raise typer.Exit(1)


def _show(answers: list[Answer]) -> None:
    console = SafeConsole()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("RANK", "STEPS", "A STEP", "COMMUNICATION", "OVERLAPPED", "EXPOSED", "INPUT STALL"):
        table.add_column(column, justify="right")
    whole = [answer for answer in answers if "error" not in answer]
    for a in whole:
        steps = f"{a['first']}–{a['last']}"
        figures = (a["communication"], a["overlap"], a["exposed"], a["input"])
        cells = (_who(a), steps, f"{a['step_seconds'] * 1e3:.1f} ms", *map(_percent, figures))
        table.add_row(*map(Text, cells))
    if whole:
        console.print(table)
    for answer in whole:
        lines = [answer["trace"]]
        if left_out := answer.get("left_out"):
            lines.append(f"the world changed in {left_out} of the steps: the table leaves them out, the trace has them")
        for line in lines:
            console.print(f"{_of(answer)}: {line}", highlight=False, markup=False, soft_wrap=True)
    for answer in answers:
        if "error" in answer:
            console.print(f"{head(answer)}: {answer['error']}", highlight=False, markup=False, soft_wrap=True)


def _who(answer: Answer) -> str:
    """Its rank. A process with a role has none, and is known by its pod."""
    return str(answer.get("rank", answer.get("pod") or answer["pid"]))


def _of(answer: Answer) -> str:
    return f"rank {answer['rank']}" if "rank" in answer else head(answer)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share * 100:.0f} %"
