"""Each recipe once more, longer: workers are killed again and again, and the run ends as the undisturbed one."""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.recipes.recipes import differences, disturbed, undisturbed

KILLS = int(os.environ.get("EVERSTEP_KILLS", "4"))
SEED = int(os.environ.get("EVERSTEP_SEED", "0"))
APART = 25  # steps between two kills, so that the second one meets a world that trains


@dataclass(frozen=True, slots=True)
class Long:
    """What the recipe's script is given beside the steps, its workers, and what is compared (all that is tracked).
    `step`: what the script calls one."""

    arguments: tuple[str, ...] = ()
    workers: int = 3
    compared: tuple[str, ...] = ()
    step: str = "step"


RECIPES = {
    "ddp": Long(),
    "easgd": Long(step="period"),
    "gpt": Long(),
    "hf_trainer": Long(compared=("model", "optimizer", "scheduler")),
    "moe": Long(workers=4),
    "pipeline": Long(("--schedule", "interleaved"), workers=4),
    "zero": Long(("--stage", "2"), workers=4),
}


@pytest.mark.long
@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("name", RECIPES)
def test_many_killed_workers_leave_no_trace(tmp_path: Path, name: str) -> None:
    recipe, chance = RECIPES[name], random.Random(f"{name} {SEED}")
    steps = APART * (KILLS + 2)
    arguments = (f"--{recipe.step}s", str(steps), f"--every-{recipe.step}s", "20", *recipe.arguments)
    at = [
        f"{APART * (n + 1) + chance.randrange(APART // 2)}:kill={chance.randrange(recipe.workers)}"
        for n in range(KILLS)
    ]
    calm = undisturbed(name, tmp_path / "calm", arguments, recipe.workers)
    hit = disturbed(name, tmp_path / "hit", arguments, recipe.workers, at)
    replay = f"EVERSTEP_SEED={SEED} EVERSTEP_KILLS={KILLS}: {' '.join(at)}\n{hit.output[-3000:]}"
    assert len(re.findall(r"^ +[\d.]+ s +kill ", hit.output, re.MULTILINE)) == KILLS, replay
    assert hit.status()["restarts"] >= 1, replay  # losses that are close together are charged once
    assert differences(calm, hit, recipe.compared) == [], replay
