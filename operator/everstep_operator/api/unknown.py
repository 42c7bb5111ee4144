"""Finds fields that a manifest has and its schema lacks. The API server would prune them, and kubectl's strict
validation refuses them. Pure; it knows structural schemas, and no field of a TrainingJob.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Unknown:
    """An unknown field. `path` is written as `kubectl explain` does; `near` is the known field most like it."""

    path: str
    near: str | None = None

    def __str__(self) -> str:
        return f"{self.path}: no such field" + (f"; is {self.near} meant?" if self.near else "")


def unknown(value: Any, schema: Mapping[str, Any], path: str = "") -> Iterator[Unknown]:
    """The fields of `value` that a structural `schema` neither names nor keeps as unknown ones."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown(item, schema.get("items", {}), f"{path}[{index}]")
    if not isinstance(value, dict):
        return
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", {} if schema.get("x-kubernetes-preserve-unknown-fields") else None)
    known_here = bool(properties) or others is not None
    for name, item in value.items():
        inner = properties.get(name, others)
        if inner is not None:
            yield from unknown(item, inner if isinstance(inner, dict) else {}, _joined(path, name))
        elif known_here:
            yield field(path, name, properties)


def field(path: str, name: object, known: Iterable[str]) -> Unknown:
    """The unknown field `name` below `path`, with the most similar of the `known` ones."""
    near = difflib.get_close_matches(str(name), sorted(known), n=1)
    return Unknown(_joined(path, name), near[0] if near else None)


def _joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
