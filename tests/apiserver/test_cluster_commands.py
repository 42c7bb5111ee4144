"""`everstep list`, `status`, `events`, `scale`, `suspend`, `kill`, `delete` against a real API server.

No node runs here: the tests write what an operator and kubelets would. Logs and waits are played on kind.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from everstep.cli import main
from everstep.cli.jobs import commands, create
from everstep.contract import labels
from everstep.jobs.cluster import connect
from everstep.jobs.source import JobError, Unreachable, Where
from everstep.jobs.view import View
from support import ROOT
from support.apiserver.jobs import Jobs
from support.commands import Call, caller
from testcluster.daemon import free_ports

DELETED = 30.0  # seconds for an object to go


@pytest.fixture
def call(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A command in this namespace; what it prints. It raises as the command does."""
    monkeypatch.setenv("KUBECONFIG", str(jobs.control_plane.kubeconfig))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return caller("-n", jobs.namespace)


def write(jobs: Jobs, kind: str, name: str, status: dict[str, Any]) -> None:
    body = json.dumps({"status": status})
    done = jobs.kubectl("patch", f"{kind}/{name}", "--subresource=status", "--type=merge", "-p", body)
    assert done.returncode == 0, done.stderr


def training(jobs: Jobs, name: str, **status: Any) -> dict[str, Any]:
    """A job whose operator has written this into its status."""
    job = jobs.create(name, {})
    ready = {"type": "Ready", "status": "True", "reason": "Running", "message": "2/2 ready"}
    write(jobs, "tjob", name, {"conditions": [{**ready, "lastTransitionTime": "2026-01-01T00:00:00Z"}], **status})
    return job


def pod(jobs: Jobs, job: str, worker: int, incarnation: int = 0, *, uid: str = "", **status: Any) -> str:
    """A worker's pod of this job, or of an earlier one of its name, which had this UID."""
    name = f"{job}-w{worker}-{incarnation}"
    uid = uid or jobs.get(job)["metadata"]["uid"]
    marks = {labels.JOB: job, labels.JOB_UID: uid, labels.WORKER_INDEX: str(worker)}
    marks[labels.INCARNATION] = str(incarnation)
    body = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": marks},
        "spec": {"containers": [{"name": "worker", "image": "x"}, {"name": "mesh", "image": "x"}]},
    }  # fmt: skip
    done = jobs.kubectl("create", "-f", "-", input=json.dumps(body))
    assert done.returncode == 0, done.stderr
    if status:
        write(jobs, "pod", name, status)
    return name


def container(name: str, **state: Any) -> dict[str, Any]:
    return {"name": name, "image": "x", "imageID": "x", "ready": "running" in state, "restartCount": 0, "state": state}


