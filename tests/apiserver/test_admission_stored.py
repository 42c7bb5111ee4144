"""What the API server keeps of a TrainingJob: defaults, what may change (failure mode 6), status, kubectl's table."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from everstep_operator.api import Status, parse_spec, parse_status

pytestmark = pytest.mark.apiserver

CONTAINER = {"name": "worker", "image": "train:1", "command": ["torchrun", "train.py"]}
RULE = {"onExitCodes": [2], "action": "Fail"}

ACCEPTED: dict[str, dict[str, Any]] = {
    "least": {},
    "one_worker": {"replicas": 1},
    "most_workers": {"replicas": 4096},
    "auto_processes": {"processesPerReplica": "auto"},
    "checkpoint_with_all": {
        "checkpoint": {"url": "s3://b/c", "everySteps": 100, "keep": 5, "secretRef": {"name": "s3-credentials"}}
    },
    "recovery_with_all": {
        "recovery": {
            "maxRestarts": 0,
            "restartWindowSeconds": 60,
            "backoffSeconds": {"initial": 0, "max": 0},
            "noProgressLimit": 1,
            "hang": {"mode": "Off"},
            "rules": [RULE, {"onReasons": ["OOMKilled", "NodeLost"], "action": "RestartUncharged"}],
        }
    },
    "hang_found_by_what_is_usual": {"recovery.hang": {"mode": "Auto", "floorSeconds": 5}},
    "hang_found_after_fixed_seconds": {
        "recovery.hang": {"mode": "Fixed", "timeoutSeconds": 30},
        "rendezvous.backend": "everstep",
    },
    "etcd_with_all": {
        "replicas": 2,
        "rendezvous": {
            "backend": "etcd",
            "etcd": {"endpoints": ["https://etcd:2379"], "prefix": "/jobs", "secretRef": {"name": "etcd-credentials"}},
        },
        "elastic": {"minReplicas": 1, "maxReplicas": 4, "sizes": [1, 2, 4], "shrinkAfterSeconds": 30},
    },
    "lifecycle_with_all": {
        "activeDeadlineSeconds": 60,
        "ttlSecondsAfterFinished": 0,
        "managedBy": "kueue.x-k8s.io/multikueue",
        "podCleanup": "None",
        "podDisruptionBudget": False,
    },
    "nulls_are_absent": {"activeDeadlineSeconds": None, "managedBy": None, "recovery.hang": {"timeoutSeconds": None}},
    "side_car_and_free_form_template": {
        "template": {
            "metadata": {"labels": {"team": "a"}},
            "spec": {
                "containers": [
                    {**CONTAINER, "resources": {"limits": {"nvidia.com/gpu": 1}}},
                    {"name": "logs", "image": "x"},
                ],
                "nodeSelector": {"a": "b"},
                "volumes": [{"name": "d", "emptyDir": {"sizeLimit": "1Gi"}}],
            },
        }
    },
    "case_10_shell_characters_stay_arguments": {
        "template.spec.containers": [{**CONTAINER, "args": ["--name", "a b; rm -rf / $(HOME)\n`id`"]}]
    },
}


@pytest.fixture(scope="module", autouse=True)
def _policies_are_gone(jobs: Any) -> None:
    """Those of another module, which the API server enforces for a moment after they were deleted."""
    deadline = time.monotonic() + 30
    while True:
        try:
            jobs.create("accepted", {})
            return
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_good_spec_is_stored_with_the_defaults_of_the_parser(jobs: Any, changes: dict[str, Any]) -> None:
    name = f"good-{list(ACCEPTED.values()).index(changes)}"
    stored = jobs.create(name, changes)["spec"]
    assert parse_spec(stored) == parse_spec(jobs.body(name, changes)["spec"])
    assert stored == parse_spec(stored).to_wire()


CHANGES_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "join_timeout": ({"rendezvous": {"joinTimeoutSeconds": 60}}, "spec.rendezvous"),
    "checkpoint_url": ({"checkpoint": {"url": "s3://bucket/other"}}, "spec.checkpoint.url"),
    "checkpoint_removed": ({"checkpoint": None}, "spec.checkpoint.url"),
    "save_at_its_end": ({"checkpoint": {"onPreemption": True}}, "spec.checkpoint.onPreemption"),
    "processes": ({"processesPerReplica": 2}, "spec.processesPerReplica"),
    "processes_auto": ({"processesPerReplica": "auto"}, "spec.processesPerReplica"),
    "group_size": ({"elastic": {"minReplicas": 2, "maxReplicas": 2, "groupSize": 2}}, "spec.elastic.groupSize"),
    "manager": ({"managedBy": "example.com/other"}, "spec.managedBy"),
    "replicas_to_none": ({"replicas": 0}, "spec.replicas"),
}

NEVER = ("spec.managedBy", "spec.replicas")  # these are not allowed while it is suspended, either


@pytest.fixture(scope="module")
def running(jobs: Any) -> str:
    """A job as it is while it runs."""
    jobs.create("running", {"checkpoint": {"url": "s3://bucket/a"}})
    return "running"


@pytest.mark.parametrize(("change", "field"), CHANGES_REFUSED.values(), ids=[f"case_06_{k}" for k in CHANGES_REFUSED])
def test_change_of_an_immutable_field_is_denied_and_the_job_undisturbed(
    jobs: Any, running: str, change: dict[str, Any], field: str
) -> None:
    before = jobs.get(running)
    done = jobs.patch(running, {"spec": change})
    assert done.returncode != 0
    assert field in done.stderr
    assert jobs.get(running) == before
    if field not in NEVER:
        assert "set spec.suspend: true in the same update" in " ".join(done.stderr.split())


OF_A_SUSPENDED_JOB: dict[str, dict[str, Any]] = {
    **{name: change for name, (change, field) in CHANGES_REFUSED.items() if field not in NEVER},
    "template": {"template": {"spec": {"nodeSelector": {"pool": "a"}}}},
}


@pytest.mark.long_but("checkpoint_url")
@pytest.mark.parametrize("change", OF_A_SUSPENDED_JOB.values(), ids=OF_A_SUSPENDED_JOB)
def test_update_that_suspends_or_resumes_a_job_may_change_it_too_case_06(jobs: Any, change: dict[str, Any]) -> None:
    """As queues do: Kueue puts a template back as it suspends a job, and sets node selectors as it resumes it."""
    name = f"queued-{list(OF_A_SUSPENDED_JOB.values()).index(change)}"
    before = jobs.create(name, {"checkpoint": {"url": "s3://bucket/a"}})["spec"]
    done = jobs.patch(name, {"spec": {**change, "suspend": True}})
    assert done.returncode == 0, done.stderr
    changed = jobs.get(name)["spec"]
    assert changed != {**before, "suspend": True}
    back = {field: before.get(field) for field in change}
    if "template" in change:
        back["template"] = {"spec": {"nodeSelector": None}}
    done = jobs.patch(name, {"spec": {**back, "suspend": False}})
    assert done.returncode == 0, done.stderr
    assert jobs.get(name)["spec"] == before


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 5},
        {"recovery": {"maxRestarts": 1, "rules": [RULE]}},
        {"checkpoint": {"everySeconds": 60, "keep": 9}},
        {"activeDeadlineSeconds": 100},
        {"ttlSecondsAfterFinished": 100},
        {"podCleanup": "All"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_change_of_an_editable_field_is_stored(jobs: Any, running: str, change: dict[str, Any]) -> None:
    done = jobs.patch(running, {"spec": change})
    assert done.returncode == 0, done.stderr
    ((field, value),) = change.items()
    stored = jobs.get(running)["spec"][field]
    assert stored == value if not isinstance(value, dict) else value.items() <= stored.items()


OVER_ETCD = {"rendezvous": {"backend": "etcd", "etcd": {"endpoints": ["https://etcd:2379"]}}}
BOUNDS = {"minReplicas": 1, "maxReplicas": 4}


def test_sizes_of_a_running_job_over_etcd_change_only_within_its_bounds(jobs: Any) -> None:
    """Its agents keep the sizes that they were started with."""
    jobs.create("elastic", {**OVER_ETCD, "elastic": BOUNDS})
    assert jobs.kubectl("scale", "tjob/elastic", "--replicas=4").returncode == 0
    assert jobs.patch("elastic", {"spec": {"elastic": {"regrow": False}}}).returncode == 0
    jobs.create("fixed", OVER_ETCD)
    for name, change in (
        ("elastic", {"elastic": {"maxReplicas": 8}}),
        ("elastic", {"elastic": {"sizes": [1, 2, 4]}}),
        ("elastic", {"elastic": None}),
        ("fixed", {"replicas": 3}),
        ("fixed", {"elastic": BOUNDS}),
    ):
        done = jobs.patch(name, {"spec": change})
        assert done.returncode != 0
        assert "set spec.suspend: true" in done.stderr
    assert jobs.patch("fixed", {"spec": {"suspend": True}}).returncode == 0
    assert jobs.patch("fixed", {"spec": {"replicas": 3, "suspend": False}}).returncode == 0


def test_sizes_of_a_running_job_over_the_operators_rounds_change(jobs: Any) -> None:
    """The operator tells the agents that run."""
    jobs.create("ruled", {"rendezvous": {"backend": "everstep"}})
    for change in (
        {"replicas": 3},
        {"elastic": BOUNDS},
        {"elastic": {"maxReplicas": 8}},
        {"elastic": {"sizes": [1, 2, 3]}},
        {"elastic": None},
    ):
        done = jobs.patch("ruled", {"spec": change})
        assert done.returncode == 0, done.stderr


def test_manager_added_to_a_job_without_one_is_denied_case_06(jobs: Any) -> None:
    jobs.create("unmanaged", {})
    done = jobs.patch("unmanaged", {"spec": {"managedBy": "example.com/other"}})
    assert done.returncode != 0
    assert "spec.managedBy is immutable" in done.stderr


def test_scale_changes_replicas_within_bounds_only(jobs: Any) -> None:
    jobs.create("scaled", {})
    assert jobs.kubectl("scale", "tjob/scaled", "--replicas=6").returncode == 0
    for refused in ("0", "4097"):
        done = jobs.kubectl("scale", "tjob/scaled", f"--replicas={refused}")
        assert done.returncode != 0
        assert "spec.replicas" in done.stderr
    assert jobs.get("scaled")["spec"]["replicas"] == 6


FULL_STATUS: dict[str, Any] = {
    "observedGeneration": 3,
    "replicas": 4,
    "readyReplicas": 4,
    "selector": "everstep.dev/job=shown",
    "startTime": "2026-11-21T11:00:00Z",
    "completionTime": "2026-11-21T12:00:00Z",
    "world": {"round": 7, "size": 4, "since": "2026-11-21T11:00:00Z"},
    "progress": {
        "step": 12400,
        "totalSteps": 100000,
        "epoch": 3,
        "etaSeconds": 5400,
        "metrics": {"loss": "0.12"},
        "steppedAt": "2026-11-21T10:59:58Z",
        "updatedAt": "2026-11-21T11:00:00Z",
    },
    "checkpoint": {
        "lastCommittedStep": 12350,
        "committedAt": "2026-11-21T11:00:00Z",
        "url": "s3://bucket/shown",
        "healthy": True,
    },
    "restarts": {"userCode": 0, "infrastructure": 2, "preemption": 1, "inWindow": 0, "withoutProgress": 0},
    "recoveries": [
        {
            "at": "2026-11-21T11:00:00Z",
            "cause": "NodeLost",
            "worker": 2,
            "node": "n1",
            "rung": "recreate",
            "detectMs": 800,
            "rendezvousMs": 90,
            "restoreMs": 400,
            "firstStepMs": 60,
            "lostSteps": 1,
        }
    ],
    "goodputPercent": 97,
    "stateSeconds": {"productive": 3500, "replay": 5, "detect": 1, "form": 40, "restore": 3, "wait": 50, "unknown": 1},
    "failure": {
        "cause": "Error",
        "message": "worker 1 ended with exit code 3",
        "at": "2026-11-21T11:00:00Z",
        "worker": 1,
        "pod": "shown-w1-0",
        "node": "n1",
        "exitCode": 3,
        "logLines": ["Traceback", "ValueError"],
    },
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Running",
            "message": "4 of 4 workers train",
            "lastTransitionTime": "2026-11-21T11:00:00Z",
            "observedGeneration": 3,
        }
    ],
}


@pytest.fixture(scope="module")
def shown(jobs: Any) -> str:
    """A job with every field of the status written."""
    jobs.create("shown", {})
    done = jobs.patch("shown", {"status": parse_status(FULL_STATUS).to_wire()}, "--subresource=status")
    assert done.returncode == 0, done.stderr
    return "shown"


def test_whole_status_survives_the_schema(jobs: Any, shown: str) -> None:
    stored = jobs.get(shown)["status"]
    assert stored == parse_status(FULL_STATUS).to_wire()
    assert stored["goodput"] == "97%"
    assert stored["restarts"]["total"] == 3


def test_least_status_survives_the_schema(jobs: Any) -> None:
    jobs.create("fresh", {})
    status = Status(start_time=datetime(2026, 11, 21, 11, tzinfo=UTC))
    done = jobs.patch("fresh", {"status": status.to_wire()}, "--subresource=status")
    assert done.returncode == 0, done.stderr
    assert parse_status(jobs.get("fresh")["status"]) == status


def test_kubectl_get_shows_the_columns_of_the_design(jobs: Any, shown: str) -> None:
    narrow = jobs.kubectl("get", "tjob", shown).stdout.splitlines()
    wide = jobs.kubectl("get", "tjob", shown, "-o", "wide").stdout.splitlines()
    head = ["NAME", "STATUS", "READY", "DESIRED", "MIN", "MAX", "STEP", "CKPT", "RESTARTS", "GOODPUT", "AGE"]
    assert narrow[0].split() == head
    assert narrow[1].split()[:-1] == ["shown", "Running", "4", "2", "12400", "12350", "3", "97%"]
    assert wide[0].split() == [*head, "ROUND", "SPARES", "LAST-FAILURE", "ETA", "IMAGE"]
    assert wide[1].split()[-4:] == ["7", "NodeLost", "5400", "train:1"]


def test_kubectl_wait_sees_the_ready_condition(jobs: Any, shown: str) -> None:
    done = jobs.kubectl("wait", f"tjob/{shown}", "--for=condition=Ready", "--timeout=10s")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ["spec.checkpoint.everySeconds", "spec.recovery.rules", "status.restarts"])
def test_kubectl_explain_describes_a_field(jobs: Any, path: str) -> None:
    done = jobs.kubectl("explain", f"trainingjob.{path}")
    assert done.returncode == 0, done.stderr
    assert "DESCRIPTION:" in done.stdout
