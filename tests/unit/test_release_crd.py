"""A CRD that refuses or loses what the last release's took is refused; one that only takes more is not."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from release import crd
from support import ROOT

CURRENT = yaml.safe_load((ROOT / crd.CURRENT).read_text())
Change = Callable[[dict[str, Any]], object]


def version(changed: dict[str, Any]) -> dict[str, Any]:
    return dict.__getitem__(changed, "spec")["versions"][0]


def at(changed: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The schema of a field, such as `spec.replicas`; `[]` is an item of a list."""
    node = version(changed)["schema"]["openAPIV3Schema"]
    for name in filter(None, path.split(".")):
        node = node["items"] if name == "[]" else node["properties"][name]
    return node


def problems(change: Change) -> list[str]:
    changed = copy.deepcopy(CURRENT)
    change(changed)
    assert changed != CURRENT
    return crd.incompatible(CURRENT, changed)


def other_version(changed: dict[str, Any]) -> None:
    version(changed)["name"] = "v1beta1"


def nothing_that_says_what_it_was(changed: dict[str, Any]) -> None:
    for rule in at(changed, "spec").get("x-kubernetes-validations", []):
        rule["message"] = "other words"
    at(changed, "spec")["description"] = "other words"


REFUSED: dict[str, tuple[Change, str]] = {
    "version removed": (other_version, "version v1alpha1 was removed"),
    "version not served": (lambda c: version(c).update(served=False), "version v1alpha1 is no longer served"),
    "scope": (lambda c: c["spec"].update(scope="Cluster"), "spec.scope was 'Namespaced' and is 'Cluster'"),
    "group": (lambda c: c["spec"].update(group="example.com"), "spec.group was"),
    "kind": (lambda c: c["spec"]["names"].update(kind="Job"), "spec.names.kind was"),
    "short name": (lambda c: c["spec"]["names"]["shortNames"].clear(), "spec.names.shortNames: 'tjob' was removed"),
    "status subresource": (lambda c: version(c)["subresources"].pop("status"), "the subresource status was {}"),
    "scale subresource": (
        lambda c: version(c)["subresources"]["scale"].update(specReplicasPath=".spec.size"),
        "the subresource scale was",
    ),
    "field removed": (lambda c: at(c, "spec")["properties"].pop("suspend"), "v1alpha1.spec.suspend was removed"),
    "inner field removed": (
        lambda c: at(c, "status.conditions.[]")["properties"].pop("reason"),
        "v1alpha1.status.conditions[].reason was removed",
    ),
    "field required": (lambda c: at(c, "spec")["required"].append("suspend"), "v1alpha1.spec.suspend is required now"),
    "type": (lambda c: at(c, "spec.replicas").update(type="string"), "v1alpha1.spec.replicas: type was integer"),
    "rule in CEL": (
        lambda c: at(c, "spec.replicas").update({"x-kubernetes-validations": [{"rule": "self > 1", "message": "m"}]}),
        "v1alpha1.spec.replicas: the rule 'self > 1' is new",
    ),
    "new default": (lambda c: at(c, "spec.replicas").update(default=3), "v1alpha1.spec.replicas: default was"),
    "new enum": (lambda c: at(c, "spec.replicas").update(enum=[1]), "v1alpha1.spec.replicas: enum was absent"),
    "field into what took any": (
        lambda c: c.update(opened(c, lambda n: n["properties"].update(extra={"type": "string"}))), "is new where any",
    ),
    "additional properties": (
        lambda c: at(c, "spec").update(additionalProperties={"type": "string"}), "additionalProperties was absent",
    ),
    "what no rule here knows": (lambda c: at(c, "spec").update({"x-kubernetes-new": 1}), "x-kubernetes-new was absent"),
    "unknown key of a version": (lambda c: version(c).update(new=1), "v1alpha1: new was None"),
}  # fmt: skip


