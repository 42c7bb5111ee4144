"""The commands about jobs, called in this process: an interpreter for each takes seconds."""

from __future__ import annotations

from collections.abc import Callable

from typer.testing import CliRunner

from everstep.cli import main

Call = Callable[..., str]


def caller(*always: str) -> Call:
    """Runs a command with these arguments behind its own; what it prints on stdout. It raises as the command does."""

    def run(verb: str, *arguments: str) -> str:
        done = CliRunner().invoke(main.app, [verb, *arguments, *always])
        if done.exception is not None:
            raise done.exception
        return done.stdout

    return run
