"""The TrainingJob's types: defaults, bounds, errors that name the field, and what is derived."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from everstep_operator.api import (
    Cause,
    Condition,
    ConditionStatus,
    ConditionType,
    EventReason,
    EventType,
    HangMode,
    PodCleanup,
    RendezvousBackend,
    Restarts,
    SpecError,
    Status,
    event_type,
    parse_spec,
    parse_status,
)
from everstep_operator.api.allowlist import checkpoint_url_refusal
from everstep_operator.api.conditions import Suspicion
from everstep_operator.api.status import CheckpointStatus, Failure, Progress, StateSeconds, World

ETCD = {"endpoints": ["http://etcd-0:2379", "http://etcd-1:2379"]}


def elastic(**fields: Any) -> dict[str, Any]:
    """Of two workers, with an etcd."""
    return {
        "elastic": {"minReplicas": 1, "maxReplicas": 4, **fields},
        "rendezvous": {"backend": "etcd", "etcd": ETCD},
    }


def spec(**fields: Any) -> dict[str, Any]:
    container = {"name": "worker", "image": "train:1", **fields.pop("worker", {})}
    return {"replicas": 2, "template": {"spec": {"containers": [container]}}, **fields}


def test_minimal_spec_has_the_documented_defaults() -> None:
    parsed = parse_spec(spec())
    assert parsed.rendezvous.backend == RendezvousBackend.EVERSTEP
    assert parsed.rendezvous.join_timeout_seconds == 600
    assert parsed.recovery.max_restarts == 10
    assert parsed.recovery.restart_window_seconds == 3600
    assert (parsed.recovery.backoff_seconds.initial, parsed.recovery.backoff_seconds.max) == (1, 300)
    assert parsed.recovery.no_progress_limit == 3
    assert (parsed.recovery.hang.mode, parsed.recovery.hang.floor_seconds) == (HangMode.AUTO, 60)
    assert parsed.pod_cleanup == PodCleanup.RUNNING
    assert parsed.pod_disruption_budget
    assert parsed.checkpoint is None
    assert parsed.processes() == 1


@pytest.mark.parametrize(
    ("given", "seconds"),
    [({}, 600), ({"everySeconds": 30}, 30), ({"everySteps": 100}, None)],
    ids=["neither", "seconds", "steps"],
)
def test_checkpoint_interval_is_600_seconds_unless_one_is_given(given: dict[str, int], seconds: int | None) -> None:
    checkpoint = parse_spec(spec(checkpoint={"url": "s3://bucket/job", **given})).checkpoint
    assert checkpoint is not None
    assert checkpoint.interval_seconds == seconds


@pytest.mark.parametrize(
    ("resources", "count"),
    [
        ({}, 1),
        ({"limits": {"cpu": "8"}}, 1),
        ({"limits": {"nvidia.com/gpu": "4"}}, 4),
        ({"requests": {"amd.com/gpu": 2}}, 2),
        ({"limits": {"nvidia.com/gpu": "8"}, "requests": {"nvidia.com/gpu": "8"}}, 8),
        ({"limits": {"nvidia.com/gpu": "0"}}, 1),
        ({"limits": {"nvidia.com/gpu.shared": "2"}}, 2),
        ({"limits": {"nvidia.com/mig-1g.10gb": "3", "nvidia.com/mig-3g.40gb": 1}}, 4),
        ({"limits": {"amd.com/cpx_nps4": "8"}}, 8),
        ({"limits": {"gpu.intel.com/i915": "2", "gpu.intel.com/memory.max": "1000"}}, 2),
        ({"limits": {"gpu.intel.com/xe": "2"}}, 2),
        ({"limits": {"habana.ai/gaudi": "8"}}, 8),
        ({"limits": {"aws.amazon.com/neuroncore": "32", "vpc.amazonaws.com/efa": "8"}}, 32),
        ({"limits": {"rdma/hca_shared_devices_a": "1", "hugepages-2Mi": "1Gi", "example.com/sriov_net": "1"}}, 1),
    ],
)
def test_auto_processes_are_the_devices_asked_for_else_one(resources: dict[str, Any], count: int) -> None:
    assert parse_spec(spec(processesPerReplica="auto", worker={"resources": resources})).processes() == count


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"claims": [{"name": "gpus"}]}, "auto cannot tell how many devices the resource claims gpus hold"),
        ({"limits": {"aws.amazon.com/neuron": "1"}}, "auto does not know how many processes the resource aws."),
        ({"limits": {"google.com/tpu": "4"}}, "auto does not know how many processes the resource google.com/tpu"),
        ({"limits": {"example.com/npu": "8"}}, "auto does not know how many processes the resource example.com/npu"),
        ({"limits": {"nvidia.com/gpu": "1k"}}, "auto cannot read '1k' of the resource nvidia.com/gpu"),
        ({"limits": {"aws.amazon.com/neuroncore": "128"}}, "auto finds 128 devices"),
    ],
)
def test_auto_that_cannot_be_counted_is_refused_and_a_number_is_not(resources: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(f"spec.processesPerReplica: {words}")):
        parse_spec(spec(processesPerReplica="auto", worker={"resources": resources}))
    assert parse_spec(spec(processesPerReplica=8, worker={"resources": resources})).processes() == 8


def test_nulls_are_absent_fields_but_stay_in_the_template() -> None:
    raw = spec(activeDeadlineSeconds=None, recovery={"hang": {"timeoutSeconds": None}})
    raw["template"]["metadata"] = None
    parsed = parse_spec(raw)
    assert parsed.active_deadline_seconds is None
    assert parsed.template["metadata"] is None


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"replicas": 0}, "spec.replicas"),
        ({"replicas": True}, "spec.replicas"),
        ({"replicas": "3"}, "spec.replicas"),
        ({"epochs": 3}, "spec.epochs"),
        ({"processesPerReplica": "cpu"}, "spec.processesPerReplica"),
        ({"processesPerReplica": 65}, "spec.processesPerReplica"),
        (
            {"recovery": {"rules": [{"action": "Fail", "onExitCodes": [1, 256]}]}},
            "spec.recovery.rules[0].onExitCodes[1]",
        ),
        ({"recovery": {"rules": [{"action": "Fail"}]}}, "spec.recovery.rules[0]"),
        ({"recovery": {"backoffSeconds": {"initial": 9, "max": 3}}}, "spec.recovery.backoffSeconds.initial"),
        (
            {"recovery": {"hang": {"mode": "Fixed", "timeoutSeconds": 9}}, "rendezvous": {"backend": "c10d"}},
            "spec.recovery.hang.mode",
        ),
        ({"checkpoint": {"url": "s3://b/../c"}}, "spec.checkpoint.url"),
        ({"elastic": {"minReplicas": 4, "maxReplicas": 2}}, "spec.elastic.minReplicas"),
        ({"elastic": {"minReplicas": 1, "maxReplicas": 4}, "rendezvous": {"backend": "c10d"}}, "spec.elastic"),
        (
            {
                "elastic": {"minReplicas": 1, "maxReplicas": 4, "spares": 1},
                "rendezvous": {"backend": "etcd", "etcd": {"endpoints": ["http://etcd:2379"]}},
            },
            "spec.elastic.spares",
        ),
        (
            {"successPolicy": "Worker0", "elastic": {"minReplicas": 1, "maxReplicas": 4, "spares": 1}},
            "spec.successPolicy",
        ),
        ({"successPolicy": "Chief"}, "spec.successPolicy"),
        ({"elastic": {"minReplicas": 1, "maxReplicas": 4096, "spares": 1}}, "spec.elastic.spares"),
        ({"elastic": {"minReplicas": 1, "maxReplicas": 4, "spares": -1}}, "spec.elastic.spares"),
        (elastic(sizes=[4]), "spec.replicas"),
        (elastic(shrinkAfterSeconds=5, regrow=False), "spec.elastic.shrinkAfterSeconds"),
        ({"rendezvous": {"backend": "etcd"}}, "spec.rendezvous.etcd"),
        ({"rendezvous": {"etcd": ETCD}}, "spec.rendezvous.etcd"),
        ({"template": {"spec": {"containers": [{"name": "main"}]}}}, "spec.template"),
        ({"template": "x"}, "spec.template"),
        ({"template": {"spec": None}}, "spec.template.spec"),
        ({"template": {"spec": {"containers": []}}}, "spec.template.spec.containers"),
        ({"worker": {"env": [{"name": f"V{i}"} for i in range(1001)]}}, "spec.template.spec.containers[0].env"),
        ({"worker": {"args": ["a", "x" * 32_769]}}, "spec.template.spec.containers[0].args[1]"),
        ({"worker": {"command": "torchrun"}}, "spec.template.spec.containers[0].command"),
        ({"worker": {"resources": "x"}}, "spec.template.spec.containers[0].resources"),
        ({"worker": {"resources": {"limits": 5}}}, "spec.template.spec.containers[0].resources.limits"),
        ({"worker": {"resources": {"requests": ["a"]}}}, "spec.template.spec.containers[0].resources.requests"),
        (
            {"worker": {"resources": {"claims": 5}}, "processesPerReplica": "auto"},
            "spec.template.spec.containers[0].resources.claims",
        ),
        *(
            ({"template": {"spec": {"containers": [{"name": "worker"}], **fields}}}, f"spec.template.spec.{path}")
            for fields, path in (
                ({"nodeSelector": "x"}, "nodeSelector"),
                ({"nodeSelector": ["x"]}, "nodeSelector"),
                ({"nodeSelector": {"gpu": True}}, "nodeSelector.gpu"),
                ({"affinity": "x"}, "affinity"),
                ({"affinity": {"nodeAffinity": "x"}}, "affinity.nodeAffinity"),
                (
                    {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": 1}}},
                    "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution",
                ),
            )
        ),
        *(
            ({"template": {"spec": {"containers": [{"name": "worker"}], field: value}}}, f"spec.template.spec.{field}")
            for field in ("terminationGracePeriodSeconds", "activeDeadlineSeconds")
            for value in (10**12, 31_536_001, -1, True, "30", 1.5)
        ),
    ],
)
def test_wrong_field_is_refused_by_its_path(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(spec(**fields))
    assert caught.value.path == path


def test_spec_written_and_read_again_is_the_same() -> None:
    first = parse_spec(spec(processesPerReplica="auto", checkpoint={"url": "gs://b/c", "everySteps": 5}))
    assert parse_spec(first.to_wire()) == first


def test_edited_totals_in_a_status_are_computed_anew() -> None:
    status = parse_status(
        {"restarts": {"userCode": 1, "preemption": 2, "total": 99}, "goodputPercent": 97, "goodput": "1%"}
    )
    assert status.restarts.total == 3
    assert status.goodput == "97%"
    assert Restarts(user_code=2, infrastructure=3).total == 5


def test_status_of_a_newer_operator_is_read_without_its_new_fields() -> None:
    assert (
        parse_status({"readyReplicas": 3, "moonPhase": "full", "world": {"round": 7, "colour": "red"}}).world.round == 7
    )


def test_field_of_a_status_that_cannot_be_read_is_left_out_and_the_others_stand() -> None:
    done = {
        "type": "Complete",
        "status": "True",
        "reason": "Complete",
        "message": "all 2 workers succeeded",
        "lastTransitionTime": "2026-11-21T11:00:00Z",
    }
    status = parse_status(
        {
            "readyReplicas": 3,
            "world": {"round": "seven"},
            "failure": {"message": "without a cause"},
            "restarts": {"userCode": 2**53 - 1, "preemption": 1},
            "conditions": [{**done, "type": "OfAnotherVersion"}, done],
        }
    )
    assert (status.ready_replicas, status.world, status.failure, status.restarts) == (3, World(), None, Restarts())
    assert [condition.type for condition in status.conditions] == [ConditionType.COMPLETE]


@pytest.mark.parametrize("value", ["", 7, -1, 0.5, True, [1], [{"type": 1}], {"a": 1}, {}, [], 2**70])
def test_status_can_be_read_whatever_a_field_holds(value: Any) -> None:
    for name in Status.model_fields:
        field = to_camel(name)
        status = parse_status({"observedGeneration": 5, field: value})
        assert field == "observedGeneration" or status.observed_generation == 5


@pytest.mark.parametrize(
    ("wrong", "left"),
    [
        ({"reasons": ["OfANewerOperator", "Hang"]}, {"n": (Suspicion.HANG,), "m": ()}),
        ({"reasons": [None, "Hang"]}, {"n": (Suspicion.HANG,), "m": ()}),
        ({"name": 1}, {"m": ()}),
        ({"points": "1"}, {"m": ()}),
        ({"at": "yesterday", "reasons": ["OfANewerOperator"]}, {"m": ()}),
    ],
)
def test_wrong_entry_about_a_node_leaves_the_restart_budget_charged(
    wrong: dict[str, Any], left: dict[str, tuple[Suspicion, ...]]
) -> None:
    node = {"points": 60, "at": "2026-01-01T00:00:00Z"}
    listed = [{**node, "name": "n", **wrong}, {**node, "name": "m"}]
    restarts = parse_status({"restarts": {"userCode": 3, "inWindow": 2, "total": 3, "suspectNodes": listed}}).restarts
    assert (restarts.user_code, restarts.in_window, restarts.total) == (3, 2, 3)
    assert {node.name: node.reasons for node in restarts.suspect_nodes} == left


def test_list_longer_than_this_version_allows_keeps_its_first_entries() -> None:
    rejected = [f"n{index}" for index in range(30)]
    status = parse_status({"restarts": {"userCode": 3, "rejectedBy": rejected}})
    assert (status.restarts.user_code, status.restarts.rejected_by) == (3, tuple(rejected[:8]))
    ranges = [{"first": 0, "last": 0, "incarnation": 0}] * 5000
    assert parse_status({"roster": {"wanted": 2, "workers": ranges}}).roster is None, "a part would be another roster"


def test_roster_or_world_with_a_wrong_part_is_not_read_in_parts() -> None:
    """The workers of a range that is left out would be deleted."""
    ranges = [{"first": 0, "last": 0, "incarnation": 0}, {"first": 1, "last": 1, "incarnation": "0"}]
    status = parse_status(
        {"roster": {"wanted": 2, "workers": ranges}, "world": {"round": 7, "size": "2"}, "readyReplicas": 2}
    )
    assert (status.roster, status.world, status.ready_replicas) == (None, World(), 2)


@pytest.mark.parametrize("value", ["", 7, -1, 0.5, True, [1], [{"type": 1}], {"a": 1}, {}, [], 2**70])
@pytest.mark.parametrize(
    ("section", "kept"),
    [
        ("restarts", ("userCode", 3)),
        ("restarts", ("inWindow", 3)),
        ("progress", ("step", 3)),
        ("checkpoint", ("lastCommittedStep", 3)),
        ("stateSeconds", ("productive", 3)),
        ("failure", ("message", "why")),
    ],
)
def test_wrong_field_of_a_section_of_a_status_takes_no_other_with_it(
    section: str, kept: tuple[str, Any], value: Any
) -> None:
    required = {"cause": "Error", "message": "why"} if section == "failure" else {}
    models: dict[str, type[BaseModel]] = {
        "restarts": Restarts,
        "progress": Progress,
        "checkpoint": CheckpointStatus,
        "stateSeconds": StateSeconds,
        "failure": Failure,
    }
    for name in map(to_camel, models[section].model_fields):
        if name not in (*required, kept[0]):
            status = parse_status({section: {**required, kept[0]: kept[1], name: value}}).to_wire()
            assert status[section][kept[0]] == kept[1], name


def test_wrong_line_or_figure_is_left_out_alone() -> None:
    status = parse_status(
        {
            "failure": {"cause": "Error", "message": "why", "logLines": ["a", 7, "b"], "exitCode": 999},
            "progress": {"step": 5, "metrics": {"loss": "0.5", "rate": 3, "": "x"}},
        }
    )
    assert status.failure is not None
    assert (status.failure.log_lines, status.failure.exit_code) == (("a", "b"), None)
    assert (status.progress.step, status.progress.metrics) == (5, {"loss": "0.5"})


def test_times_are_written_in_utc_and_whole_seconds() -> None:
    berlin = timezone(timedelta(hours=1))
    condition = Condition(
        type=ConditionType.READY,
        status=ConditionStatus.TRUE,
        reason="Running",
        last_transition_time=datetime(2026, 11, 21, 13, 0, 0, 999, tzinfo=berlin),
    )
    assert condition.to_wire()["lastTransitionTime"] == "2026-11-21T12:00:00Z"
    assert parse_status(Status(conditions=(condition,)).to_wire()).condition(ConditionType.READY) is not None


def test_time_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="timezone"):
        Status(start_time=datetime(2026, 11, 21))


def test_every_event_reason_has_a_type_and_losses_are_warnings() -> None:
    assert {event_type(reason) for reason in EventReason} == set(EventType)
    assert event_type(EventReason.WORKER_LOST) == EventType.WARNING
    assert event_type(EventReason.WORLD_FORMED) == EventType.NORMAL


def test_causes_fit_the_rules_that_match_them() -> None:
    rules = [{"onReasons": [cause.value for cause in Cause], "action": "Restart"}]
    assert parse_spec(spec(recovery={"rules": rules})).recovery.rules[0].on_reasons == tuple(Cause)


@pytest.mark.parametrize(
    ("url", "prefixes"),
    [
        ("s3://bucket/a", ("s3://",)),
        ("s3://ckpt/team-a/run", ("s3://ckpt/{namespace}/",)),
        ("abfs://box@account/run", ("abfs://box@account/",)),
        ("gs://b/c", ("s3://", "gs://")),
    ],
)
def test_url_inside_the_allow_list_is_accepted(url: str, prefixes: tuple[str, ...]) -> None:
    assert checkpoint_url_refusal(url, "team-a", prefixes) is None


@pytest.mark.parametrize(
    ("url", "prefixes"),
    [
        ("file:///etc", ("s3://",)),
        ("s3://ckpt/team-b/run", ("s3://ckpt/{namespace}/",)),
        ("s3://ckpt/team-a/../team-b", ("s3://ckpt/{namespace}/",)),
        ("s3://ckpt/team-a/%2e%2e/team-b", ("s3://ckpt/{namespace}/",)),
        ("s3://key:secret@bucket/a", ("s3://",)),
        ("http://169.254.169.254/latest", ("http://",)),
        ("http://169.254.169.254:80/latest", ("http://",)),
        ("http://[fe80::1]/latest", ("http://",)),
        ("s3://bucket/a?endpoint=x", ("s3://",)),
        ("s3://bucket/a", ()),
    ],
)
def test_url_outside_the_allow_list_is_refused_by_its_field(url: str, prefixes: tuple[str, ...]) -> None:
    assert "spec.checkpoint.url" in (checkpoint_url_refusal(url, "team-a", prefixes) or "")


@pytest.mark.parametrize("fields", [{}, {"sizes": [1, 2, 4]}, {"groupSize": 1, "regrow": False}])
def test_elastic_job_over_etcd_or_the_operator_is_accepted(fields: dict[str, Any]) -> None:
    over_etcd = elastic(**fields)
    assert parse_spec(spec(**over_etcd)).rendezvous.backend is RendezvousBackend.ETCD
    parsed = parse_spec(spec(**{**over_etcd, "rendezvous": {"backend": "everstep"}}))
    assert parsed.rendezvous.backend is RendezvousBackend.EVERSTEP
    assert parsed.elastic is not None
    assert parsed.elastic.max_replicas == 4
