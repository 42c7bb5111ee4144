"""`everstep rerun` on a cluster with nodes: a script that failed is mended, and its job goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.commands import caller
from support.e2e.driver import Job
from support.scenarios.lines import Asked

pytestmark = [pytest.mark.long, pytest.mark.kind]

SCRIPT = """
import torch

import everstep

with everstep.start() as run:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(torch.utils.data.TensorDataset(torch.ones(400, 2)), global_batch=4)
    for step in run.steps(loader, until=40):
        with step as batch:
            (x,) = batch.data
            batch.scale(model(x).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        print("step", run.step, flush=True)
"""
FAULT = """
        if run.step == 25:
            raise OSError("the disk is full")
"""


def steps(job: Job) -> dict[str, list[int]]:
    """Which each pod of the job printed."""
    return {
        pod: [int(line.split()[1]) for line in log.splitlines() if line.startswith("step ")]
        for pod, log in job.logs().items()
    }


def give(job: Job, folder: Path, text: str) -> str:
    """The script's path in pods that begin from now on."""
    script = folder / "train.py"
    script.write_text(text)
    return job.script_path(script)


def test_failed_job_whose_script_is_mended_goes_on_from_its_commit_and_keeps_its_history(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    job = new_job()
    call = caller("-n", job.namespace, "--kubeconfig", str(job.cluster.kubeconfig))
    manifest = job.manifest(Asked(2, 0, 0.0, 10, launcher="everstep-run", script="ledger"))
    manifest["spec"]["recovery"] = {"maxRestarts": 0}
    manifest["spec"]["template"]["spec"]["containers"][0]["command"] = [
        "everstep-run", give(job, tmp_path, SCRIPT + FAULT),
    ]  # fmt: skip
    job.submit(manifest)
    job.until_condition("Failed")
    failed = job.status()
    before = steps(job)
    assert max(made[-1] for made in before.values()) == 25

    give(job, tmp_path, SCRIPT)
    assert call("rerun", job.name).startswith(f"{job.name}: runs again (")
    job.until_complete()
    printed = steps(job)
    assert not before.keys() & printed.keys(), "the pods of the earlier run are gone, and no name is used again"
    first = min(made[0] for made in printed.values())
    assert first in (11, 21), "a script that ends by an error does not wait for its last save"
    assert list(printed.values()) == [list(range(first, 41))] * 2
    status = job.status()
    (run,) = status["history"]
    assert run["endedAt"] == failed["completionTime"]
    assert (run["rerun"], run["outcome"]) == (0, "RestartBudgetExhausted")
    assert run.get("committedStep") in (None, first - 11, first - 1), "the end may come before the newest is reported"
    assert "OSError: the disk is full" in run["message"]
    assert (status["rerun"], status["restarts"]["total"], status.get("failure")) == (1, 0, None)
    assert "JobRerun" in [row["reason"] for row in json.loads(call("events", job.name, "-o", "json"))]
    assert "earlier run: RestartBudgetExhausted at step" in call("status", job.name)
    job.verify_commits()


def test_recoveries_of_a_rerun_are_its_own_and_rounds_go_on(new_job: Callable[..., Job]) -> None:
    job = new_job()
    call = caller("-n", job.namespace, "--kubeconfig", str(job.cluster.kubeconfig))
    manifest = job.elastic(steps=300, pause=0.05)
    job.submit(manifest)
    job.until_step(20)
    job.delete_pod(1)
    job.until_recovered()
    job.until_complete()
    before = job.status()
    assert before["recoveries"]
    edit = {"spec": {"rerun": 1, "checkpoint": {"url": f"{job.url}-again"}}}
    job.kubectl("patch", "tjob", job.name, "--type=merge", "-p", json.dumps(edit))
    job.wait("the rerun trains", lambda: job.status().get("rerun") == 1 and job.reached("progress.step") >= 20)
    job.kill_process(0)
    job.until_recovered()
    status = job.status()
    assert [each["cause"] for each in status["recoveries"]] == ["Signaled"]
    assert status["world"]["round"] > before["world"]["round"]
    call("delete", job.name)
