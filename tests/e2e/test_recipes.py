"""Five recipes of examples/ on a cluster with nodes: a pod is killed, and the run ends as an undisturbed one here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import everstep
from support.e2e.driver import Job
from support.recipes.recipes import EXAMPLES, Ended, differences, undisturbed
from support.recipes.recorded import record

# By recipe: its arguments, long enough that the kill comes in the middle, and what is compared (all that is tracked).
# The text that the Trainer learns is the script itself: other files differ between the image and this machine.
RECIPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ddp": (("--steps", "1500"), ()),
    "zero": (("--steps", "800"), ()),
    "pipeline": (("--steps", "800"), ()),
    "moe": (("--steps", "800"), ()),
    "hf_trainer": (("--steps", "300", "--text", "train.py"), ("model", "optimizer", "scheduler")),
}
EVERY = 100  # steps between commits


def manifest(name: str, job: Job, arguments: tuple[str, ...]) -> dict[str, Any]:
    """The recipe's own job.yaml, at a constant size: only then the bits are those of the undisturbed run."""
    made: dict[str, Any] = yaml.safe_load((EXAMPLES / name / "job.yaml").read_text())
    made["metadata"]["name"] = job.name
    spec = made["spec"]
    spec["checkpoint"].update(url=job.url, everySteps=EVERY)
    spec["elastic"] |= {"minReplicas": spec["replicas"], "maxReplicas": spec["replicas"]}
    worker = spec["template"]["spec"]["containers"][0]
    worker["command"] += arguments
    worker["resources"]["requests"] = {"cpu": "50m", "memory": "200Mi"}
    one_thread = {"name": "OMP_NUM_THREADS", "value": "1"}  # as the run that is compared: other sums come of more
    worker["env"] = [one_thread, *(v for v in worker.get("env", ()) if v["name"] != one_thread["name"])]
    return made


@pytest.mark.kind
@pytest.mark.turns(4)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_with_a_killed_pod_ends_with_the_bits_of_an_undisturbed_run(
    name: str, new_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, compared = RECIPES[name]
    job = new_job(name.replace("_", "-"))
    made = manifest(name, job, arguments)
    workers = job.workers = made["spec"]["replicas"]
    job.submit(made)
    job.until_step(EVERY, "checkpoint.lastCommittedStep")
    job.kill_torchrun(1)
    job.until_recovered()
    job.until_complete()
    job.expect_restarts("total", 1)

    here = tuple(str(EXAMPLES / name / a) if a == "train.py" else a for a in arguments)
    calm = undisturbed(name, tmp_path, (*here, "--every-steps", str(EVERY)), workers)
    for variable, value in job.storage_environment().items():
        monkeypatch.setenv(variable, value)
    loaded = everstep.load(job.url)
    changed = differences(calm, Ended(loaded.step, loaded.state, "", tmp_path), compared)
    record(name, "values that the kill of a pod changes, on kind", len(changed), "")
    assert changed == [], job.describe()
