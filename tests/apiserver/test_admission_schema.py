"""What the CRD alone refuses, asked of a real API server: cases 1 to 5 and part of 11 of the failure list.

Every refusal is checked three times: the message names the field, nothing was created, and the operator's own parser
refuses the same spec. Fields that a later version implements are refused in the same way.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from everstep_operator.api import SpecError, parse_spec

pytestmark = pytest.mark.apiserver

ABSENT = "<absent>"
CONTAINER = {"name": "worker", "image": "train:1", "command": ["torchrun", "train.py"]}
ELASTIC = {"minReplicas": 2, "maxReplicas": 8}
ETCD = {"endpoints": ["https://etcd:2379"]}
OVER_ETCD: dict[str, Any] = {"rendezvous": {"backend": "etcd", "etcd": ETCD}}
RULE = {"onExitCodes": [2], "action": "Fail"}


def _containers(*containers: dict[str, Any]) -> dict[str, Any]:
    return {"template.spec.containers": list(containers)}


def _rules(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"recovery.rules": list(rules)}


# name of the case -> (changes, what the message names)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "case_01_replicas_zero": ({"replicas": 0}, "spec.replicas"),
    "case_01_replicas_negative": ({"replicas": -1}, "spec.replicas"),
    "case_01_replicas_two_to_the_31": ({"replicas": 2**31}, "spec.replicas"),
    "case_01_replicas_two_to_the_63": ({"replicas": 2**63}, "spec.replicas"),
    "case_01_replicas_above_the_limit": ({"replicas": 4097}, "spec.replicas"),
    "case_01_replicas_fraction": ({"replicas": 1.5}, "spec.replicas"),
    "case_01_replicas_text": ({"replicas": "3"}, "spec.replicas"),
    "case_01_replicas_boolean": ({"replicas": True}, "spec.replicas"),
    "case_01_replicas_absent": ({"replicas": ABSENT}, "spec.replicas"),
    "case_02_min_above_max": ({"elastic": {"minReplicas": 8, "maxReplicas": 2}}, "spec.elastic.minReplicas"),
    "case_02_min_absent": ({"elastic": {"maxReplicas": 2}}, "spec.elastic.minReplicas"),
    "case_02_min_zero": ({"elastic": {**ELASTIC, "minReplicas": 0}}, "spec.elastic.minReplicas"),
    "case_02_replicas_below_min": ({"replicas": 1, "elastic": ELASTIC}, "spec.replicas"),
    "case_02_replicas_above_max": ({"replicas": 9, "elastic": ELASTIC}, "spec.replicas"),
    "case_02_max_not_of_groups": (
        {"elastic": {"minReplicas": 2, "maxReplicas": 7, "groupSize": 2}},
        "spec.elastic.maxReplicas",
    ),
    "case_02_min_not_of_groups": (
        {"elastic": {"minReplicas": 1, "maxReplicas": 8, "groupSize": 2}},
        "spec.elastic.minReplicas",
    ),
    "case_02_size_outside_bounds": ({"elastic": {**ELASTIC, "sizes": [2, 16]}}, "spec.elastic.sizes"),
    "case_02_size_not_of_groups": ({"elastic": {**ELASTIC, "sizes": [2, 5], "groupSize": 2}}, "spec.elastic.sizes"),
    "case_02_too_many_sizes": ({"elastic": {**ELASTIC, "sizes": [2] * 65}}, "spec.elastic.sizes"),
    "case_02_group_of_none": ({"elastic": {**ELASTIC, "groupSize": 0}}, "spec.elastic.groupSize"),
    "case_02_processes_zero": ({"processesPerReplica": 0}, "spec.processesPerReplica"),
    "case_02_processes_too_many": ({"processesPerReplica": 65}, "spec.processesPerReplica"),
    "case_02_processes_word": ({"processesPerReplica": "cpu"}, "spec.processesPerReplica"),
    "case_02_processes_number_in_quotes": ({"processesPerReplica": "2"}, "spec.processesPerReplica"),
    "case_03_unknown_field": ({"epochs": 3}, "spec.epochs"),
    "case_03_misspelled_field": ({"recovery.maxRestart": 3}, "spec.recovery.maxRestart"),
    "case_03_unknown_field_of_rule": (_rules({**RULE, "delay": 3}), "spec.recovery.rules[0].delay"),
    "case_03_unknown_backend": ({"rendezvous.backend": "mpi"}, "spec.rendezvous.backend"),
    "case_03_unknown_cleanup": ({"podCleanup": "Some"}, "spec.podCleanup"),
    "case_03_unknown_success_policy": ({"successPolicy": "Chief"}, "spec.successPolicy"),
    "case_03_worker_0_decides_beside_spares": (
        {"successPolicy": "Worker0", "elastic": {**ELASTIC, "spares": 1}},
        "spec.successPolicy",
    ),
    "case_03_unknown_hang_mode": ({"recovery.hang.mode": "Maybe"}, "spec.recovery.hang.mode"),
    "case_03_bare_off_in_yaml_is_a_boolean": ({"recovery.hang.mode": False}, "spec.recovery.hang.mode"),
    "case_03_unknown_action": (_rules({**RULE, "action": "Retry"}), "spec.recovery.rules[0].action"),
    "case_03_unknown_reason": (
        _rules({"onReasons": ["Bored"], "action": "Fail"}),
        "spec.recovery.rules[0].onReasons[0]",
    ),
    "case_03_text_for_a_boolean": ({"podDisruptionBudget": "yes"}, "spec.podDisruptionBudget"),
    "case_03_rule_without_action": (_rules({"onExitCodes": [2]}), "spec.recovery.rules[0].action"),
    "case_03_rule_without_condition": (_rules({"action": "Fail"}), "spec.recovery.rules"),
    "case_03_rule_with_two_conditions": (
        _rules({**RULE, "onReasons": ["Evicted"]}),
        "spec.recovery.rules",
    ),
    "case_03_exit_code_zero": (
        _rules({**RULE, "onExitCodes": [0]}),
        "spec.recovery.rules[0].onExitCodes",
    ),
    "case_03_exit_code_256": (
        _rules({**RULE, "onExitCodes": [256]}),
        "spec.recovery.rules[0].onExitCodes",
    ),
    "case_03_too_many_rules": (_rules(*[RULE] * 33), "spec.recovery.rules"),
    "case_03_restarts_negative": ({"recovery.maxRestarts": -1}, "spec.recovery.maxRestarts"),
    "case_03_backoff_above_its_max": (
        {"recovery.backoffSeconds": {"initial": 60, "max": 30}},
        "spec.recovery.backoffSeconds.initial",
    ),
    "case_03_hang_fixed_without_timeout": ({"recovery.hang.mode": "Fixed"}, "spec.recovery.hang.timeoutSeconds"),
    "case_03_join_timeout_too_short": ({"rendezvous.joinTimeoutSeconds": 9}, "spec.rendezvous.joinTimeoutSeconds"),
    "case_03_keep_none": ({"checkpoint": {"url": "s3://b/c", "keep": 0}}, "spec.checkpoint.keep"),
    "case_03_keep_too_many": ({"checkpoint": {"url": "s3://b/c", "keep": 101}}, "spec.checkpoint.keep"),
    "case_03_two_intervals": (
        {"checkpoint": {"url": "s3://b/c", "everySeconds": 5, "everySteps": 5}},
        "spec.checkpoint.everySeconds",
    ),
    "case_03_checkpoint_without_url": ({"checkpoint": {"keep": 3}}, "spec.checkpoint.url"),
    "case_03_secret_name_with_slash": (
        {"checkpoint": {"url": "s3://b/c", "secretRef": {"name": "a/b"}}},
        "spec.checkpoint.secretRef.name",
    ),
    "case_03_manager_without_domain": ({"managedBy": "kueue"}, "spec.managedBy"),
    "case_03_deadline_zero": ({"activeDeadlineSeconds": 0}, "spec.activeDeadlineSeconds"),
    "case_03_ttl_negative": ({"ttlSecondsAfterFinished": -1}, "spec.ttlSecondsAfterFinished"),
    "case_03_no_template": ({"template": ABSENT}, "spec.template"),
    "case_03_template_without_spec": ({"template": {}}, "spec.template.spec"),
    "case_03_no_containers": (_containers(), "spec.template.spec.containers"),
    "case_03_no_worker_container": (_containers({"name": "main", "image": "x"}), "spec.template.spec.containers"),
    "case_03_two_worker_containers": (_containers(CONTAINER, CONTAINER), "spec.template.spec.containers"),
    "case_03_command_is_text": (_containers({**CONTAINER, "command": "torchrun x"}), "containers[0].command"),
    "case_04_ten_thousand_variables": (
        _containers({**CONTAINER, "env": [{"name": f"V{i}", "value": "x"} for i in range(10_000)]}),
        "spec.template.spec.containers[0].env",
    ),
    "case_04_argument_of_100_kb": (_containers({**CONTAINER, "args": ["x" * 100_000]}), "containers[0].args[0]"),
    "case_04_a_thousand_arguments": (_containers({**CONTAINER, "args": ["x"] * 1000}), "containers[0].args"),
    "case_04_too_many_containers": (
        _containers(CONTAINER, *({"name": f"c{i}", "image": "x"} for i in range(20))),
        "spec.template.spec.containers",
    ),
    "case_04_too_many_volumes": (
        {"template.spec.volumes": [{"name": f"v{i}", "emptyDir": {}} for i in range(257)]},
        "spec.template.spec.volumes",
    ),
    "case_04_huge_annotation": ({"template.metadata": {"annotations": {"a": "x" * 40_000}}}, "annotations"),
    "case_11_url_climbs": ({"checkpoint.url": "s3://bucket/mine/../theirs"}, "spec.checkpoint.url"),
    "case_11_url_without_scheme": ({"checkpoint.url": "/etc"}, "spec.checkpoint.url"),
    "case_11_url_with_newline": ({"checkpoint.url": "s3://bucket/a\nb"}, "spec.checkpoint.url"),
    "case_11_url_with_space": ({"checkpoint.url": "s3://bucket/a b"}, "spec.checkpoint.url"),
    "case_11_url_too_long": ({"checkpoint.url": "s3://bucket/" + "a" * 1024}, "spec.checkpoint.url"),
    "case_02_elastic_over_c10d": ({"elastic": ELASTIC, "rendezvous.backend": "c10d"}, "spec.elastic needs"),
    "case_02_replicas_below_the_sizes": ({**OVER_ETCD, "elastic": {**ELASTIC, "sizes": [4, 8]}}, "spec.replicas"),
    "case_02_etcd_without_endpoints": ({"rendezvous.backend": "etcd"}, "spec.rendezvous.etcd.endpoints"),
    "shrink_after_without_a_replacement": (
        {**OVER_ETCD, "elastic": {**ELASTIC, "shrinkAfterSeconds": 5, "regrow": False}},
        "spec.elastic.shrinkAfterSeconds needs regrow",
    ),
    "hang_fixed_over_c10d": (
        {"recovery.hang": {"mode": "Fixed", "timeoutSeconds": 60}, "rendezvous.backend": "c10d"},
        "spec.recovery.hang.mode Fixed needs",
    ),
}

NAMES_REFUSED = {
    "case_05_name_of_49_characters": "a" * 49,
    "case_05_name_of_253_characters": "a" * 253,
    "case_05_name_with_dots": "a.b",
    "case_05_name_begins_with_a_digit": "1a",
    "case_05_name_ends_with_a_dash": "a-",
    "case_05_name_with_capitals": "Digits",
}


@pytest.mark.parametrize(("changes", "field"), REFUSED.values(), ids=REFUSED)
def test_bad_spec_is_refused_by_name_of_the_field(jobs: Any, changes: dict[str, Any], field: str) -> None:
    done = jobs.try_create("refused", changes)
    assert done.returncode != 0
    assert field in done.stderr
    assert not jobs.exists("refused")
    with pytest.raises(SpecError):
        parse_spec(jobs.body("refused", changes)["spec"])


@pytest.mark.parametrize("name", NAMES_REFUSED.values(), ids=NAMES_REFUSED)
def test_name_that_makes_no_host_name_is_refused(jobs: Any, name: str) -> None:
    done = jobs.try_create(name, {})
    assert done.returncode != 0
    assert "metadata.name" in done.stderr
    assert not jobs.exists(name)


def test_longest_name_is_accepted_case_05(jobs: Any) -> None:
    assert jobs.create("a" * 48, {})["metadata"]["name"] == "a" * 48


@pytest.mark.parametrize(
    ("size", "message"),
    [(2_900_000, "larger than max"), (3_300_000, "too large")],
    ids=["case_04_below_the_request_limit", "case_04_above_the_request_limit"],
)
def test_spec_of_megabytes_is_refused_and_nothing_is_stored(jobs: Any, size: int, message: str) -> None:
    # In a field that the schema leaves open: what bounds it is the server's limit of a request and of an object.
    done = jobs.try_create("refused", _containers({**CONTAINER, "volumeDevices": [{"name": "x" * size}]}))
    assert done.returncode != 0
    assert message in done.stderr
    assert not jobs.exists("refused")


@pytest.mark.parametrize("how", [("apply",), ("apply", "--server-side")], ids=["client-side", "server-side"])
def test_unknown_field_in_kubectl_apply_is_refused_not_pruned_case_03(jobs: Any, how: tuple[str, ...]) -> None:
    done = jobs.kubectl(*how, "-f", "-", input=json.dumps(jobs.body("refused", {"minReplicas": 2})))
    assert done.returncode != 0
    assert "minReplicas" in done.stderr
    assert not jobs.exists("refused")
