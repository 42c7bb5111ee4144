"""Which changes of a spec give its pods another hash: those after which old and new pods could not form one world."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from pydantic.alias_generators import to_camel

from everstep_operator.api.parse import parse_spec
from everstep_operator.api.types import Etcd, Rendezvous
from everstep_operator.plan.state import pod_hash

SPEC: dict[str, Any] = {
    "replicas": 4,
    "elastic": {"minReplicas": 2, "maxReplicas": 8},
    "checkpoint": {"url": "s3://bucket/a"},
    "template": {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "containers": [{"name": "worker", "image": "train:1", "env": [{"name": "A", "value": "1"}]}],
            "nodeSelector": {"pool": "a"},
        },
    },
}
ETCD = {"backend": "etcd", "etcd": {"endpoints": ["http://etcd:2379"]}}


def edited(change: Callable[[dict[str, Any]], Any], spec: dict[str, Any] = SPEC) -> dict[str, Any]:
    made = copy.deepcopy(spec)
    change(made)
    return made


def hash_of(spec: dict[str, Any]) -> str:
    return pod_hash.of_spec(parse_spec(spec))


def worker(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = spec["template"]["spec"]["containers"][0]
    return found


ANOTHER: dict[str, Callable[[dict[str, Any]], Any]] = {
    "image": lambda s: worker(s).update(image="train:2"),
    "variable": lambda s: worker(s)["env"][0].update(value="2"),
    "order_of_variables": lambda s: worker(s)["env"].insert(0, {"name": "B", "value": "$(A)"}),
    "node_selector": lambda s: s["template"]["spec"].update(nodeSelector={"pool": "b"}),
    "label": lambda s: s["template"]["metadata"]["labels"].update(team="b"),
    "side_car": lambda s: s["template"]["spec"]["containers"].append({"name": "logs", "image": "x"}),
    "processes": lambda s: s.update(processesPerReplica=2),
    "url": lambda s: s["checkpoint"].update(url="s3://bucket/b"),
    "no_checkpoint": lambda s: s.pop("checkpoint"),
    "backend": lambda s: s.update(rendezvous=ETCD),
    "join_timeout": lambda s: s.update(rendezvous={"joinTimeoutSeconds": 60}),
    "group": lambda s: s["elastic"].update(groupSize=2),
}
SAME: dict[str, Callable[[dict[str, Any]], Any]] = {
    "scaled": lambda s: s.update(replicas=6),
    "bounds": lambda s: s["elastic"].update(minReplicas=1, maxReplicas=16),
    "sizes": lambda s: s["elastic"].update(sizes=[2, 4, 8]),
    "fixed": lambda s: s.pop("elastic"),
    "commits": lambda s: s["checkpoint"].update(everySeconds=5, keep=9, secretRef={"name": "s3"}),
    "recovery": lambda s: s.update(recovery={"maxRestarts": 1, "hang": {"mode": "Off"}}),
    "suspended": lambda s: s.update(suspend=True),
    "ends": lambda s: s.update(activeDeadlineSeconds=9, ttlSecondsAfterFinished=9, podCleanup="All"),
    "worker_0_decides": lambda s: s.update(successPolicy="Worker0"),
    "default_written_out": lambda s: s.update(
        rendezvous={"backend": "everstep", "joinTimeoutSeconds": 600}, processesPerReplica=1
    ),
    "null_in_the_template": lambda s: worker(s).update(args=None),
    "other_order_of_keys": lambda s: s.update(template=dict(reversed(s["template"].items()))),
}


@pytest.mark.parametrize("case", ANOTHER)
def test_change_that_old_pods_cannot_follow_gives_another_hash(case: str) -> None:
    assert hash_of(edited(ANOTHER[case])) != hash_of(SPEC)


@pytest.mark.parametrize("case", SAME)
def test_change_that_a_running_job_takes_leaves_the_hash(case: str) -> None:
    assert hash_of(edited(SAME[case])) == hash_of(SPEC)


def test_sizes_of_a_job_over_etcd_are_in_its_hash_and_replicas_within_them_are_not() -> None:
    over_etcd = {**SPEC, "rendezvous": ETCD}
    assert hash_of(edited(SAME["scaled"], over_etcd)) == hash_of(over_etcd)
    assert hash_of(edited(SAME["bounds"], over_etcd)) != hash_of(over_etcd)
    assert hash_of(edited(SAME["fixed"], over_etcd)) != hash_of(over_etcd)


def test_hash_of_a_spec_stays_the_same_from_version_to_version() -> None:
    """A newer operator that hashed otherwise would replace the workers of all jobs."""
    assert hash_of(SPEC) == "29fdd73d98a02e68"
    assert hash_of({**SPEC, "rendezvous": ETCD, "processesPerReplica": 2}) == "616a3d87bd3a03d5"
    assert hash_of({**SPEC, "rendezvous": {**ETCD, "joinTimeoutSeconds": 60}}) == "b191a3fcbea8a843"


class LaterRendezvous(Rendezvous):
    """With another default."""

    join_timeout_seconds: int = 900


def test_later_default_leaves_the_hash_of_a_spec_that_is_stored_with_an_earlier_one() -> None:
    """The API server stores a default as if the user had written it."""
    spec = parse_spec(SPEC)
    stored = spec.rendezvous.model_dump()
    later = spec.model_copy(update={"rendezvous": LaterRendezvous(**stored)})
    assert later.rendezvous.join_timeout_seconds != LaterRendezvous().join_timeout_seconds
    assert pod_hash.of_spec(later) == hash_of(SPEC)


def test_each_field_that_enters_the_hash_has_the_default_with_which_it_began() -> None:
    assert {to_camel(name) for name in Rendezvous.model_fields} == pod_hash.DEFAULTS.keys()
    assert {to_camel(name) for name in Etcd.model_fields} == pod_hash.DEFAULTS["etcd"].keys()
