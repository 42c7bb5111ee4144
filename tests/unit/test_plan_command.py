"""`everstep plan`: what it prints is the planner's decision, and what it keeps in a file is what it planned on."""

from __future__ import annotations

import json
import re
import shlex
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from everstep.cli.main import app
from everstep.contract.labels import SPEC_HASH
from everstep_local.plan import saved_snapshot
from everstep_local.plan.saved_snapshot import FORMAT, JobObjects, SnapshotError
from everstep_operator.api.parse import parse_spec
from everstep_operator.plan.state import pod_hash

TRANSCRIPTS = Path(__file__).with_name("transcripts")
PAGE = Path(__file__).parents[2] / "docs/reference/cli-plan.md"
SECRET = "hunter2-wandb-key"
OWNER = {"apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "name": "digits", "uid": "job-1"}
OWNED = [{**OWNER, "controller": True}]


def meta(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "namespace": "ml", "uid": f"uid-{name}", "resourceVersion": "7", **more}


def pod(index: int, status: dict[str, Any]) -> dict[str, Any]:
    labels = {"everstep.dev/worker-index": str(index), "everstep.dev/incarnation": "0"}
    return {
        "metadata": meta(f"digits-w{index}-0", labels=labels, ownerReferences=OWNED),
        "spec": {"nodeName": f"n{index}"},
        "status": status,
    }


RUNS = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
FAILED = {
    "phase": "Failed",
    "containerStatuses": [
        {"name": "worker", "state": {"terminated": {"exitCode": 137, "reason": "Error", "message": f"key={SECRET}"}}}
    ],
}


def lost_worker() -> dict[str, Any]:
    """A job of two workers that trained; worker 1 has just been killed."""
    container = {
        "name": "worker",
        "image": "train:1",
        "command": ["everstep-run", "train.py"],
        "env": [{"name": "WANDB", "value": SECRET}],
    }
    return {
        "format": FORMAT,
        "takenAt": "2026-01-01T00:10:00Z",
        "job": {
            "metadata": {
                **meta("digits", creationTimestamp="2026-01-01T00:00:00Z", annotations={"whole": SECRET}),
                "uid": "job-1",
            },
            "spec": {
                "replicas": 2,
                "elastic": {"minReplicas": 1, "maxReplicas": 2},
                "template": {"spec": {"containers": [container]}},
            },
            "status": {
                "startTime": "2026-01-01T00:00:00Z",
                "world": {"round": 1, "size": 2, "formedRound": 1, "formedAt": "2026-01-01T00:00:09Z"},
                "roster": {
                    "wanted": 2,
                    "nextIncarnation": 1,
                    "workers": [{"first": 0, "last": 1, "incarnation": 0, "started": True}],
                },
            },
        },
        "pods": [pod(0, RUNS), pod(1, FAILED)],
        "nodes": [
            {"metadata": {"name": f"n{i}"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
            for i in (0, 1)
        ],
        "service": {"metadata": meta("digits-workers", ownerReferences=OWNED)},
    }


def everstep(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    path = tmp_path / "kept.json"
    path.write_text(json.dumps(lost_worker()))
    return path


def test_lost_worker_of_a_kept_snapshot_is_replaced_with_the_reason_of_each_step(kept: Path) -> None:
    done = everstep("--snapshot", kept)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "TrainingJob ml/digits at 2026-01-01T00:10:00Z"
    assert "  pod digits-w1-0: Failed, on node n1, exit code 137 (Error)" in lines
    steps = "\n".join(lines)
    assert "publish the workers 0@0 1@1, each as index@incarnation" in steps
    assert "delete pod digits-w1-0 grace=0s (it was replaced) [clear]" in steps
    assert "create pod digits-w1-1 (worker 1) [create" in steps
    assert "record event Warning WorkerLost: worker 1 on n1 lost (Signaled): ended by signal 9" in steps
    assert (
        steps.index("write the status") < steps.index("delete pod") < steps.index("create pod") < steps.index("record")
    )


def test_suspended_job_gets_no_pods_and_the_reason_names_the_field(tmp_path: Path) -> None:
    body = lost_worker()
    body["job"]["spec"]["suspend"] = True
    body["job"]["status"] = {}
    body["pods"] = []
    (tmp_path / "kept.json").write_text(json.dumps(body))
    done = everstep("--snapshot", tmp_path / "kept.json", "-o", "json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.output)
    assert "spec.suspend is true" in said["reason"]
    assert not [action for stage in said["stages"] for action in stage["actions"] if "create pod" in action]


@pytest.mark.parametrize("marked", ["unmarked", "present", "older"])
def test_file_that_save_writes_plans_the_same_and_holds_no_secret(marked: str, tmp_path: Path) -> None:
    body, kept, again = lost_worker(), tmp_path / "kept.json", tmp_path / "again.json"
    if marked != "unmarked":
        present = pod_hash.of_spec(parse_spec(body["job"]["spec"]))
        for one in body["pods"]:
            one["metadata"]["labels"][SPEC_HASH] = present if marked == "present" else "another"
    kept.write_text(json.dumps(body))
    saved_snapshot.save(saved_snapshot.load(kept), again)
    assert SECRET not in again.read_text()
    assert stat.S_IMODE(again.stat().st_mode) == 0o600
    before, after = everstep("--snapshot", kept), everstep("--snapshot", again)
    assert before.output == after.output
    assert ("made from an older spec" in after.output) == (marked == "older")
    assert before.exit_code == after.exit_code == 0


def test_nodes_that_may_not_be_read_are_taken_to_be_ready() -> None:
    body = lost_worker()
    del body["nodes"]
    taken = msgspec.convert({**body, "nodesHidden": True}, JobObjects)
    assert {name: node.ready for name, node in saved_snapshot.snapshot(taken).nodes.items()} == {"n0": True, "n1": True}


def test_rounds_that_no_version_reads_are_refused_by_name() -> None:
    body = lost_worker()
    body["rounds"] = {"metadata": meta("digits-rounds", ownerReferences=OWNED), "data": {"document": "{}"}}
    with pytest.raises(SnapshotError, match="ConfigMap digits-rounds holds no round document"):
        saved_snapshot.snapshot(msgspec.convert(body, JobObjects))


def test_spec_that_cannot_be_carried_out_is_refused_with_its_field(kept: Path) -> None:
    body = json.loads(kept.read_text())
    body["job"]["spec"]["replicas"] = 0
    kept.write_text(json.dumps(body))
    done = everstep("--snapshot", kept)
    assert done.exit_code != 0
    assert "spec.replicas" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a TrainingJob, or give --snapshot FILE or --replay FILE"),
        (("digits", "--replay", "x.txt"), "give neither JOB nor"),
        (("--snapshot", "missing.json"), "missing.json: cannot be read"),
        (("--replay", "missing.txt"), "missing.txt: cannot be read"),
        (("digits", "--kubeconfig", "missing"), "kubeconfig missing: there is no such file"),
        (("digits", "-o", "yaml"), "give text or json"),
        (("--replay", __file__, "--backend", "mpi"), "give everstep or c10d"),
        (("--replay", __file__), 'command \'"""`everstep plan`'),
    ],
)
def test_command_that_cannot_be_answered_says_what_to_give(arguments: tuple[str, ...], message: str) -> None:
    done = everstep(*arguments)
    assert done.exit_code != 0
    assert message in str(done.exception)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "no snapshot"),
        ("[]", "no snapshot"),
        ('{"takenAt": "2026-01-01T00:00:00Z", "job": {}}', "this version reads 'everstep-plan-snapshot/1'"),
        ('{"format": "everstep-plan-snapshot/1", "takenAt": "2026-01-01T00:00:00", "job": {}}', "no time zone"),
    ],
)
def test_file_that_is_no_snapshot_is_refused_by_name(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(content)
    with pytest.raises(SnapshotError, match=r"kept\.json") as refused:
        saved_snapshot.load(path)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("path", "backend"),
    [("elastic/02_one_worker_is_lost.txt", "everstep"), ("04_node_lost.txt", "c10d")],
)
def test_transcript_of_the_planner_is_replayed_as_recorded(path: str, backend: str) -> None:
    done = everstep("--replay", TRANSCRIPTS / path, "--backend", backend)
    assert done.exit_code == 0, done.output
    assert done.stdout == (TRANSCRIPTS / path).read_text()


def test_transcript_that_records_something_else_ends_with_1_and_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "transcript.txt"
    path.write_text("settle\nready 0 1 2 3\n\nroster\n----\n0-7@0\n")
    done = everstep("--replay", path)
    assert done.exit_code == 1
    assert done.stdout.endswith("roster\n----\n0-3@0\n")
    assert "-0-7@0" in done.stderr
    assert "+0-3@0" in done.stderr


def test_block_without_recorded_output_is_asked_and_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "transcript.txt"
    path.write_text("settle\n\nroster\n")
    done = everstep("--replay", path)
    assert done.exit_code == 0
    assert done.stdout.endswith("roster\n----\n0-3@0\n")


def test_examples_of_the_reference_page_print_what_it_shows(kept: Path, tmp_path: Path) -> None:
    text = PAGE.read_text()
    shown = re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert shown[0] == f"$ everstep plan --snapshot kept.json\n{everstep('--snapshot', kept).output}"
    for line in shown[1].splitlines():
        assert everstep(*shlex.split(line)[3:]).exit_code == 0, line
    [question] = re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    asked = tmp_path / "question.txt"
    asked.write_text(question)
    done = everstep("--replay", asked)
    assert done.exit_code == 0
    assert "create pod digits-w2-1" in done.stdout
