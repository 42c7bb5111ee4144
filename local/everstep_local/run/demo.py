"""`everstep demo`: a run of the script that comes with this distribution, with a loss and a resize in it."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from everstep.cli.printing import say
from everstep.jobs.source import JobError
from everstep_local.run import commands, running
from everstep_local.run.faults import parse
from everstep_local.run.job_file import Overrides
from everstep_local.run.sources import HISTORY

SCRIPT: Final = Path(__file__).parents[1] / "demo" / "spirals.py"
STORY: Final = ("100:kill=1", "250:scale=4")
SIZES: Final = (2, 4)  # the fewest and the most workers

app = typer.Typer(add_completion=False)
EXPECTED = commands.EXPECTED


@app.command()
def demo(
    out: Annotated[
        Path,
        typer.Option(help="Folder for the script, the timeline and the logs; what an earlier demo left in it goes."),
    ] = Path(".everstep/demo"),
    steps: Annotated[int, typer.Option(min=300, max=1_000_000, help="Steps; with 700 it takes half a minute.")] = 700,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live table.")] = False,
) -> None:
    """Train with three workers, kill one, grow to four: half a minute, no cluster, no GPU."""
    if find_spec("torch") is None:
        raise JobError("the demo trains with PyTorch, which is not installed: pip install torch")
    script = out / SCRIPT.name
    _clear(out, script)
    shutil.copyfile(SCRIPT, script)
    overrides = Overrides(workers=3, elastic=SIZES)
    story = tuple(parse(text) for text in STORY)
    code = running.run(script, ["--steps", str(steps)], overrides, nodes=1, out=out, plain=plain, story=story)
    if code == 0:
        program = program_name()
        say(
            f"\nNow break it yourself. In one terminal:\n"
            f"  {program} run {script} --workers 3 --elastic 2:4 -- --steps 3000\n"
            "and in another:\n"
            f"  {program} status -w\n"
            f"  {program} kill 0\n"
            f"How a script of your own becomes elastic: compare {script} with a DDP script; docs/how-to-convert.md"
        )
    raise typer.Exit(code)


def program_name() -> str:
    """By which a person can call this program here: `make demo` has activated no environment."""
    if shutil.which("everstep") is not None:
        return "everstep"
    program = Path(sys.executable).with_name("everstep")
    return os.path.relpath(program) if program.is_relative_to(Path.cwd()) else str(program)


def _clear(out: Path, script: Path) -> None:
    """Make the folder, empty. What an earlier demo left goes, or its commits would be gone on from. Raises `JobError`
    if anything of somebody else is in it."""
    if out.is_dir() and any(out.iterdir()):
        if not (script.is_file() and (out / HISTORY).is_file()):
            raise JobError(f"{out} is not an earlier demo's folder: name another with --out")
        if script.read_bytes() != SCRIPT.read_bytes():
            raise JobError(f"{script} has been changed: move it, or name another folder with --out")
        shutil.rmtree(out)
    elif out.exists() and not out.is_dir():
        raise JobError(f"{out} is a file: name a folder with --out")
    out.mkdir(parents=True, exist_ok=True)
