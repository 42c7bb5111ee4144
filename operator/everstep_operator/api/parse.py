"""Parses stored objects into types, with errors that name the field.

The API server has already checked the same rules. This is for objects that passed an older CRD, and for local mode,
which has no CRD. Pure: only the argument is read. Invariant: this version can carry out the resulting spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from everstep_operator.api.base import first_problem
from everstep_operator.api.status import Status
from everstep_operator.api.types import TrainingJobSpec


def parse_spec(raw: Mapping[str, Any]) -> TrainingJobSpec:
    """The spec of a TrainingJob with its defaults. Raises SpecError, which names the field."""
    try:
        return TrainingJobSpec.model_validate(without_nulls(raw))
    except ValidationError as e:
        raise first_problem("spec", e) from e


def parse_status(raw: Mapping[str, Any] | None) -> Status:
    """The stored status, or an empty one. Unknown fields are ignored.

    A field whose value does not fit its type (somebody edited it, or another version wrote it) is left out, and built
    again from observation. Of a list only the wrong entry is left out. The other fields are kept: a job that has ended
    must not start again.
    """
    known = without_nulls(raw or {})
    try:
        return Status.model_validate(known)
    except ValidationError as e:
        invalid = [problem["loc"] for problem in e.errors(include_url=False, include_input=False)]
    entries = {(where[0], where[1]) for where in invalid if len(where) > 1 and isinstance(where[1], int)}
    fields = {where[0] for where in invalid} - {name for name, _ in entries}
    valid = {name: value for name, value in known.items() if name not in fields}
    for name in {str(name) for name, _ in entries}:
        valid[name] = [entry for at, entry in enumerate(known[name]) if (name, at) not in entries]
    return Status.model_validate(valid)


def without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The object without nulls, because a null is an absent field, as for the API server. The pod template is kept as
    it is."""
    return {
        key: without_nulls(value) if isinstance(value, Mapping) and key != "template" else value
        for key, value in raw.items()
        if value is not None
    }
