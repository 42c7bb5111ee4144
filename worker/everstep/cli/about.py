"""`everstep version` and `everstep completion`."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from everstep.cli.jobs.commands import Context, Kubeconfig
from everstep.cli.printing import say
from everstep.jobs.source import JobError, Misconfigured, NoCluster, Unreachable, Where
from everstep.version import __version__

app = typer.Typer(add_completion=False)
EXPECTED = (JobError,)


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def version(context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """The version of this program, and the images of the operator on the cluster."""
    say(f"everstep {__version__}")
    try:
        images = import_module("everstep.jobs.cluster").operators(Where(context=context, kubeconfig=kubeconfig))
    except NoCluster:
        return
    except (Unreachable, Misconfigured) as e:
        say(f"operator: not known: {e}")
        return
    for image in images or ["none on the cluster"]:
        say(f"operator {image}")


@app.command()
def completion(shell: Shell) -> None:
    """A script for the shell that completes commands and options: `source <(everstep completion bash)`."""
    say(get_completion_script(prog_name="everstep", complete_var="_EVERSTEP_COMPLETE", shell=shell))