def test_list_and_status_say_of_a_job_what_its_objects_say(jobs: Jobs, call: Call) -> None:
    world, progress = {"round": 7, "size": 2}, {"step": 40, "totalSteps": 90}
    job = training(
        jobs, "seen", world=world, progress=progress, checkpoint={"lastCommittedStep": 32}, goodputPercent=97,
        readyReplicas=2, replicas=3,
    )  # fmt: skip
    running = {"startedAt": "2026-01-01T00:00:00Z"}
    # A mesh that never ends beside a worker that failed: the worker's own container is what counts.
    failed = [container("worker", terminated={"exitCode": 3}), container("mesh", running=running)]
    pod(jobs, "seen", 0, phase="Running", containerStatuses=failed)
    ready = [{"type": "Ready", "status": "True"}]
    both = [container(name, running=running) for name in ("worker", "mesh")]
    pod(jobs, "seen", 1, 4, phase="Running", conditions=ready, containerStatuses=both)
    unplaced = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}]
    pod(jobs, "seen", 2, phase="Pending", conditions=unplaced)
    pod(jobs, "seen", 3, uid="of-an-earlier-job")
    regarding = {"kind": "TrainingJob", "name": "seen", "namespace": jobs.namespace, "uid": job["metadata"]["uid"]}
    for number, reason in enumerate(("WorldFormed", "WorkerLost")):
        event = {
            "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": f"seen-{number}"},
            "eventTime": f"2026-01-01T00:00:0{number}.000000Z", "reason": reason, "note": f"{reason} [red]x",
            "type": "Normal", "action": "Act", "reportingController": "everstep.dev/t", "reportingInstance": "t",
            "regarding": regarding,
        }  # fmt: skip
        done = jobs.kubectl("create", "-f", "-", input=json.dumps(event))
        assert done.returncode == 0, done.stderr

    shown = json.loads(call("status", "seen", "-o", "json"))
    states = {row["pod"]: (row["worker"], row["incarnation"], row["state"]) for row in shown["workers"]}
    assert states == {
        "seen-w0-0": (0, 0, "Failed"), "seen-w1-4": (1, 4, "training"), "seen-w2-0": (2, 0, "Unschedulable")
    }  # fmt: skip
    facts = {name: shown[name] for name in ("status", "round", "size", "step", "total_steps", "committed", "goodput")}
    assert facts == {
        "status": "Running", "round": 7, "size": 2, "step": 40, "total_steps": 90, "committed": 32, "goodput": ""
    }  # fmt: skip
    assert [event["reason"] for event in shown["events"]] == ["WorldFormed", "WorkerLost"]
    text = call("status", "seen")
    assert "step 40/90  committed 32  world 2  round 7" in text
    assert "WorkerLost [red]x" in text, "others' words are no markup"
    assert "RANK" not in text, "nobody has told of ranks"
    assert yaml.safe_load(call("status", "seen", "-o", "yaml")) == shown
    first = call("events", "seen").splitlines()[0]  # its date, which is not today's, and its time
    assert first.split()[2:] == ["WorldFormed", "WorldFormed", "[red]x"]
    row = next(line for line in call("list").splitlines() if line.startswith("seen"))
    assert row.split()[:6] == ["seen", "Running", "40/90", "32", "2/3", "0"]
    assert "seen" in call("list", "-o", "name").split()
    assert any(entry["job"] == "seen" for entry in json.loads(caller()("list", "-A", "-o", "json")))


def test_where_the_time_of_a_job_went_and_which_nodes_cost_it(jobs: Jobs, call: Call) -> None:
    ended = {"type": "Complete", "status": "True", "reason": "Succeeded", "lastTransitionTime": "2026-01-01T01:00:00Z"}
    times = {"startTime": "2026-01-01T00:00:00Z", "completionTime": "2026-01-01T01:00:00Z"}
    seconds = {"productive": 3000, "detect": 60, "wait": 40}
    parts = {"detectMs": 1000, "rendezvousMs": 2000, "restoreMs": 3000, "firstStepMs": 4000}
    lost = {"at": "2026-01-01T00:10:00Z", "cause": "OOMKilled", "rung": "recreate", "node": "n1", **parts}
    open_ = {"at": "2026-01-01T00:50:00Z", "cause": "Signaled", "rung": "shrink", "node": "n1", "detectMs": 500}
    regrow = {**lost, "rung": "regrow", "node": "n2"}
    unplaced = {key: value for key, value in lost.items() if key != "node"}
    jobs.create("timed", {})
    written = {**times, "earlierActiveSeconds": 100, "stateSeconds": seconds, "recoveries": [open_, regrow, lost]}
    write(jobs, "tjob", "timed", {**written, "conditions": [ended]})
    training(
        jobs,
        "beside",
        recoveries=[{**lost, "node": "n3", "lostSteps": 7, "cause": "NodeLost"}, unplaced],
        excludedNodes=[
            {"name": "n3", "until": "2100-01-01T00:00:00Z", "reasons": ["NodeLost"]},
            {"name": "n5", "reasons": ["KernelDeadlock (blocked)"]},
            {"name": "n6", "until": "2026-01-01T00:00:00Z", "reasons": ["its operator has not written since"]},
        ],
    )

    shown = json.loads(call("goodput", "timed", "-o", "json"))
    assert shown["seconds"] == {
        "productive": 3000, "replay": 0, "detect": 60, "form": 0, "restore": 0, "wait": 40, "unknown": 0, "pending": 600
    }  # fmt: skip
    assert shown["total"] == sum(shown["seconds"].values()) == 3700
    table = {line.split()[0]: line.split()[1:3] for line in call("goodput", "timed").splitlines()}
    assert (table["productive"], table["pending"], table["total"]) == (
        ["3000", "81.1%"],
        ["600", "16.2%"],
        ["3700", "100%"],
    )
    assert yaml.safe_load(call("goodput", "timed", "-o", "yaml")) == shown

    rows = {row["node"]: row for row in json.loads(call("nodes", "-o", "json"))}
    assert rows.keys() == {"n1", "n3", "n5", None}, "a world that is whole again has lost nobody"
    assert (rows["n1"]["recoveries"], rows["n1"]["seconds"]) == (2, 10.5)
    assert rows["n1"]["causes"] == {"OOMKilled": 1, "Signaled": 1}
    assert rows["n1"]["last"] == "2026-01-01T00:50:00Z"
    assert (rows["n3"]["jobs"], rows["n3"]["lost_steps"]) == ([f"{jobs.namespace}/beside"], 7)
    by = [f"{jobs.namespace}/beside"]
    assert [(rows[n]["excluded_by"], rows[n]["excluded_until"]) for n in ("n1", "n3", "n5")] == [
        ([], None),
        (by, "2100-01-01T00:00:00Z"),
        (by, None),
    ]
    assert rows["n5"]["reasons"] == ["KernelDeadlock (blocked)"]
    lines = call("nodes").splitlines()
    assert lines[1].split()[:3] == ["n1", "2", "10.5"]
    text = " ".join(" ".join(lines).split())
    assert "until 2100-01-01T00:00:00Z" in text
    assert call("nodes", "-o", "name").split() == ["n1", "n3", "n5"]
    assert {row["node"] for row in json.loads(caller()("nodes", "-A", "-o", "json"))} >= {"n1", "n3"}


