"""examples/deepspeed on a cluster with nodes: its image, and a claim that all workers write to.

The run that it is compared with, and the comparison, are made in the same image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from support import TESTS
from support.e2e.driver import Job
from support.recipes.recipes import EXAMPLES
from support.recipes.recorded import record
from testcluster import project
from testcluster.handle import Cluster
from testcluster.proc import run

NAME = "deepspeed"
EPOCHS, STEPS = 20, 20 * 38  # 1,797 images, 48 a step, the last of an epoch with less
KILLED = 100  # the step from which on a worker is killed; the first checkpoint is that of step 20
COMPARE = "/tests/recipes/programs/deepspeed_checkpoints.py"


@pytest.fixture
def image(kind_cluster: Cluster) -> str:
    if kind_cluster.external:
        return project.DEEPSPEED  # the cluster pulls it
    tag = project.deepspeed()
    kind_cluster.load(tag)
    return tag


@pytest.fixture
def claimed(new_job: Callable[..., Job]) -> Iterator[tuple[Job, str, str]]:
    """A job, and its claim: the node and the folder of the volume."""
    job = new_job(NAME)
    node, *_ = job.node_names()
    folder = f"/var/lib/everstep-claims/{job.namespace}"
    run("docker", "exec", node, "mkdir", "-p", folder)
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    here = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}
    volume = {
        "capacity": {"storage": "1Gi"}, "local": {"path": folder},
        "claimRef": {"namespace": job.namespace, "name": "checkpoints"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [here]}}, **common,
    }  # fmt: skip
    claim = {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": job.namespace, **common}
    objects = ("PersistentVolume", job.namespace, volume), ("PersistentVolumeClaim", "checkpoints", claim)
    for kind, name, spec in objects:
        job.submit({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec})
    yield job, node, folder
    job.cluster.kubectl("delete", "pv", job.namespace, "--wait=false")


@pytest.mark.kind
@pytest.mark.long
def test_killed_pod_leaves_no_trace_in_the_last_checkpoint(
    image: str, claimed: tuple[Job, str, str], tmp_path: Path
) -> None:
    job, node, folder = claimed
    made = yaml.safe_load((EXAMPLES / NAME / "job.yaml").read_text())
    made["metadata"]["name"] = job.name
    worker = made["spec"]["template"]["spec"]["containers"][0]
    worker["resources"]["requests"] = {"cpu": "50m", "memory": "200Mi"}
    job.workers = made["spec"]["replicas"]
    job.submit(made)
    job.until_step(KILLED)
    job.kill_torchrun(1)
    job.until_complete()
    job.expect_restarts("total", 1)
    assert job.reached("progress.step") == STEPS, job.describe()

    run("docker", "cp", f"{node}:{folder}/deepspeed", str(tmp_path / "hit"))
    first = tmp_path / "hit" / "global_step20" / "mp_rank_00_model_states.pt"
    assert first.stat().st_mtime < job.injected_at, "the run has begun anew, and saved this step again"

    calm = ("everstep-run", "--standalone", "--nproc-per-node", str(job.workers), "train.py", "--epochs", str(EPOCHS))
    in_image(image, tmp_path, *calm, "--save_dir", "/runs/calm")
    printed = in_image(image, tmp_path, "python", COMPARE, "/none", "/runs/calm", "/runs/hit")
    assert f"steps {STEPS} and {STEPS}" in printed, printed
    changed = re.findall("differs: .*", printed)
    record(NAME, "values that the kill of a pod changes, on kind, ZeRO 2", len(changed), "")
    assert changed == []


def in_image(image: str, runs: Path, *command: str) -> str:
    """The output of a command in the example's folder of the image, without a network."""
    mounts = ("-v", f"{runs}:/runs", "-v", f"{TESTS}:/tests:ro")
    settings = ("-e", "OMP_NUM_THREADS=1", "-e", "PYTHONPATH=/tests", "-e", "PYTHONDONTWRITEBYTECODE=1")
    where = ("--rm", "--user", "0", "--network", "none", "-w", "/workspace/deepspeed")
    return run("docker", "run", *where, *mounts, *settings, image, *command, timeout=300)
