"""Parses stored objects into types, with errors that name the field.

The API server has already checked the same rules. This is for objects that passed an older CRD, and for local mode,
which has no CRD. Pure: only the argument is read. Invariant: this version can carry out the resulting spec.
"""

from __future__ import annotations

import copy
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


# Fields of these are right only together: a roster without one of its ranges would have that range's workers deleted.
_ONLY_TOGETHER = frozenset({"world", "roster"})
_Path = tuple[int | str, ...]


def parse_status(raw: Mapping[str, Any] | None) -> Status:
    """The stored status, or an empty one. Unknown fields are ignored.

    A value that does not fit its type (somebody edited it, or another version wrote it) is left out, and built again
    from observation. Of a list only the wrong entry is left out, and of an object only the wrong field, at any depth.
    All else is kept: a job that has ended must not start again, and what was charged to the restart budget stays
    charged.
    """
    known = without_nulls(raw or {})
    try:
        return Status.model_validate(known)
    except ValidationError as e:
        error = e
    known = copy.deepcopy(known)
    # A round for each depth: without its wrong field, an entry may lack a required one.
    while _leave_out(known, error):
        try:
            return Status.model_validate(known)
        except ValidationError as e:
            error = e
    return Status()


def _leave_out(known: dict[str, Any], error: ValidationError) -> bool:
    """Take what is wrong out of `known`, in place. False: there was nothing to take out."""
    problems = error.errors(include_url=False, include_input=False)
    for problem in problems:
        where = problem["loc"]
        # Another version may allow more entries. Lists have the newest first.
        if problem["type"] == "too_long" and where[0] not in _ONLY_TOGETHER and _has(known, where):
            entries = _at(known, where)
            if isinstance(entries, list):
                del entries[problem["ctx"]["max_length"] :]
                return True
    wrong = [_part(problem["loc"]) for problem in problems]
    # A derived or a missing field is not in the object: what it was derived from goes first, then the object around it.
    while wrong and not any(_has(known, path) for path in wrong):
        wrong = [path[:-1] for path in wrong if len(path) > 1]
    present = dict.fromkeys(path for path in wrong if _has(known, path))
    # Backwards, because each entry that is taken out moves those behind it.
    for path in reversed(present):
        if not any(path[:length] in present for length in range(1, len(path))):
            del _at(known, path[:-1])[path[-1]]
    return bool(present)


def _part(where: _Path) -> _Path:
    """The part of a status that is left out for a problem there: the innermost entry of a list, else the field."""
    if where[0] in _ONLY_TOGETHER:
        return where[:1]
    entries = [at for at, name in enumerate(where) if isinstance(name, int)]
    return where[: entries[-1] + 1] if entries else where


def _at(known: Any, path: _Path) -> Any:
    for name in path:
        known = known[name]
    return known


def _has(known: Any, path: _Path) -> bool:
    for name in path:
        if not (name in known if isinstance(known, dict) else isinstance(known, list) and isinstance(name, int)):
            return False
        known = known[name]
    return True


def without_nulls(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The object without nulls, because a null is an absent field, as for the API server. The pod template is kept as
    it is."""
    return {
        key: without_nulls(value) if isinstance(value, Mapping) and key != "template" else value
        for key, value in raw.items()
        if value is not None
    }
