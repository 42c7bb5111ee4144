"""The generated CRD: bounded everywhere, and complete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep_operator.api import crd, reference
from everstep_operator.api.status import Status
from everstep_operator.api.types import TrainingJobSpec

ROOT = Path(__file__).parents[2]
DESIGNED_SPEC = {
    *("replicas", "elastic", "processesPerReplica", "rendezvous", "checkpoint", "recovery", "suspend", "rerun"),
    "managedBy",
    *("activeDeadlineSeconds", "ttlSecondsAfterFinished", "successPolicy", "podCleanup"),
    *("podDisruptionBudget", "scheduling", "network", "template"),
    *("volumeClaimTemplates", "persistentVolumeClaimRetentionPolicy"),
}
DESIGNED_STATUS = {
    *("observedGeneration", "replicas", "readyReplicas", "selector", "world", "progress", "checkpoint", "restarts"),
    *("recoveries", "goodputPercent", "failure", "conditions"),
}


def _version() -> dict[str, Any]:
    (version,) = crd.crd()["spec"]["versions"]
    return dict(version)


def _root() -> dict[str, Any]:
    return dict(_version()["schema"]["openAPIV3Schema"])


def _walk(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _walk(f"{path}.{name}", child)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _walk(f"{path}[]", schema[key])


def _fields() -> list[tuple[str, dict[str, Any]]]:
    properties = _root()["properties"]
    return [field for part in ("spec", "status") for field in _walk(part, properties[part])]


def test_rendered_crd_reads_back_as_the_same_object() -> None:
    assert yaml.safe_load(crd.render()) == crd.crd()


def test_every_field_of_the_design_is_in_the_schema() -> None:
    properties = _root()["properties"]
    assert set(properties["spec"]["properties"]) == DESIGNED_SPEC
    assert set(properties["status"]["properties"]) >= DESIGNED_STATUS


def test_every_field_has_a_description() -> None:
    bare = [
        path
        for path, schema in _fields()
        if "description" not in schema and not path.endswith("[]") and ".template." not in path
    ]
    assert bare == []


def test_every_list_map_string_and_number_has_an_upper_bound() -> None:
    bounds = {"array": "maxItems", "string": "maxLength", "integer": "maximum"}
    unbounded = []
    for path, schema in _fields():
        kind = schema.get("type", "")
        if kind == "object" and "additionalProperties" in schema and "maxProperties" not in schema:
            unbounded.append(path)
        if kind in bounds and not {bounds[kind], "enum"} & schema.keys() and schema.get("format") != "date-time":
            unbounded.append(path)
    assert unbounded == []


def test_no_number_is_bounded_beyond_what_the_api_server_compares_exactly() -> None:
    assert [path for path, schema in _fields() if schema.get("maximum", 0) >= 2**53] == []


def test_status_has_no_defaults() -> None:
    assert [path for path, schema in _walk("status", _root()["properties"]["status"]) if "default" in schema] == []


def test_sections_default_to_what_the_types_default_to() -> None:
    spec = TrainingJobSpec(replicas=1, template={"spec": {"containers": [{"name": "worker"}]}}).to_wire()
    schema = _root()["properties"]["spec"]["properties"]
    defaulted = {name: field["default"] for name, field in schema.items() if "default" in field}
    assert defaulted == {name: value for name, value in spec.items() if name not in ("replicas", "template")}


def test_columns_are_those_of_the_design_in_order() -> None:
    columns = _version()["additionalPrinterColumns"]
    shown = [column["name"] for column in columns if not column.get("priority")]
    wide = [column["name"] for column in columns if column.get("priority")]
    assert shown == ["Status", "Ready", "Desired", "Min", "Max", "Step", "Ckpt", "Restarts", "Goodput", "Age"]
    assert wide == ["Round", "Spares", "Last-Failure", "ETA", "Image"]


def test_status_type_writes_only_fields_that_the_schema_has() -> None:
    assert set(Status().to_wire()) <= set(_root()["properties"]["status"]["properties"])


def test_keyword_that_is_not_structural_is_an_error() -> None:
    with pytest.raises(ValueError, match="not part of a structural schema"):
        crd.structural({"type": "integer", "exclusiveMinimum": 0}, {}, defaults=True)


def test_reference_page_names_every_field() -> None:
    page = reference.render()
    fields = [path.rsplit(".", 1)[-1] for path, _ in _fields() if not path.endswith("[]") and ".template." not in path]
    assert [field for field in fields if field not in ("spec", "status") and f"`{field}`" not in page] == []


def test_delete_all_in_a_namespace_leaves_its_training_jobs() -> None:
    """`kubectl delete all --all` takes whatever is in the category `all`."""
    assert crd.crd()["spec"]["names"]["categories"] == ["everstep"]


# Kubernetes 1.30 takes neither: `tests/apiserver/test_kubernetes_range.py` shows that, by night.
RESERVED = "as break const continue else for function if import let loop package namespace return var void while"
LATER = re.compile(r"\b(isIP|ip|isCIDR|cidr|isSemver|semver)\(|\bformat\.")


def test_rules_and_policy_have_no_words_that_the_oldest_kubernetes_does_not_know() -> None:
    rules = [
        rule["rule"]
        for _, schema in [("", _root()), *_walk("", _root()["properties"]["spec"])]
        for rule in schema.get("x-kubernetes-validations", ())
    ]
    assert len(rules) > 30
    words = re.compile(rf"\.({'|'.join(RESERVED.split())})\b")
    assert [rule for rule in rules if words.search(rule) or LATER.search(rule)] == []
    policy = (ROOT / "charts/everstep/templates/policy.yaml").read_text()
    assert LATER.findall(policy) == []
