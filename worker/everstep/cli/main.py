"""`everstep`: one program, whose commands come from two distributions.

`everstep ckpt` is part of `everstep`. The package everstep-local brings `everstep run` and its kin by an entry point,
so that this one imports nothing of it. Invariant: a person never sees a traceback; what went wrong is one line, and
the exit code is the job's.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from everstep.cli import ckpt
from everstep.cli.agents import NoAgent
from everstep.cli.doctor import doctor
from everstep.cli.printing import say, say_error
from everstep.cli.profile import profile
from everstep.cli.rehearse import rehearse
from everstep.cli.stacks import stacks
from everstep.version import __version__

USAGE, INTERRUPTED = 2, 130  # exit codes: a command that was given wrongly, Ctrl-C
GROUP = "everstep.commands"  # the entry points of modules that have `app` and `EXPECTED`
LOCAL = ("run", "status", "kill", "start", "scale", "suspend", "resume", "logs", "plan", "bench")

app = typer.Typer(
    help="Elastic, fault-tolerant PyTorch training: run a TrainingJob on this machine and break it; ask what the "
    "operator decides about one; look into its processes; keep checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
expected: tuple[type[Exception], ...] = (NoAgent,)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"everstep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Its version.")] = False,
) -> None:
    """What stands before a command."""


def _without_local(problem: str) -> None:
    """The commands of everstep-local, which say what they need."""

    def refuse() -> None:
        say_error(f"everstep: {problem}: pip install everstep-local")
        raise typer.Exit(USAGE)

    for name in LOCAL:
        app.command(name, hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
            refuse
        )


try:
    groups = [point.load() for point in entry_points(group=GROUP)]
except ModuleNotFoundError as e:
    _without_local(f"the package {e.name} is missing")
else:
    if not groups:
        _without_local("the package everstep-local, which has this command, is not installed")
    for group in groups:
        app.add_typer(group.app)
        expected = (*expected, *group.EXPECTED)
app.add_typer(ckpt.app, name="ckpt")
app.command("stacks")(stacks)
app.command("profile")(profile)
app.command("doctor")(doctor)
app.command("rehearse", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(rehearse)


def main() -> None:
    """Entry point of `everstep`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not end a run
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        app()
    except expected as e:
        say_error(f"everstep: {e}")
        sys.exit(USAGE)
    except BrokenPipeError:
        # Whoever read has gone; what is still buffered must not raise again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as e:
        # A defect of ours or of the machine: one line for the person, the rest for whoever mends it.
        logging.getLogger(__name__).exception("everstep failed")
        say_error(f"everstep: {type(e).__name__}: {e}")
        sys.exit(1)


if __name__ == "__main__":
    main()
