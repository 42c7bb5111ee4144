"""The Python client against a real API server. No node runs here: the tests write what an operator would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep.client import ClusterUnavailable, InvalidRequest, JobFailed, JobNotFound, TrainingClient, WaitTimeout
from everstep.contract import labels
from support.apiserver.jobs import Jobs
from support.scenarios.player import wait_for


@pytest.fixture
def client(jobs: Jobs) -> TrainingClient:
    return TrainingClient(namespace=jobs.namespace, kubeconfig=jobs.control_plane.kubeconfig)


def train(steps: int) -> None:
    print(steps)


def write_status(jobs: Jobs, name: str, reason: str, **conditions: str) -> None:
    """What an operator would write."""
    ready = {"type": "Ready", "status": "True", "reason": reason, "message": "as it is"}
    all_ = [
        ready,
        *({"type": type_, "status": "True", "reason": why, "message": ""} for type_, why in conditions.items()),
    ]
    generation = jobs.get(name)["metadata"]["generation"]
    status = {
        "observedGeneration": generation,
        "conditions": [{**each, "lastTransitionTime": "2026-01-01T00:00:00Z"} for each in all_],
    }
    done = jobs.kubectl(
        "patch", f"tjob/{name}", "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})
    )
    assert done.returncode == 0, done.stderr


def test_a_function_becomes_a_job_with_a_config_map_that_it_owns(jobs: Jobs, client: TrainingClient) -> None:
    job = client.train(
        function=train, args={"steps": 3}, name="sent", workers=2, elastic=(1, 4), env={"A": 1},
        resources={"cpu": 1, "gpu": 2}, checkpoint="s3://bucket/sent", secret="s3-credentials",
    )  # fmt: skip
    assert (job.name, job.namespace, job.status, job.ended) == ("sent", jobs.namespace, "Pending", False)
    stored = jobs.get("sent")
    pod = stored["spec"]["template"]["spec"]
    name = pod["volumes"][0]["configMap"]["name"]
    kept = json.loads(jobs.kubectl("get", f"configmap/{name}", "-o", "json").stdout)
    assert kept["immutable"] is True
    assert kept["data"]["train.py"].endswith('if __name__ == "__main__":\n    train(steps=3)\n')
    (owner,) = kept["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == (labels.KIND, "sent", stored["metadata"]["uid"])
    assert [each.name for each in client.list_jobs()] == ["sent"]
    with pytest.raises(InvalidRequest, match='"sent" already exists'):
        client.train(function=train, args={"steps": 3}, name="sent")
    maps = jobs.kubectl("get", "configmap", "-l", f"{labels.JOB}=sent", "-o", "name").stdout.split()
    assert maps == [f"configmap/{name}"]


def test_a_job_is_waited_for_changed_and_deleted(jobs: Jobs, client: TrainingClient) -> None:
    jobs.create("waited", {"elastic.minReplicas": 1, "elastic.maxReplicas": 4})
    with pytest.raises(WaitTimeout, match=r"Complete: not within 0.2 s: Pending"):
        client.wait_for_job_status("waited", timeout=0.2)
    write_status(jobs, "waited", "Running")
    assert client.wait_for_job_status("waited", {"Running", "Failed"}, timeout=5).message == "as it is"
    client.scale("waited", 3)
    assert jobs.get("waited")["spec"]["replicas"] == 3
    with pytest.raises(InvalidRequest, match=r"replicas|maxReplicas"):
        client.scale("waited", 9)
    client.suspend("waited", timeout=0)
    assert jobs.get("waited")["spec"]["suspend"] is True
    with pytest.raises(WaitTimeout, match="Running: not within"):
        client.resume("waited", timeout=0.2)  # the status is about the spec as it was before
    write_status(jobs, "waited", "Failed", Failed="RestartBudgetExhausted")
    with pytest.raises(JobFailed, match="waited has ended: Failed: as it is"):
        client.wait_for_job_status("waited", timeout=5)
    with pytest.raises(InvalidRequest, match="has no worker 0; it has none yet"):
        client.get_job_logs("waited")
    assert list(client.get_job_logs("waited", follow=True)) == []
    with pytest.raises(InvalidRequest, match="no ranks are known"):
        client.get_job_logs("waited", rank=0)
    assert client.get_job_events("waited") == ()
    client.delete_job("waited")
    wait_for("the job is gone", lambda: not jobs.exists("waited"), 30)
    with pytest.raises(JobNotFound, match="no job 'waited' in namespace"):
        client.get_job("waited")


def test_what_the_cluster_refuses_leaves_nothing_behind(jobs: Jobs, client: TrainingClient, tmp_path: Path) -> None:
    other = TrainingClient(namespace="none-of-that-name", kubeconfig=jobs.control_plane.kubeconfig)
    with pytest.raises(InvalidRequest, match='namespaces "none-of-that-name" not found'):
        other.train(function=train, args=[1])
    with pytest.raises(InvalidRequest, match="replicas"):
        client.create_job(
            {
                "apiVersion": labels.API_VERSION,
                "kind": labels.KIND,
                "metadata": {"name": "bad"},
                "spec": {"replicas": -1},
            }
        )
    # Who may create jobs and no ConfigMaps has neither afterwards.
    rules = [{"apiGroups": [labels.GROUP], "resources": [labels.PLURAL], "verbs": ["*"]}]
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": jobs.namespace}
    role: dict[str, Any] = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "jobs-alone"}}
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "jobs-alone"}
    for body in (
        {**role, "kind": "Role", "rules": rules},
        {**role, "kind": "RoleBinding", "subjects": [subject], "roleRef": ref},
    ):
        done = jobs.kubectl("create", "-f", "-", input=json.dumps(body))
        assert done.returncode == 0, done.stderr
    settings = yaml.safe_load(Path(jobs.control_plane.kubeconfig).read_text())
    token = jobs.kubectl("create", "token", "default").stdout.strip()
    settings["users"] = [{"name": user["name"], "user": {"token": token}} for user in settings["users"]]
    (tmp_path / "weak").write_text(yaml.safe_dump(settings))
    weak = TrainingClient(namespace=jobs.namespace, kubeconfig=tmp_path / "weak")
    with pytest.raises(ClusterUnavailable, match=r"you may not do that in namespace .*configmaps") as caught:
        weak.train(function=train, args=[1], name="taken-back")
    assert caught.value.__suppress_context__
    wait_for("the job is taken back", lambda: not jobs.exists("taken-back"), 30)
