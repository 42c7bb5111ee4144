"""Runs a recipe of `examples/` as its reader would, and reads from its last commit what the run has made.

`undisturbed` runs the script under `everstep-run` alone. `disturbed` applies the recipe's job.yaml in local mode, with
the real operator, and kills a worker at a step that the recipe's name seeds. Both have the same number of workers at
all times, so that they end with the same bits where the script is deterministic.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml

import everstep
from everstep.checkpoint import NoCommit
from support import ROOT
from support.processes import warm_agent
from support.processes.warm_python import warm
from support.recipes.compared import compare

EXAMPLES = ROOT / "examples"
PROGRAMS = ROOT / "tests" / "recipes" / "programs"  # which run a recipe and note, change or disturb what it does
BIN = Path(sys.executable).parent
SECONDS = 200  # that one run may take, on a machine with other work
OWN = ("seeds", "switches", "ddp_buckets")  # what the session keeps beside what the script tracks
DEATHS = {"WorkerLost", "WorkerReplaced"}  # the events of a killed worker


class RecipeFailed(AssertionError):
    """A run of a recipe has not ended as it should; its message has the end of what it printed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that is over: the step and state of its last commit, if it has one, and what it printed."""

    step: int
    state: Mapping[str, Any]
    output: str
    folder: Path

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "out" / "status.json").read_text())
        return found

    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "out" / "history.jsonl").read_text().splitlines()]


def launched(folder: Path, processes: int, arguments: Sequence[str | Path], **variables: str) -> str:
    """What `everstep-run` printed, with `processes` ranks of a script and its arguments, in `folder`. The agent and
    its ranks are forked from a process that has imported torch."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["--standalone", "--nproc-per-node", str(processes)]
    environment = _environment(folder) | variables
    with (folder / "printed.log").open("w+") as output:
        process = warm().popen(
            warm_agent.__file__, *flags, *arguments, stdout=output, stderr=output, env=environment, cwd=folder
        )
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()  # its fork server and its ranks end with it
        output.seek(0)
        printed = output.read()
    if code != 0:
        how = f"did not end in {SECONDS} s" if code is None else f"ended with {code}"
        raise RecipeFailed(f"everstep-run {' '.join(map(str, [*flags, *arguments]))}\n{how}:\n{printed[-6000:]}")
    return printed


def undisturbed(
    name: str,
    folder: Path,
    arguments: Sequence[str],
    processes: int = 3,
    through: Sequence[Path] = (),
    **variables: str,
) -> Ended:
    """`processes` ranks of examples/NAME/train.py, all of one agent. A name such as "heterogeneous/backup.py" names
    another script of the recipe. `through`: a script of the test that runs the recipe's; `variables`: for its
    environment."""
    return loaded(folder, launched(folder, processes, [*through, _script(name), *arguments], **variables))


def disturbed(
    name: str,
    folder: Path,
    arguments: Sequence[str],
    processes: int = 3,
    at: Sequence[str] = (),
    through: Sequence[Path] = (),
    elastic: str = "",
    every: int | None = None,
    seconds: int = SECONDS,
) -> Ended:
    """The job of examples/NAME/job.yaml with `processes` workers; `at`: what happens in which step, as in `everstep
    run --at`. `through`: a script of the test that runs the recipe's, and its first arguments; `elastic`: MIN:MAX
    workers, else as many as there are; `every`: steps between two commits, where the job says it; `seconds`:
    that the run may take."""
    folder.mkdir(parents=True, exist_ok=True)
    job = yaml.safe_load(_script(name).with_name("job.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    said = container["command"]
    script = said.index("train.py")
    given = [*said[:script], *through, _script(name), *said[script + 1 :], *arguments]
    container["command"] = [str(part) for part in given]
    if every is not None:
        job["spec"]["checkpoint"]["everySteps"] = every
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    command: list[str | Path] = [BIN / "everstep", "run", folder / "job.yaml", "--plain", "--workers", str(processes)]
    command += ["--elastic", elastic or f"{processes}:{processes}", "--out", folder / "out"]
    for one in at:
        command += ["--at", one]
    command += ["--checkpoint", folder / "commits"]
    shown = " ".join(str(part) for part in command)
    try:
        done = subprocess.run(
            [str(part) for part in command], cwd=folder, env=_environment(folder), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        printed = (e.stdout or b"").decode() if isinstance(e.stdout, bytes | None) else e.stdout
        raise RecipeFailed(f"{shown}\ndid not end in {seconds} s:\n{printed[-6000:]}") from None
    if done.returncode != 0:
        raise RecipeFailed(f"{shown}\nended with {done.returncode}:\n{done.stdout[-6000:]}")
    return loaded(folder, done.stdout)


def loaded(folder: Path, output: str) -> Ended:
    """The run that was made in `folder`, and printed `output`."""
    try:
        commit = everstep.load(folder / "commits")
    except NoCommit:  # the recipe has the checkpoints of its library
        return Ended(0, {}, output, folder)
    return Ended(commit.step, commit.state, output, folder)


def kill(name: str, first: int, last: int, workers: int = 3) -> str:
    """A worker's death, for `disturbed`: in a step of `first`..`last`, the same for a recipe's name each time."""
    chance = random.Random(name)
    return f"{chance.randint(first, last)}:kill={chance.randrange(workers)}"


def script(name: str, file: str = "train.py") -> ModuleType:
    """examples/NAME/FILE as a module; its `main` does not run."""
    spec = importlib.util.spec_from_file_location(f"{name}_{Path(file).stem}", EXAMPLES / name / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(EXAMPLES / name))  # for what the script imports from its folder
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES / name))
    return module


def differences(left: Ended, right: Ended, only: Sequence[str] = ()) -> list[str]:
    """Where two runs did not end alike, bit by bit; nothing where they did. What a script tracks counts, or of it what
    `only` names."""
    found: list[str] = []
    if left.step != right.step:
        found.append(f"step {left.step} and {right.step}")
    names = only or [name for name in left.state.keys() | right.state.keys() if name not in OWN]
    mine, others = ({k: v for k, v in ended.state.items() if k in names} for ended in (left, right))
    assert mine, f"nothing to compare: {list(left.state)}"
    compare("", mine, others, found)
    return found


def accuracy(name: str, parameters: Mapping[str, Any]) -> float:
    """The share of the unseen digits that a recipe's `network()` knows with these parameters."""
    train = script(name)
    x, y = train.digits()
    model = train.network().eval()
    model.load_state_dict(parameters)
    with torch.no_grad():
        right: torch.Tensor = model(x[train.TRAIN :]).argmax(1) == y[train.TRAIN :]
    return right.float().mean().item()


def _script(name: str) -> Path:
    folder, _, file = name.partition("/")
    return EXAMPLES / folder / (file or "train.py")


def _environment(folder: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EVERSTEP_CHECKPOINT", "PET_"))}
    return kept | {"EVERSTEP_CHECKPOINT_URL": str(folder / "commits"), "OMP_NUM_THREADS": "1"}
