"""The chart's values: the file with their defaults, and the schema that refuses others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from support import ROOT

CHART = ROOT / "charts/everstep"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def of(node: dict[str, Any]) -> dict[str, Any]:
    """The schema of a value, whether it stands there or among the definitions."""
    name = node.get("$ref", "").rpartition("/")[2]
    return dict(SCHEMA["definitions"][name]) if name else node


def values(node: dict[str, Any], default: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Each value that can be set by itself, with its default."""
    properties = of(node).get("properties")
    if not properties or default == {}:
        yield ".".join(path), default
        return
    for name, value in default.items():
        yield from values(properties[name], value, (*path, name))


def known(node: dict[str, Any], default: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Each name that the schema knows beside the defaults."""
    for name, inner in of(node).get("properties", {}).items():
        if default != {} and name not in default:
            yield ".".join((*path, name))
        elif isinstance(default.get(name), dict):
            yield from known(inner, default[name], (*path, name))


def test_schema_knows_each_value_and_no_other_but_those_of_kubernetes() -> None:
    assert dict(values(SCHEMA, VALUES))  # a KeyError names a value that the schema lacks
    assert set(known(SCHEMA, VALUES)) == {"global", "resources.claims"}


def test_values_of_the_chart_are_used_by_its_templates() -> None:
    templates = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*.*"))
    unused = [path for path, _ in values(SCHEMA, VALUES) if path.rpartition(".")[2] not in templates]
    assert [path for path in unused if not path.startswith("resources.")] == []