def test_commands_that_change_a_job_change_that_job_alone(jobs: Jobs, call: Call) -> None:
    for name in ("mine", "yours"):
        jobs.create(name, {"elastic.minReplicas": 1, "elastic.maxReplicas": 4})
    assert call("scale", "mine", "3").startswith("mine: 3 workers wanted (namespace ")
    assert call("suspend", "mine", "--no-wait").startswith("mine: to be suspended")
    assert (jobs.get("mine")["spec"]["replicas"], jobs.get("mine")["spec"]["suspend"]) == (3, True)
    call("resume", "mine", "--no-wait")
    assert jobs.get("mine")["spec"]["suspend"] is False
    assert jobs.get("yours")["spec"].get("replicas") != 3
    kept, ended = pod(jobs, "mine", 0), pod(jobs, "mine", 1)
    assert call("migrate", "mine", "1", "--no-wait").startswith(f"mine: {ended} to be moved (namespace ")
    call("migrate", kept, "--no-wait")
    assert jobs.get("mine")["metadata"]["annotations"]["everstep.dev/migrate"] == f"{ended},{kept}"
    with pytest.raises(JobError, match="mine has no worker 7"):
        call("migrate", "mine", "7")
    assert call("kill", "mine", "1").startswith(f"pod {ended} deleted by force")
    assert call("kill", kept, "--delete").startswith(f"pod {kept} deleted (")
    call("delete", "mine")
    deadline = time.monotonic() + DELETED
    while jobs.exists("mine"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert jobs.exists("yours")


def test_job_that_has_ended_is_rerun_and_one_that_would_have_nothing_to_do_is_not(jobs: Jobs, call: Call) -> None:
    def end(name: str, type_: str, **status: Any) -> None:
        at = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
        conditions = [
            {"type": kind, "status": "True", "reason": type_, "message": "over", **at} for kind in ("Ready", type_)
        ]
        write(jobs, "tjob", name, {"conditions": conditions, "completionTime": at["lastTransitionTime"], **status})

    url = {"checkpoint": {"url": "s3://bucket/a"}}
    jobs.create("runs", url)
    with pytest.raises(JobError, match="can only be raised once the job has finished"):
        call("rerun", "runs", "--no-wait")
    jobs.create("failed", {**url, "rerun": 2})
    end("failed", "Failed", rerun=5)  # a manifest has brought an older value back
    assert call("rerun", "failed", "--no-wait").startswith("failed: to be run again (namespace ")
    assert (jobs.get("failed")["spec"]["rerun"], jobs.get("failed")["spec"]["checkpoint"]["url"]) == (
        6,
        "s3://bucket/a",
    )
    jobs.create("done", url)
    end("done", "Complete", checkpoint={"lastCommittedStep": 90})
    for flags in ((), ("--checkpoint", "s3://bucket/a")):
        with pytest.raises(JobError, match=r"\(step 90\) leaves nothing to train.*raise spec.rerun in the same edit"):
            call("rerun", "done", *flags)
    assert jobs.get("done")["spec"]["rerun"] == 0
    call("rerun", "done", "--no-wait", "--checkpoint", "s3://bucket/b")
    assert (jobs.get("done")["spec"]["rerun"], jobs.get("done")["spec"]["checkpoint"]["url"]) == (1, "s3://bucket/b")
    history = [
        {"rerun": 0, "outcome": "NoProgress", "message": "no new step", "step": 7, "endedAt": "2026-01-01T00:00:00Z"}
    ]
    training(jobs, "history", history=history, rerun=1)
    assert "earlier run: NoProgress at step 7, 2026-01-01T00:00:00Z: no new step" in call("status", "history")


def test_nothing_but_the_named_job_and_its_own_pods_can_be_changed(
    jobs: Jobs, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.create("kept", {})
    for command in ("delete", "suspend", "status"):
        for name in ("", "kept/", "../pods"):
            with pytest.raises(JobError, match="is no job's name"):
                call(command, name)
    assert jobs.exists("kept")
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "kept-w0-0"}}
    body |= {"spec": {"containers": [{"name": "x", "image": "x"}]}}
    assert jobs.kubectl("create", "-f", "-", input=json.dumps(body)).returncode == 0
    with pytest.raises(JobError, match=r"kept has no pod kept-w0-0; it has none yet"):
        call("kill", "kept-w0-0")  # another's, without the labels of a worker
    assert jobs.kubectl("get", "pod/kept-w0-0").returncode == 0

    # A local run of the name has just ended: its commands are not to go to the cluster's job.
    (tmp_path / ".everstep" / "kept-1").mkdir(parents=True)
    (tmp_path / ".everstep" / "kept-1" / "status.json").write_text(json.dumps(View.unknown("kept").to_json()))
    settings = yaml.safe_load(Path(jobs.control_plane.kubeconfig).read_text())
    for context in settings["contexts"]:
        context["context"]["namespace"] = jobs.namespace
    (tmp_path / "own").write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "own"))
    with pytest.raises(JobError, match=r"kept is a local run \(ended, in .everstep/kept-1\) and a job in namespace"):
        caller()("delete", "kept")
    assert jobs.exists("kept")

    # Of several files the first one's current context counts, as for kubectl.
    (tmp_path / "first").write_text(yaml.safe_dump(settings))
    other: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "other",
        "users": [],
        "clusters": [],
    }
    (used,) = (each for each in settings["contexts"] if each["name"] == settings["current-context"])
    other["contexts"] = [{**used, "name": "other"}]
    (tmp_path / "second").write_text(yaml.safe_dump(other))
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'first'}:{tmp_path / 'second'}")
    assert call("scale", "kept", "2").endswith(f"of context {settings['current-context']})\n")


