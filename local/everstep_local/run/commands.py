"""`everstep run` and related commands: run a TrainingJob on this machine, and control a run from a second terminal.

This module parses, calls `everstep_local.run` and prints. It needs the operator's dependencies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli.printing import SafeConsole, safe_line, say
from everstep_local.run import control, running
from everstep_local.run.console import render
from everstep_local.run.faults import ACTIONS, FaultError, parse
from everstep_local.run.job_file import Overrides, parse_elastic, read_secret
from everstep_local.run.manifest import JobFileError
from everstep_local.run.view import View

app = typer.Typer(add_completion=False)
EXPECTED = (control.ControlError, JobFileError, FaultError)  # errors of the user's input, whose text says what is wrong

RunName = Annotated[str | None, typer.Option("--run", help="The local run, by its job's name.")]


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
    nodes: Annotated[int, typer.Option(min=1, max=16, help="Simulated nodes to spread the workers over.")] = 1,
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
) -> None:
    """Run a job here with the real operator; its exit code: 0 complete, 1 failed, 130 interrupted."""
    secrets = {}
    for option in secret or ():
        secret_name, equals, path = option.partition("=")
        if not equals:
            raise JobFileError(f"--secret {option}: expected NAME=FILE")
        secrets[secret_name] = read_secret(Path(path))
    overrides = Overrides(name, workers, checkpoint, parse_elastic(elastic), secrets)
    story = tuple(parse(text) for text in at or ())
    raise typer.Exit(running.run(job, arguments or [], overrides, nodes=nodes, out=out, plain=plain, story=story))


@app.command()
def status(
    run: RunName = None,
    output: Annotated[str, typer.Option("--output", "-o", help="table or json")] = "table",
) -> None:
    """The workers of a local run and its newest events."""
    if output not in ("table", "json"):
        raise control.ControlError(f"--output {output}: give table or json")
    (answer,) = _ask(run, "status")
    if output == "json":
        say(json.dumps(answer["view"], indent=2))
    else:
        SafeConsole().print(render(View.from_json(answer["view"])))


@app.command()
def kill(
    pod: Annotated[str | None, typer.Argument(help="Its processes get SIGKILL.")] = None,
    node: Annotated[str | None, typer.Option(help="Pull the plug of a node: everything on it dies.")] = None,
    operator: Annotated[bool, typer.Option("--operator", help="The operator dies and another one starts.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the pod as kubectl would.")] = False,
    run: RunName = None,
) -> None:
    """Kill a pod, a node or the operator of a local run."""
    if sum((pod is not None, node is not None, operator)) != 1:
        raise control.ControlError("give one of: the name of a pod, --node NAME, --operator")
    if pod is not None:
        _done(run, "delete" if delete else "kill", pod=pod)
    elif node is not None:
        _done(run, "kill-node", node=node)
    else:
        _done(run, "kill-operator")


@app.command()
def start(
    node: Annotated[str, typer.Option(help="The node to plug in again.")],
    run: RunName = None,
) -> None:
    """Start a killed node of a local run again."""
    _done(run, "start-node", node=node)


@app.command()
def scale(replicas: Annotated[int, typer.Argument(min=1)], run: RunName = None) -> None:
    """Change the number of workers of a local run."""
    _done(run, "scale", replicas=replicas)


@app.command()
def suspend(run: RunName = None) -> None:
    """Take all workers of a local run away; `resume` goes on from the last commit."""
    _done(run, "suspend", wanted=True)


@app.command()
def resume(run: RunName = None) -> None:
    """Let a suspended local run go on."""
    _done(run, "suspend", wanted=False)


@app.command()
def logs(
    pod: Annotated[str, typer.Argument()],
    follow: Annotated[bool, typer.Option("--follow", "-f")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only so many lines from the end.")] = None,
    run: RunName = None,
) -> None:
    """What a worker of a local run has printed."""
    for answer in _ask(run, "logs", pod=pod, follow=follow, tail=tail):
        print(safe_line(answer["line"]), flush=follow)


LOOKS = ("status", "logs")  # these change nothing, so they may use the newest of several live runs


def _ask(run: str | None, verb: str, **arguments: Any) -> list[dict[str, Any]] | Any:
    address = control.find(run, only=verb not in LOOKS)
    answers = control.ask(address, verb, **arguments)
    if verb == "logs":
        return answers
    if not (received := list(answers)):
        raise control.ControlError(f"run {address.name} has just ended")
    return received


def _done(run: str | None, verb: str, **arguments: Any) -> None:
    for answer in _ask(run, verb, **arguments):
        say(answer["done"])
