"""`everstep`: one program, whose commands come from two distributions.

`everstep ckpt` is part of `everstep`. The package everstep-local brings `everstep run` and its kin by an entry point,
so that this one imports nothing of it. A command's module is imported when it is called, or its help is shown.
Invariant: a person never sees a traceback; what went wrong is one line, and the exit code is the job's.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from everstep.installing import remedy
from everstep.version import __version__

USAGE, INTERRUPTED = 2, 130
# As the reference page shows them. An error of EXPECTED may have another code than USAGE, its `exit_code`.
EXIT_CODES = {
    0: "done",
    1: "a defect of Everstep or the machine; for `everstep run`, the job has failed",
    USAGE: "the command cannot be carried out as it was given: no such job, worker, context or file, an ambiguous "
    "name, a value that the cluster refuses",
    3: "the cluster does not answer, or does not allow it",
    INTERRUPTED: "Ctrl-C",
}
# Entry points of modules that have `COMMANDS`, as `OWN`: by name a module, which has `app`, and `EXPECTED`: errors of
# the user's input, whose text says what is wrong.
GROUP = "everstep.commands"
LOCAL = ("run", "start", "ui", "plan", "render", "bench")
_OF_JOBS = ("list", "status", "logs", "events", "scale", "suspend", "resume", "rerun", "migrate", "delete", "kill")
OWN = {
    **dict.fromkeys(_OF_JOBS, "everstep.cli.jobs.commands"),
    **dict.fromkeys(("goodput", "nodes"), "everstep.cli.jobs.costs"),
    "top": "everstep.cli.jobs.top",
    "init": "everstep.cli.jobs.create",
    "report": "everstep.cli.jobs.report",
    "version": "everstep.cli.about",
    "completion": "everstep.cli.about",
    **{name: f"everstep.cli.{name}" for name in ("ckpt", "stacks", "profile", "doctor", "rehearse")},
}


class Commands(Mapping[str, Any]):
    """The commands by name. `expected`: the errors of those that are imported."""

    def __init__(self) -> None:
        self.expected: tuple[type[Exception], ...] = ()
        self._loaded: dict[str, Any] = {}

    @cached_property
    def _modules(self) -> dict[str, str]:
        """By name. Without everstep-local, whose commands say what they need, theirs are ""."""
        from importlib.metadata import entry_points  # noqa: PLC0415  it takes as long as all that `--version` needs

        try:
            groups = [point.load() for point in entry_points(group=GROUP)]
        except ModuleNotFoundError:
            groups = []
        local = {name: module for group in groups for name, module in group.COMMANDS.items()}
        return (local or dict.fromkeys(LOCAL, "")) | OWN

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, name: str) -> Any:
        module = self._modules[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(name, module)
            self._loaded[name].name = name
        return self._loaded[name]

    def _load(self, name: str, module: str) -> Any:
        if not module:
            return _refusing("the package everstep-local, which has this command, is not installed")
        try:
            loaded = import_module(module)
        except ModuleNotFoundError as e:
            if name in OWN:
                raise
            return _refusing(f"the package {e.name} is missing")
        self.expected += loaded.EXPECTED
        command = typer.main.get_command(loaded.app)
        return getattr(command, "commands", {}).get(name, command)  # of a module with several, or one that is a group


def _refusing(problem: str) -> Any:
    """A command of everstep-local, which says what it needs."""
    app = typer.Typer(add_completion=False)

    @app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def refuse() -> None:
        _say_error(f"{problem}: {remedy('everstep-local')}")
        raise typer.Exit(USAGE)

    return typer.main.get_command(app)


def _say_error(text: object) -> None:
    from everstep.cli.printing import say_error  # noqa: PLC0415  it imports rich

    say_error(f"everstep: {text}")


COMMANDS = Commands()


class _Group(TyperGroup):
    """All commands, none of which is imported yet."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**{**attributes, "commands": COMMANDS})

    def list_commands(self, _: Any) -> list[str]:
        return list(self.commands)


app = typer.Typer(
    cls=_Group,
    help="Elastic, fault-tolerant PyTorch training: look at jobs and change them, on a cluster or on this machine; run "
    "one here and break it; ask what the operator decides about it; look into its processes; keep checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"everstep {__version__}\n")  # without rich, whose import takes longer than all else
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Its version.")] = False,
) -> None:
    """What stands before a command."""


def main() -> None:
    """Entry point of `everstep`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not end a run
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        app()
    except BrokenPipeError:
        # Whoever read has gone; what is still buffered must not raise again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as e:
        if isinstance(e, COMMANDS.expected):
            _say_error(e)
            sys.exit(getattr(e, "exit_code", USAGE))
        # A defect of ours or of the machine: one line for the person, the rest for whoever mends it.
        logging.getLogger(__name__).exception("everstep failed")
        _say_error(f"{type(e).__name__}: {e}")
        sys.exit(1)


if __name__ == "__main__":
    main()