def test_pods_of_an_earlier_job_of_the_name_are_not_this_jobs(jobs: Jobs, call: Call, tmp_path: Path) -> None:
    jobs.create("again", {})
    old = pod(jobs, "again", 1, 3, uid="of-the-deleted-one")
    with pytest.raises(JobError, match="again has no worker 1; it has none yet"):
        call("kill", "again", "1")
    with pytest.raises(JobError, match=f"again has no pod {old}; it has none yet"):
        call("kill", old)
    with pytest.raises(JobError, match=f"again has no pod {old} any more"):  # behind a look at another one
        connect(Where(jobs.namespace)).kill("again", old, delete=False)
    own = pod(jobs, "again", 1)
    assert call("kill", "again", "1").startswith(f"pod {own} deleted by force")
    assert jobs.kubectl("get", f"pod/{old}").returncode == 0
    call("report", "again", "--file", "r.tar.gz")
    with tarfile.open(tmp_path / "r.tar.gz") as archive:
        assert json.loads(archive.extractfile("r/pods.json").read()) == []  # type: ignore[union-attr]
    # It waits for this job's workers alone.
    ready = {"type": "Ready", "status": "False", "reason": "Suspended", "message": "suspended"}
    ready |= {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    write(jobs, "tjob", "again", {"conditions": [ready], "observedGeneration": 2})
    assert call("suspend", "again").startswith("again: suspended (")


def test_status_of_an_older_spec_ends_no_wait(jobs: Jobs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "WAIT_SECONDS", 0.5)
    training(jobs, "late", observedGeneration=1)
    call("suspend", "late", "--no-wait")
    with pytest.raises(JobError, match=r"its workers train: not within 0.5 s: Running"):
        call("resume", "late")  # no operator has seen either of the two
    write(jobs, "tjob", "late", {"observedGeneration": jobs.get("late")["metadata"]["generation"]})
    assert call("resume", "late").startswith("late: trains again (")


def test_name_that_looks_like_a_pod_is_a_job_if_there_is_one(jobs: Jobs, call: Call) -> None:
    for name in ("x-w1-2", "w1"):
        jobs.create(name, {})
        with pytest.raises(JobError, match=f"^{name} has no worker 0; it has none yet"):
            call("logs", name)
        with pytest.raises(JobError, match="give one of: a pod, a job and its worker"):
            call("kill", name)
    assert call("kill", pod(jobs, "x-w1-2", 0)).startswith("pod x-w1-2-w0-0 deleted by force")


def test_watched_job_that_is_deleted_ends_the_command(jobs: Jobs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    training(jobs, "watched")
    # The command sleeps between two looks.
    monkeypatch.setattr("everstep.cli.jobs.commands.time.sleep", lambda _: jobs.kubectl("delete", "tjob/watched"))
    assert call("status", "watched", "-w").startswith("watched  Running")


def test_rights_for_one_job_are_enough_for_its_status(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(jobs, "mine-alone")
    made = [
        ("serviceaccount", "reader"),
        ("role", "reader", "--verb=get", "--resource=trainingjobs.everstep.dev"),
        ("role", "looker", "--verb=list", "--resource=pods,events.events.k8s.io"),
        *(
            ("rolebinding", role, f"--role={role}", f"--serviceaccount={jobs.namespace}:reader")
            for role in ("reader", "looker")
        ),
    ]
    for each in made:
        done = jobs.kubectl("create", *each)
        assert done.returncode == 0, done.stderr
    settings = yaml.safe_load(Path(jobs.control_plane.kubeconfig).read_text())
    token = jobs.kubectl("create", "token", "reader").stdout.strip()
    # As most people have them: from a program, with the namespace in the context.
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": token}}
    plugin = {
        "apiVersion": answer["apiVersion"],
        "command": sys.executable,
        "args": ["-c", f"print({json.dumps(answer)!r})"],
    }
    settings["users"] = [{"name": user["name"], "user": {"exec": plugin}} for user in settings["users"]]
    for context in settings["contexts"]:
        context["context"]["namespace"] = jobs.namespace
    (tmp_path / "reader").write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "reader"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert caller()("status", "mine-alone").startswith("mine-alone  Running")
    with pytest.raises(
        JobError, match=rf"no local run named 'absent'; namespace {jobs.namespace} of context .* has no"
    ):
        caller()("status", "absent")
    with pytest.raises(JobError, match=rf"^no job 'absent' in namespace {jobs.namespace} of context [^;]*$"):
        caller("-n", jobs.namespace)("status", "absent")
    settings["users"] = [
        {"name": user["name"], "user": {"exec": {**plugin, "command": "bin/none"}}} for user in settings["users"]
    ]
    (tmp_path / "reader").write_text(yaml.safe_dump(settings))
    with pytest.raises(Unreachable, match=r"the credentials plug-in '.*/bin/none' is not installed"):
        caller()("status", "mine-alone")


def test_log_that_cannot_be_had_yet_is_no_fault_of_the_cluster(jobs: Jobs, call: Call) -> None:
    jobs.create("silent", {})
    body = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "silent-w0-0"},
        "spec": {"containers": [{"name": "other", "image": "x"}]},
    }  # fmt: skip
    assert jobs.kubectl("create", "-f", "-", input=json.dumps(body)).returncode == 0
    with pytest.raises(JobError, match="container worker is not valid for pod silent-w0-0"):
        call("logs", "silent-w0-0")


def test_what_is_wrong_is_one_line_that_says_what_to_do(
    jobs: Jobs, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.create("there", {"elastic.minReplicas": 1, "elastic.maxReplicas": 2})
    for verb in (["status"], ["logs"], ["events"], ["delete"], ["kill", "--delete"]):
        with pytest.raises(JobError, match=r"no job 'absent' in namespace .*; it has .*there"):
            call(verb[0], "absent", *(["1"] if verb[0] == "kill" else []), *verb[1:])
    with pytest.raises(JobError, match="name the job"):
        call("status")
    with pytest.raises(JobError, match=r"^there can have 1 to 2 workers, not 3: spec\.elastic"):
        call("scale", "there", "3")
    with pytest.raises(JobError, match="there has no worker 5; it has none yet"):
        call("logs", "there", "5")
    with pytest.raises(JobError, match=r"no context 'x' in the kubeconfig .*; it has"):
        call("status", "there", "--context", "x")
    with pytest.raises(JobError, match="kubeconfig"):
        call("status", "there", "--kubeconfig", str(tmp_path / "none"))
    (tmp_path / "broken").write_text("{a: [")
    with pytest.raises(JobError, match=r"kubeconfig .*broken cannot be"):
        call("status", "there", "--kubeconfig", str(tmp_path / "broken"))

    settings = yaml.safe_load(Path(jobs.control_plane.kubeconfig).read_text())
    token = jobs.kubectl("create", "token", "default").stdout.strip()
    settings["users"] = [{"name": user["name"], "user": {"token": token}} for user in settings["users"]]
    (tmp_path / "weak").write_text(yaml.safe_dump(settings))
    with pytest.raises(Unreachable, match=r"you may not do that in namespace .*forbidden"):
        call("status", "there", "--kubeconfig", str(tmp_path / "weak"))
    settings["users"] = [{"name": user["name"], "user": {"token": "no"}} for user in settings["users"]]
    (tmp_path / "nobody").write_text(yaml.safe_dump(settings))
    with pytest.raises(Unreachable, match="does not accept your credentials"):
        call("status", "there", "--kubeconfig", str(tmp_path / "nobody"))
    (port,) = free_ports(1)
    for cluster in settings["clusters"]:
        cluster["cluster"]["server"] = f"https://127.0.0.1:{port}"
    (tmp_path / "gone").write_text(yaml.safe_dump(settings))
    with pytest.raises(Unreachable, match=rf"the cluster at https://127.0.0.1:{port} does not answer: .*refused"):
        call("status", "there", "--kubeconfig", str(tmp_path / "gone"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(JobError, match="no local run named 'there'"):
        caller()("status", "there")
    with pytest.raises(Unreachable, match="no cluster is configured"):
        caller("-n", "default")("list")


def test_a_shell_gets_the_documented_exit_code_and_one_line(jobs: Jobs, tmp_path: Path) -> None:
    """As processes: what an exception becomes is the entry point's."""
    training(jobs, "shell", progress={"step": 3})
    jobs.create("shell-elastic", {"elastic.minReplicas": 1, "elastic.maxReplicas": 2})
    settings = yaml.safe_load(Path(jobs.control_plane.kubeconfig).read_text())
    token = jobs.kubectl("create", "token", "default").stdout.strip()
    settings["users"] = [{"name": user["name"], "user": {"token": token}} for user in settings["users"]]
    (tmp_path / "weak").write_text(yaml.safe_dump(settings))
    (port,) = free_ports(1)
    for cluster in settings["clusters"]:
        cluster["cluster"]["server"] = f"https://127.0.0.1:{port}"
    (tmp_path / "gone").write_text(yaml.safe_dump(settings))

    own = str(jobs.control_plane.kubeconfig)
    for code, kubeconfig, *words in (
        (0, own, "top"),
        (0, own, "list", "-o", "name"),
        (2, own, "status", "absent"),
        (2, own, "logs", "shell", "w7"),
        (2, own, "scale", "shell-elastic", "9"),
        (2, own, "rerun", "shell", "--no-wait"),
        (2, own, "migrate", "shell", "w0"),
        (3, str(tmp_path / "weak"), "list"),
        (3, str(tmp_path / "gone"), "status", "shell"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "everstep.cli.main", *words, "-n", jobs.namespace, "--kubeconfig", kubeconfig],
            capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == code, (words, done.stdout, done.stderr)
        assert len(done.stderr.splitlines()) == (1 if code else 0), (words, done.stderr)
        assert bool(done.stdout) == (code == 0)


def test_report_has_the_objects_and_no_secret(jobs: Jobs, call: Call, tmp_path: Path) -> None:
    body = jobs.body("told", {})
    container = body["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "HF_HUB", "value": "swordfish-1"}, {"name": "PLAIN", "value": "swordfish-2"}]
    container["command"] = ["python", "t.py", "--api-key=swordfish-3", "ghp_" + "a1B2" * 9, "--hf-token", "swordfish-4"]
    settings = yaml.safe_load(Path(jobs.control_plane.kubeconfig).read_text())
    for each in settings["contexts"]:
        each["name"] = settings["current-context"] = "https://me:swordfish-5@host"
    (tmp_path / "named").write_text(yaml.safe_dump(settings))
    done = jobs.kubectl("apply", "-f", "-", input=json.dumps(body))  # which repeats it in an annotation
    assert done.returncode == 0, done.stderr
    name = pod(jobs, "told", 0)
    printed = call("report", "told", "--file", "r.tar.gz", "--kubeconfig", str(tmp_path / "named"))
    assert printed.startswith("wrote r.tar.gz: versions.json, status.json, events.json, trainingjob.json, pods.json, ")
    with tarfile.open(tmp_path / "r.tar.gz") as archive:
        files = {each.name: archive.extractfile(each).read().decode() for each in archive.getmembers()}  # type: ignore[union-attr]
    text = "\n".join(files.values())
    assert "swordfish" not in text
    assert "ghp_" not in text
    assert json.loads(files["r/trainingjob.json"])["metadata"]["name"] == "told"
    assert [each["metadata"]["name"] for each in json.loads(files["r/pods.json"])] == [name]
    assert files[f"r/logs/{name}.log"] == "", "no node runs it"
    with pytest.raises(JobError, match=r"r.tar.gz is there already"):
        call("report", "told", "--file", "r.tar.gz")


def test_job_of_init_is_taken_by_the_api_server(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    for options in ([], ["--elastic", "1:4", "--gpus", "4"], ["--secret", ""]):
        made = CliRunner().invoke(create.app, [str(tmp_path / "train.py"), "--print", *options, "--", "--a", "'b': {"])
        done = jobs.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", input=made.output)
        assert done.returncode == 0, done.stderr


def test_doctor_says_what_a_cluster_lacks(jobs: Jobs, tmp_path: Path) -> None:
    plain = CliRunner()

    def look(kubeconfig: Path) -> tuple[int, dict[str, tuple[bool | None, str]]]:
        options = ["--json", "-n", jobs.namespace, "--kubeconfig", str(kubeconfig)]
        done = plain.invoke(main.app, ["doctor", *options])
        return done.exit_code, {each["check"]: (each["good"], each["text"]) for each in json.loads(done.output)}

    everything = Path(jobs.control_plane.kubeconfig)
    code, seen = look(everything)
    assert code == 1
    assert seen["API server"][0] is True
    assert seen["TrainingJob"] == (True, "TrainingJob everstep.dev/v1alpha1 is served")
    assert seen["operator"] == (False, "no operator is installed: jobs are stored, and nothing happens to them")
    assert seen["leader"] == (None, "no operator, so no leader")
    assert seen["your rights"] == (True, f"all that the commands need in namespace {jobs.namespace}")

    marks = {"app.kubernetes.io/name": "everstep", "app.kubernetes.io/component": "operator"}
    containers = {"containers": [{"name": "operator", "image": "registry.example/operator:1"}]}
    body = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "everstep", "labels": marks},
        "spec": {
            "replicas": 2, "selector": {"matchLabels": marks},
            "template": {"metadata": {"labels": marks}, "spec": containers},
        },
    }  # fmt: skip
    lease = {
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "everstep-operator"},
        "spec": {"holderIdentity": "gone", "renewTime": "2026-01-01T00:00:00.000000Z", "leaseDurationSeconds": 15},
    }  # fmt: skip
    for each in (body, lease):
        done = jobs.kubectl("create", "-f", "-", input=json.dumps(each))
        assert done.returncode == 0, done.stderr
    try:
        _, seen = look(everything)
        assert seen["operator"][0] is False
        assert seen["operator"][1].startswith(f"{jobs.namespace}/everstep: 0 of 2 ready")
        assert seen["leader"][0] is False
        assert seen["leader"][1].startswith("gone, renewed ")
        watching = [{"name": "EVERSTEP_WATCH_NAMESPACES", "value": f"team-a,{jobs.namespace}"}]
        containers["containers"][0]["env"] = [*watching, {"name": "EVERSTEP_READ_NODES", "value": "false"}]
        jobs.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=json.dumps(body))
        _, seen = look(everything)
        assert "reads no nodes" in seen["operator"][1]
        watching[0]["value"] = "team-a,team-b"
        jobs.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", input=json.dumps(body))
        _, seen = look(everything)
        assert seen["operator"] == (
            False,
            f"{jobs.namespace}/everstep is for team-a,team-b alone; none acts on jobs of {jobs.namespace}: add it to "
            "watchNamespaces of one of their releases",
        )
        assert seen["leader"] == (None, "no operator, so no leader")
        shown = plain.invoke(main.app, ["version", "--kubeconfig", str(everything)]).output
        assert f"operator registry.example/operator:1 in namespace {jobs.namespace}" in shown
    finally:
        jobs.kubectl("delete", "deployment/everstep", "lease/everstep-operator")

    settings = yaml.safe_load(everything.read_text())
    token = jobs.kubectl("create", "token", "default").stdout.strip()
    settings["users"] = [{"name": user["name"], "user": {"token": token}} for user in settings["users"]]
    (tmp_path / "weak").write_text(yaml.safe_dump(settings))
    _, seen = look(tmp_path / "weak")
    assert seen["operator"][0] is None, "what one may not see is not said to be missing"
    lacking = "create trainingjobs, get trainingjobs, list trainingjobs, patch trainingjobs, patch trainingjobs/scale"
    assert seen["your rights"][0] is False
    assert seen["your rights"][1].startswith(f"you may not {lacking}")

    # The role of docs/how-to-multi-tenant.md, without what this person's team leaves out.
    page = (ROOT / "docs/how-to-multi-tenant.md").read_text()
    (role,) = (one for one in map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
               if one.get("kind") == "Role")  # fmt: skip
    role["rules"] = [rule for rule in role["rules"] if not {"configmaps", "pods/exec"} & {*rule["resources"]}]
    role["metadata"]["namespace"] = jobs.namespace
    done = jobs.kubectl("create", "-f", "-", input=json.dumps(role))
    assert done.returncode == 0, done.stderr
    who = f"--serviceaccount={jobs.namespace}:default"
    done = jobs.kubectl("create", "rolebinding", "user", "--role=everstep-user", who)
    assert done.returncode == 0, done.stderr
    _, seen = look(tmp_path / "weak")
    assert seen["your rights"] == (
        False,
        f"you may not create configmaps in namespace {jobs.namespace}; without create pods/exec the cluster refuses "
        "everstep stacks and profile",
    )
