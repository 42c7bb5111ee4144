"""`everstep bench JOB --sizes 1,2,4`: runs a job with each number of workers on this machine, and compares its speed.

Each size is a run of its own (`everstep run`), in a folder of its own and without the others' commits. Its speed is
taken from its progress reports; what it communicates, from a profile of some steps, after the speed was measured.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from everstep.cli.agents import NoAgent, ask
from everstep.cli.printing import SafeConsole
from everstep.contract.agent_requests import PROFILE
from everstep.jobs.history import History, StepSeen
from everstep.jobs.source import Where
from everstep_local.bench.plot import draw
from everstep_local.bench.scaling import Measured, Row, Scaling, rows
from everstep_local.run import control

START_SECONDS = 300.0  # for a size to take its first steps
PROFILE_STEPS, PROFILE_SECONDS = 10, 300.0
POLL = 0.2
MAX_WORKERS = 64


class BenchError(Exception):
    """A size cannot be measured; the text says why."""


app = typer.Typer(add_completion=False)
EXPECTED = (BenchError, NoAgent, control.ControlError)


@app.command()
def bench(
    job: Annotated[Path, typer.Argument(help="A TrainingJob's YAML file, or a Python script.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, after --.")] = None,
    sizes: Annotated[str, typer.Option(metavar="N,N,…", help="Numbers of workers.")] = "1,2,4",
    seconds: Annotated[float, typer.Option(min=1, help="How long each size is measured.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Steps that are not measured.")] = 10,
    scaling: Annotated[
        Scaling, typer.Option(help="strong: the global batch is the same at each size; weak: the batch of a worker is.")
    ] = Scaling.STRONG,
    out: Annotated[Path | None, typer.Option(help="Folder for the figures (.everstep/bench-TIME).")] = None,
) -> None:
    """Run a job with each number of workers on this machine: throughput, efficiency, communication, and a plot."""
    folder = (out or Path(".everstep") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    console = SafeConsole()
    measurements = []
    for size in _sizes(sizes):
        console.print(f"{size} worker{'s' if size > 1 else ''} …", highlight=False)
        measurements.append(_measure(job, arguments or [], size, folder / str(size), seconds, warmup))
    made = rows(measurements, scaling)
    title = f"{job.name}: {scaling} scaling on one machine"
    body = {
        "job": str(job),
        "scaling": scaling,
        "rows": [
            {**asdict(row.measured), "speedup": row.speedup, "efficiency": row.efficiency} for row in made
        ],
    }  # fmt: skip
    (folder / "scaling.json").write_text(json.dumps(body, indent=2) + "\n", "utf-8")
    (folder / "scaling.svg").write_text(draw(made, title), "utf-8")
    console.print(_table(made))
    console.print(f"plot and figures in {folder}", highlight=False, markup=False, soft_wrap=True)


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise BenchError(f"--sizes {text}: numbers of workers are expected, as in 1,2,4") from None
    if not sizes or sizes[0] < 1 or sizes[-1] > MAX_WORKERS:
        raise BenchError(f"--sizes {text}: each is from 1 to {MAX_WORKERS}")
    return sizes


def _measure(job: Path, arguments: list[str], size: int, out: Path, seconds: float, warmup: int) -> Measured:
    name = f"bench-{size}"
    out.mkdir(parents=True, exist_ok=True)
    with _running(job, arguments, size, name, out) as process:
        first = _wait(process, name, out, START_SECONDS, lambda step: step > 0)
        begin = _wait(process, name, out, START_SECONDS, lambda step: step >= first + warmup)
        ends = time.monotonic() + seconds
        last = _wait(process, name, out, seconds + START_SECONDS, lambda _: time.monotonic() >= ends)
        shares = _profile(name) if process.poll() is None else []
    seen = [e for e in History.load(out / "history.jsonl") if isinstance(e, StepSeen) and e.rank == 0]
    seen = [e for e in seen if begin <= e.step <= last]
    if len(seen) < 2:
        raise BenchError(
            f"with {size} workers it was over too soon, after step {last}: let the script take more steps, or give "
            "less --warmup"
        )
    took, steps = seen[-1].at - seen[0].at, seen[-1].step - seen[0].step
    return Measured(size, steps / took, steps, took, _mean(shares, "communication"), _mean(shares, "exposed"))


@contextmanager
def _running(job: Path, arguments: list[str], size: int, name: str, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The run, which is interrupted at the end of the block."""
    launcher = ["--elastic", f"{size}:{size}"] if job.suffix == ".py" else []
    options = ["--workers", str(size), *launcher, "--name", name, "--out", str(out), "--plain"]
    commits = ["--checkpoint", str(out / "checkpoints")]
    argv = [sys.executable, "-m", "everstep.cli.main", "run", str(job), *options, *commits, "--", *arguments]
    with (out / "printed.txt").open("wb") as printed:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _wait(process: subprocess.Popen[bytes], name: str, out: Path, seconds: float, done: Any) -> int:
    """Wait until `done(step)`, or until the run has ended; the step of rank 0. Raises `BenchError`."""
    until, step = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        if (code := process.poll()) is not None:
            if code:
                output = (out / "printed.txt").read_text(errors="replace").strip()
                raise BenchError(f"the run ended with exit code {code}:\n{output[-2000:]}")
            return step
        step = max(step, _step(name))
        if done(step):
            return step
        time.sleep(POLL)
    raise BenchError(f"the run is at step {step} after {seconds:.0f} s; see {out / 'printed.txt'}")


def _step(name: str) -> int:
    try:
        (address,) = (run for run in control.alive() if run.name == name)
        (answer,) = control.ask(address, "status")
    except (control.ControlError, ValueError):
        return 0  # it begins, or ends
    return max((row["step"] or 0 for row in answer["view"]["workers"] if row["rank"] == 0), default=0)


def _profile(name: str) -> list[dict[str, Any]]:
    """The answers of the ranks about their communication; none for a script without the session."""
    try:
        profile = ask(name, Where(), PROFILE, PROFILE_SECONDS, [], steps=PROFILE_STEPS, id=name)
    except NoAgent:
        return []
    return [answer for answer in profile if "error" not in answer]


def _mean(rows: list[dict[str, Any]], name: str) -> float | None:
    return sum(row[name] for row in rows) / len(rows) if rows else None


def _table(made: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("WORKERS", "STEPS/S", "SPEED-UP", "EFFICIENCY", "COMMUNICATION", "EXPOSED"):
        table.add_column(column, justify="right")
    for row in made:
        measured = row.measured
        shares = ["–" if s is None else f"{s * 100:.0f} %" for s in (measured.communication, measured.exposed)]
        speed = (f"{measured.steps_per_second:.2f}", f"{row.speedup:.2f}", f"{row.efficiency * 100:.0f} %")
        table.add_row(*map(Text, (str(measured.workers), *speed, *shares)))
    return table
