"""`everstep run`: run a TrainingJob on this machine; what only its nodes can do; and `everstep ui`, the page.

This module parses, calls `everstep_local.run` and prints. It needs the operator's dependencies. What is common to
local runs and clusters is in `everstep.cli.jobs`.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.printing import say
from everstep.jobs.source import RUNS, JobError, Unreachable, Where, pick
from everstep_local.run import control, running
from everstep_local.run.faults import ACTIONS, FaultError, parse
from everstep_local.run.job_file import Overrides, parse_elastic, read_secret
from everstep_local.run.manifest import JobFileError
from everstep_local.run.sources import Started, ended

app = typer.Typer(add_completion=False)
# Errors of the user's input, whose text says what is wrong.
EXPECTED = (control.ControlError, JobError, Unreachable, JobFileError, FaultError)


@app.command(context_settings={"ignore_unknown_options": False})
def run(
    job: Annotated[Path, typer.Argument(help="A TrainingJob's YAML file, or a Python script.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, after --.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Number of workers, instead of the file's.")
    ] = None,
    elastic: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            help="Fewest and most workers: after a loss the others go on. everstep-run then starts a script.",
        ),
    ] = None,
    spares: Annotated[
        int | None, typer.Option(min=0, max=64, help="Workers beside them that wait to take the place of a lost one.")
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=1, max=16, help="Simulated nodes for the workers. With one, all are lost with it.")
    ] = 1,
    name: Annotated[str | None, typer.Option(help="Name of the job, instead of the file's.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Folder or URL for commits, instead of the file's.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the timeline and the logs (.everstep/NAME-TIME).")
    ] = None,
    secret: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FILE", help="A Secret from a file of NAME=value lines.")
    ] = None,
    at: Annotated[
        list[str] | None, typer.Option(metavar="STEP:ACTION", help=f"Do something at a step: {ACTIONS}.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live table.")] = False,
    ui: Annotated[bool, typer.Option("--ui", help="Serve a page about the run, and print its address.")] = False,
) -> None:
    """Run a job here with the real operator; its exit code: 0 complete, 1 failed, 130 interrupted."""
    secrets = {}
    for option in secret or ():
        secret_name, equals, path = option.partition("=")
        if not equals:
            raise JobFileError(f"--secret {option}: expected NAME=FILE")
        secrets[secret_name] = read_secret(Path(path))
    overrides = Overrides(name, workers, checkpoint, parse_elastic(elastic), spares, secrets)
    story = tuple(parse(text) for text in at or ())
    given = (("--name", name), ("--workers", workers), ("--elastic", elastic), ("--spares", spares), ("--nodes", nodes))
    options = [f"{option}={value}" for option, value in given if value is not None]
    options += [f"--secret={each}" for each in secret or ()]
    started = Started(Path.cwd(), str(job), tuple(options), tuple(arguments or ()))
    code = running.run(
        job, arguments or [], overrides, nodes=nodes, out=out, plain=plain, story=story, page=ui, started=started
    )
    raise typer.Exit(code)


@app.command()
def ui(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="The run to open, by its job's name.")] = None,
    out: Annotated[Path | None, typer.Option(help="What a run left in this folder.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of 127.0.0.1; 0: any free one.")] = 0,
) -> None:
    """Serve a page about the local runs, alive and ended, until Ctrl-C. It changes nothing."""
    from everstep_local.run import page  # noqa: PLC0415  # it loads a template engine

    if out is not None:
        ended(str(out))  # refuses a folder that is none of a run
    jobs = page.LocalJobs(RUNS, out)
    key = page.key_of(out) if out is not None else jobs.newest(run) if run is not None else None

    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)

    async def serve() -> None:
        async with page.served(jobs, key, port) as address:
            say(f"{address}\nCtrl-C ends it")
            await asyncio.Event().wait()

    asyncio.run(serve())


@app.command()
def start(
    node: Annotated[str, typer.Option(help="The node to plug in again.")],
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="The local run, by its job's name.")] = None,
) -> None:
    """Start a killed node of a local run again."""
    source, job = pick(run, Where(), changes=True)
    say(source.disturb(job, "start-node", node=node))