def opened(changed: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The first node that keeps unknown fields is changed."""
    node = next(n for _, n in nodes(at(changed)) if n.get("x-kubernetes-preserve-unknown-fields"))
    node.setdefault("properties", {})
    change(node)
    return changed


ALLOWED: dict[str, Change] = {
    "words": nothing_that_says_what_it_was,
    "new optional field": lambda c: at(c, "spec")["properties"].update(extra={"type": "string", "default": "x"}),
    "new version": lambda c: c["spec"]["versions"].append({**version(c), "name": "v1beta1", "storage": False}),
    "no longer required": lambda c: at(c, "spec").update(required=[]),
    "column": lambda c: version(c)["additionalPrinterColumns"].clear(),
    "deprecation": lambda c: version(c).update(deprecated=True),
    "rule removed": lambda c: at(c, "spec").pop("x-kubernetes-validations"),
    "integer to number": lambda c: at(c, "spec.replicas").update(type="number"),
    "null too": lambda c: at(c, "spec.replicas").update(nullable=True),
    "new subresource": lambda c: version(c)["subresources"].update(other={}),
    "short name": lambda c: c["spec"]["names"]["shortNames"].append("job"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_change_that_breaks_a_client_or_a_stored_job_is_refused_by_its_place(name: str) -> None:
    change, words = REFUSED[name]
    assert [line for line in problems(change) if words in line], problems(change)


@pytest.mark.parametrize("name", ALLOWED)
def test_change_that_only_takes_more_is_compatible(name: str) -> None:
    assert problems(ALLOWED[name]) == []


def nodes(node: dict[str, Any], path: str = "v1alpha1") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for key, suffix in (("items", "[]"), ("additionalProperties", "[*]")):
        if isinstance(node.get(key), dict):
            yield from nodes(node[key], path + suffix)


def tightened(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Everything that the node has, changed so that it takes less."""
    for key in crd.UPPER & node.keys():
        yield {key: node[key] - 1}
    for key in crd.LOWER & node.keys():
        yield {key: node[key] + 1}
    for key in (crd.UPPER | crd.LOWER | crd.RESTRICTION) - node.keys():
        yield {key: 1}
    for key in crd.PERMISSION & node.keys():
        yield {key: False}
    if "enum" in node:
        yield {"enum": node["enum"][1:]}
    for key in ("pattern", "format", "default", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"):
        yield {key: "other"}


def test_whatever_is_tightened_anywhere_is_refused_with_its_path() -> None:
    changed, count = copy.deepcopy(CURRENT), 0
    for path, node in nodes(at(changed)):
        before = copy.deepcopy(node)
        for change in tightened(before):
            node.update(change)
            (line,) = crd.incompatible(CURRENT, changed)
            assert line.startswith(f"{path}: {next(iter(change))} was "), line
            node.clear()
            node.update(copy.deepcopy(before))
            count += 1
        for name in list(node.get("properties", {})):
            kept = node["properties"].pop(name)
            assert crd.incompatible(CURRENT, changed) == [f"{path}.{name} was removed"]
            node["properties"] = {**node["properties"], name: kept}
    assert changed == CURRENT
    assert count > 2000


def test_bounds_that_are_wider_are_compatible_everywhere() -> None:
    changed = copy.deepcopy(CURRENT)
    for _, node in nodes(at(changed)):
        node.update({key: node[key] + 1 for key in crd.UPPER & node.keys()})
        node.update({key: node[key] - 1 for key in crd.LOWER & node.keys()})
        node.update({"enum": [*node["enum"], "other"]} if "enum" in node else {})
        for key in crd.RESTRICTION & node.keys():
            del node[key]
    assert changed != CURRENT
    assert crd.incompatible(CURRENT, changed) == []


def test_crd_takes_what_that_of_the_last_release_took() -> None:
    """On each commit: a break is found by whoever makes it, and not by the release."""
    last = crd.last_released(ROOT)
    if last is not None:
        crd.check(last, ROOT / crd.CURRENT)


def test_last_release_is_the_newest_before_the_version(tmp_path: Path) -> None:
    assert crd.last_released(tmp_path, "0.2.0") is None
    folder = tmp_path / crd.RELEASED
    folder.mkdir(parents=True)
    for name in ("0.2.0", "0.9.0", "0.10.0rc1", "0.10.0"):
        (folder / f"{name}.yaml").touch()
    assert [crd.last_released(tmp_path, one) for one in ("0.2.0", "0.10.0", "0.10.1.dev0", "")] == [
        None, folder / "0.10.0rc1.yaml", folder / "0.10.0.yaml", folder / "0.10.0.yaml",
    ]  # fmt: skip


def test_command_names_the_difference_and_the_remedy(tmp_path: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    shutil.copyfile(ROOT / crd.CURRENT, old)
    changed = copy.deepcopy(CURRENT)
    del at(changed, "spec")["properties"]["suspend"]
    new.write_text(yaml.safe_dump(changed))
    command = [sys.executable, "-m", "release.crd"]
    ended = subprocess.run([*command, old, new], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (
        1,
        f"release.crd: {new} does not take what {old} takes:\n  v1alpha1.spec.suspend was removed\n"
        "Keep what clients and stored jobs use, or serve another version of the kind beside this one\n",
    )
    assert subprocess.run([*command, old, old], check=False).returncode == 0
