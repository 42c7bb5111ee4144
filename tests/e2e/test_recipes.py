"""Recipes of examples/ on a cluster with nodes: pods are killed, and the run ends as an undisturbed one here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import everstep
from support.e2e.driver import Job, newness
from support.recipes.recipes import EXAMPLES, Ended, accuracy, differences, undisturbed
from support.recipes.recorded import record
from support.recipes.roles import played

EVERY = 100  # steps between commits


@dataclass(frozen=True, slots=True)
class Recipe:
    """`arguments` make the run so long that the kill comes in the middle. `compared` is of the state; empty: all
    that is tracked. The undisturbed run here also gets the arguments `here`, and `through` runs its script."""

    arguments: tuple[str, ...]
    compared: tuple[str, ...] = ()
    every: int = EVERY
    here: tuple[str, ...] = ()
    through: tuple[Path, ...] = ()


RECIPES = {
    "ddp": Recipe(("--steps", "1500")),
    "zero": Recipe(("--steps", "60"), every=15),  # its steps are slow
    "pipeline": Recipe(("--steps", "800")),
    "moe": Recipe(("--steps", "800")),
    # The text that the Trainer learns is the script itself: other files differ between the image and this machine.
    "hf_trainer": Recipe(("--steps", "300", "--text", "train.py"), ("model", "optimizer", "scheduler")),
}
LONG = {
    "accelerate": Recipe(("--epochs", "40"), here=("--cpu",)),
    "lightning": Recipe(
        ("--max_epochs", "40"),
        ("model", "optimizer_0", "scheduler_0", "loops"),  # the callbacks' state names their own folder
        here=("--accelerator", "cpu", "--devices", "3"),
    ),
    "horovod": Recipe(("--epochs", "80"), through=(Path("-m"), Path("everstep_horovod"))),
}


def manifest(name: str, job: Job, arguments: tuple[str, ...], every: int = EVERY) -> dict[str, Any]:
    """The recipe's own job.yaml, at a constant size: only then the bits are those of the undisturbed run."""
    made: dict[str, Any] = yaml.safe_load((EXAMPLES / name / "job.yaml").read_text())
    made["metadata"]["name"] = job.name
    spec = made["spec"]
    spec["checkpoint"].update(url=job.url, everySteps=every)
    spec["elastic"] |= {"minReplicas": spec["replicas"], "maxReplicas": spec["replicas"]}
    worker = spec["template"]["spec"]["containers"][0]
    worker["command"] += arguments
    worker["resources"]["requests"] = {"cpu": "50m", "memory": "200Mi"}
    one_thread = {"name": "OMP_NUM_THREADS", "value": "1"}  # as the run that is compared: other sums come of more
    worker["env"] = [one_thread, *(v for v in worker.get("env", ()) if v["name"] != one_thread["name"])]
    return made


def ended(job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ended:
    """The state in the job's last commit."""
    for variable, value in job.storage_environment().items():
        monkeypatch.setenv(variable, value)
    commit = everstep.load(job.url)
    return Ended(commit.step, commit.state, "", folder)


@pytest.mark.long
@pytest.mark.kind
@pytest.mark.parametrize("name", [*RECIPES, *LONG])
def test_recipe_with_a_killed_pod_ends_with_the_bits_of_an_undisturbed_run(
    name: str, new_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = (RECIPES | LONG)[name]
    job = new_job(name.replace("_", "-"))
    made = manifest(name, job, recipe.arguments, recipe.every)
    workers = job.workers = made["spec"]["replicas"]
    job.submit(made)
    job.until_step(recipe.every, "checkpoint.lastCommittedStep")
    job.kill_torchrun(1)
    job.until_recovered()
    job.until_complete()
    job.expect_restarts("total", 1)

    here = [str(EXAMPLES / name / part) if part == "train.py" else part for part in (*recipe.arguments, *recipe.here)]
    every = {"EVERSTEP_CHECKPOINT_EVERY_STEPS": str(recipe.every)}
    calm = undisturbed(name, tmp_path, here, workers, recipe.through, **every)
    changed = differences(calm, ended(job, tmp_path, monkeypatch), recipe.compared)
    record(name, "values that the kill of a pod changes, on kind", len(changed), "")
    assert changed == [], job.describe()


def kill_both_roles(job: Job, made: Mapping[str, Any]) -> None:
    """A worker is killed, and then the process that it works for: each after a new commit."""
    job.workers = made["spec"]["replicas"]
    job.submit(dict(made))
    for index in (1, 0):
        job.until_step(job.reached("checkpoint.lastCommittedStep") + 1, "checkpoint.lastCommittedStep")
        job.kill_torchrun(index)
    job.until_complete()
    # Restarts cannot tell: two losses within a short time are charged once.
    assert [newness(job.pod(index)) > [0, 0] for index in (1, 0)] == [True, True], job.describe()


@pytest.mark.kind
@pytest.mark.long
def test_rl_with_killed_pods_of_both_roles_ends_with_the_bits_of_an_undisturbed_run(
    new_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, arguments = new_job("rl"), ("--steps", "2160")
    kill_both_roles(job, manifest("rl", job, arguments))
    calm, _ = played("rl", tmp_path, (*arguments, "--every-steps", str(EVERY)), 3)
    changed = differences(calm, ended(job, tmp_path, monkeypatch))
    record("rl", "values that the kill of a pod of each role changes, on kind", len(changed), "")
    assert changed == [], job.describe()


@pytest.mark.kind
@pytest.mark.long
def test_async_ps_with_killed_pods_of_both_roles_loses_no_accuracy(
    new_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits differ from run to run, because the order of gradients does."""
    job, arguments = new_job("async-ps"), ("--steps", "5000")
    kill_both_roles(job, manifest("async_ps", job, arguments))
    calm, _ = played("async_ps", tmp_path, (*arguments, "--every-steps", str(EVERY)), 4)
    hit = ended(job, tmp_path, monkeypatch)
    assert hit.step == calm.step
    undisturbed_one, reached = (accuracy("async_ps", one.state["model"]) for one in (calm, hit))
    record("async_ps", "accuracy with killed pods of both roles, on kind", reached, "")
    assert reached > undisturbed_one - 0.05 > 0.75
