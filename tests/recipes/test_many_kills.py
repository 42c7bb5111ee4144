"""Each recipe once more, longer: workers are killed again and again, and the run ends as the undisturbed one.

examples/digits is killed at a hundred moments in tests/run/test_run_robust.py; examples/deepspeed and examples/slurm
have their long tests in their own files. EVERSTEP_SEED and EVERSTEP_KILLS choose other moments and more of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.recipes.kills import several
from support.recipes.recipes import PROGRAMS, Ended, accuracy, differences, disturbed, script, undisturbed
from support.recipes.roles import played

KILLS = int(os.environ.get("EVERSTEP_KILLS", "4"))
SEED = int(os.environ.get("EVERSTEP_SEED", "0"))
EVERY = 15  # steps between two commits
LIMIT = 140 + 60 * KILLS  # seconds that a run may take, on a machine with other work


def shards(folder: Path) -> Sequence[str]:
    """examples/streaming reads these."""
    script("streaming", "shards.py").main(folder / "shards")
    return "--shards", f"file://{folder / 'shards'}", "--cache", str(folder / "cache")


def weights(folder: Path) -> Sequence[str]:
    """examples/finetune begins with those of examples/gpt."""
    torch.manual_seed(1)
    save_file(script("gpt").Transformer().state_dict(), folder / "model.safetensors")
    return "--base", str(folder / "model.safetensors")


def output(folder: Path) -> Sequence[str]:
    return "--default_root_dir", str(folder)


@dataclass(frozen=True, slots=True)
class Long:
    """Arguments of the recipe's script beside its length, its workers, and what is compared (all that is tracked).

    `length`: the option for it, and how many steps one of it has; `ranks`: of a worker; `made`: makes files in a
    folder, and says the arguments for them; `through`: as for `disturbed`; `alone`: arguments without a job; `module`:
    what runs the script, which the job says itself; `rounding`: how far a parameter may be from that of one process;
    `free`: places at which the runs may differ; `apart`: steps between two kills.
    """

    arguments: tuple[str, ...] = ()
    workers: int = 3
    ranks: int = 1
    compared: tuple[str, ...] = ()
    length: tuple[str, int] = ("--steps", 1)
    made: Callable[[Path], Sequence[str]] | None = None
    alone: tuple[str, ...] = ()
    through: tuple[Path, ...] = ()
    module: tuple[Path, ...] = ()
    rounding: float = 0.0
    free: str = "nowhere"
    apart: int = 16


RECIPES = {
    "accelerate": Long(("--cpu",), length=("--epochs", 30)),
    "activation_checkpointing": Long(),
    "amp": Long(("--scale", str(2.0**22), "--growth", "4"), through=(PROGRAMS / "overflow.py",)),
    "comm_hooks": Long(("--average-every", "1")),
    "context_parallel": Long(workers=2, ranks=2),
    "ddp": Long(),
    "dtensor_mesh": Long(workers=2, ranks=2),
    "easgd": Long(length=("--periods", 1)),
    "evaluate": Long(),
    "fedavg": Long(length=("--rounds", 1)),
    "finetune": Long(made=weights),
    "gpt": Long(),
    # Shares follow measured times, so sums are made in another order; the gradient is the same.
    "heterogeneous": Long(compared=("model",), rounding=1e-3),
    "heterogeneous/backup.py": Long(workers=4),
    "hf_trainer": Long(compared=("model", "optimizer", "scheduler")),
    "horovod": Long(length=("--epochs", 15), module=(Path("-m"), Path("everstep_horovod"))),
    "large_batch": Long(),
    "layerwise": Long(workers=2, ranks=2),
    # The callbacks' state names their own folder.
    "lightning": Long(
        ("--accelerator", "cpu"),
        compared=("model", "optimizer_0", "scheduler_0", "loops"),
        length=("--max_epochs", 30),
        made=output,
        alone=("--devices", "3"),
    ),
    "local_sgd": Long(length=("--rounds", 1)),
    "moe": Long(workers=4),
    "pipeline": Long(("--schedule", "interleaved"), workers=4),
    "resnet": Long(free="running_"),  # where rank 0 is lost, as tests/recipes/test_resnet.py says
    "sequence_parallel": Long(workers=2, ranks=2),
    "streaming": Long(made=shards),
    "tensor_parallel": Long(workers=4),
    "three_d": Long(workers=4, ranks=2),
    "zero": Long(("--stage", "2"), workers=4),
}


def kills(name: str, workers: int, apart: int) -> tuple[list[str], int]:
    """The kills of a recipe, and how many steps its run has."""
    at = several(f"{name} {SEED}", KILLS, workers, apart)
    return at, int(at[-1].partition(":")[0]) + apart


def struck(hit: Ended, at: Sequence[str], workers: int) -> str:
    """How to repeat the kills `at`. All of them have happened."""
    replay = f"EVERSTEP_SEED={SEED} EVERSTEP_KILLS={KILLS}: {' '.join(at)}\n{hit.output[-3000:]}"
    expected = sum(workers if one.endswith("=all") else 1 for one in at)
    assert len(re.findall(r"^ +[\d.]+ s +kill ", hit.output, re.MULTILINE)) >= expected, replay
    return replay


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("name", RECIPES)
def test_many_killed_workers_leave_no_trace(tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    at, steps = kills(name, recipe.workers, recipe.apart)
    option, per = recipe.length
    arguments = (option, str(-(-steps // per)), *recipe.arguments, *(recipe.made(tmp_path) if recipe.made else ()))
    ranks = 1 if recipe.rounding else recipe.workers * recipe.ranks
    calm = undisturbed(name, tmp_path / "calm", (*arguments, *recipe.alone), ranks, (*recipe.through, *recipe.module))
    hit = disturbed(name, tmp_path / "hit", arguments, recipe.workers, at, recipe.through, every=EVERY, seconds=LIMIT)
    replay = struck(hit, at, recipe.workers)
    if recipe.rounding:
        assert hit.step == calm.step, replay
        assert furthest(calm, hit) < recipe.rounding, replay
    else:
        found = [where for where in differences(calm, hit, recipe.compared) if recipe.free not in where]
        assert found == [], replay


ROLES = {"async_ps": Long(apart=150), "rl": Long(apart=40)}


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("name", ROLES)
def test_many_killed_roles_leave_no_trace(tmp_path: Path, name: str) -> None:
    """The first process among them. What async_ps trains depends on which worker is first: it loses no accuracy."""
    recipe = ROLES[name]
    at, steps = kills(name, recipe.workers, recipe.apart)
    calm, _ = played(name, tmp_path / "calm", (recipe.length[0], str(steps)), recipe.workers)
    arguments = (recipe.length[0], str(steps))
    hit = disturbed(name, tmp_path / "hit", arguments, recipe.workers, at, elastic="2:3", every=EVERY, seconds=LIMIT)
    # A worker that is being replaced when all are killed has no process.
    replay = struck(hit, at, 1)
    assert hit.step == calm.step == steps, replay
    if name == "async_ps":
        assert sum(hit.state["staleness"].values()) == steps, replay
        assert accuracy(name, hit.state["model"]) > accuracy(name, calm.state["model"]) - 0.05, replay
    else:
        assert differences(calm, hit) == [], replay


def furthest(left: Ended, right: Ended) -> float:
    mine, others = (
        {name.removeprefix("inner."): value for name, value in ended.state["model"].items()} for ended in (left, right)
    )
    assert mine.keys() == others.keys()
    return max(float((mine[name] - others[name]).abs().max()) for name in mine)
