"""Applies the structural schema of a CRD: pruning, defaults and validation, in the server's order and words.

Invariants: `normal` returns its argument itself if nothing is pruned or defaulted. On an update, parts that equal the
old value are not checked again (ratcheting), so an object that was stored under an older schema can still be edited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from everstep_local.apiserver.kinds.cel import Rules
from everstep_local.apiserver.refusals import (
    FieldError,
    duplicate,
    invalid,
    not_supported,
    required,
    shown,
    too_long,
    too_many,
    type_invalid,
)
from everstep_local.apiserver.storage.store import Json

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
# The keywords that this module implements. Any other one is an error when the schema is compiled, and not a rule that
# is silently ignored.
_KNOWN = frozenset(
    {
        *(
            "type",
            "format",
            "description",
            "enum",
            "default",
            "required",
            "properties",
            "additionalProperties",
            "items",
        ),
        *(
            "minimum",
            "maximum",
            "minLength",
            "maxLength",
            "pattern",
            "minItems",
            "maxItems",
            "maxProperties",
            "nullable",
        ),
        *("x-kubernetes-validations", "x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"),
        *("x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type"),
    }
)
_INT64, _EXACT = 2**63, 2**53
_ROOT = ("apiVersion", "kind", "metadata")
_ABSENT = object()


class Schema:
    """One compiled node of a schema. Raises ValueError for a keyword that is not implemented."""

    def __init__(self, schema: Json, path: str = "") -> None:
        if unknown := sorted(schema.keys() - _KNOWN):
            raise ValueError(
                f"schema of {path or 'the object'}: {unknown} are not implemented in the in-memory cluster"
            )
        self.type: str = schema.get("type", "")
        self.int_or_string = bool(schema.get("x-kubernetes-int-or-string"))
        self.nullable = bool(schema.get("nullable"))
        self.preserve = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        self.properties = {
            name: Schema(child, f"{path}.{name}") for name, child in schema.get("properties", {}).items()
        }
        more, items = schema.get("additionalProperties"), schema.get("items")
        self.more = Schema(more, f"{path}.*") if isinstance(more, dict) else None
        self.open = more is True
        self.items = Schema(items, f"{path}[]") if items is not None else None
        self.defaults = {
            name: child["default"] for name, child in schema.get("properties", {}).items() if "default" in child
        }
        self.required: tuple[str, ...] = tuple(schema.get("required", ()))
        self.enum: tuple[Any, ...] = tuple(schema.get("enum", ()))
        self.pattern = re.compile(schema["pattern"]) if "pattern" in schema else None
        self.limits = {key: schema[key] for key in schema.keys() & _LIMITS.keys()}
        self.keys: tuple[str, ...] = tuple(schema.get("x-kubernetes-list-map-keys", ()))
        self.list_type: str = schema.get("x-kubernetes-list-type", "atomic")
        rules = schema.get("x-kubernetes-validations")
        self.rules = Rules(rules, root=not path) if rules else None

    # ---- pruning and defaults ---------------------------------------------------------------------------------------

    def normal(self, value: Any, old: Any = _ABSENT, *, root: bool = False) -> Any:
        """`value`, pruned and with defaults. `old` is a value that is normal already."""
        if value is old:
            return value
        if isinstance(value, dict) and (self.type == "object" or self.properties):
            return self._normal_object(value, old if isinstance(old, dict) else {}, root=root)
        if isinstance(value, list) and self.items is not None:
            items = [self.items.normal(item) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        return value

    def _normal_object(self, value: Json, old: Json, *, root: bool) -> Json:
        result: Json = {}
        for name, item in value.items():
            child = self.properties.get(name, self.more)
            if root and name in _ROOT:
                result[name] = item
            elif child is not None:
                if item is None and not child.nullable:
                    continue  # it is absent, and the default replaces it if there is one
                result[name] = child.normal(item, old.get(name, _ABSENT))
            elif self.preserve or self.open:
                result[name] = item
        for name, default in self.defaults.items():
            if name not in result:
                result[name] = self.properties[name].normal(default)
        same = len(result) == len(value) and all(result[name] is value.get(name, _ABSENT) for name in result)
        return value if same else result

    # ---- validation -------------------------------------------------------------------------------------------------

    def errors(self, value: Any, old: Any, path: str, *, root: bool = False) -> Iterator[FieldError]:
        """The schema's errors in `value`, without those of its rules. `old` is None on create."""
        if old is not None and (value is old or value == old):
            return
        if value is None and self.nullable:
            return
        if not self._has_type(value):
            name = "null" if value is None else _type_of(value)
            wanted = self.type or "integer,string"
            yield type_invalid(path, name, f"{path} in body must be of type {wanted}: {shown(name)}")
            return
        if self.enum and value not in self.enum:
            yield not_supported(path, value, self.enum)
        for key, limit in self.limits.items():
            if (error := _LIMITS[key](path, value, limit)) is not None:
                yield error
        if self.pattern is not None and isinstance(value, str) and not self.pattern.search(value):
            yield invalid(path, value, f"{path} in body should match '{self.pattern.pattern}'")
        if isinstance(value, dict):
            yield from self._object_errors(value, old if isinstance(old, dict) else {}, path, root=root)
        elif isinstance(value, list):
            yield from self._list_errors(value, old if isinstance(old, list) else [], path)

    def _has_type(self, value: Any) -> bool:
        if self.int_or_string:
            return isinstance(value, (int, str)) and not isinstance(value, bool)
        if not self.type:
            return True
        if isinstance(value, bool):
            return self.type == "boolean"
        if self.type == "integer":
            # A number that does not fit is a float to the server, and a float beyond 2^53 is no integer to it.
            if isinstance(value, float):
                return value.is_integer() and abs(value) <= _EXACT
            return isinstance(value, int) and -_INT64 <= value < _INT64
        return isinstance(value, _TYPES[self.type])

    def _object_errors(self, value: Json, old: Json, path: str, *, root: bool) -> Iterator[FieldError]:
        for name in self.required:
            if name not in value:
                yield required(_join(path, name))
        for name, item in value.items():
            child = self.properties.get(name, self.more)
            if child is not None and not (root and name in _ROOT):
                yield from child.errors(item, old.get(name), _join(path, name))

    def _list_errors(self, value: list[Any], old: list[Any], path: str) -> Iterator[FieldError]:
        if self.items is None:
            return
        known = {self._key(entry): entry for entry in old} if self.list_type == "map" else {}
        seen: list[Any] = []
        for index, item in enumerate(value):
            key = self._key(item) if self.list_type == "map" else item
            if self.list_type in ("map", "set"):
                if key in seen:
                    what = dict(zip(self.keys, key, strict=True)) if self.list_type == "map" else item
                    yield duplicate(f"{path}[{index}]", what)
                seen.append(key)
            yield from self.items.errors(item, known.get(key) if known else None, f"{path}[{index}]")

    def _key(self, item: Any) -> tuple[Any, ...]:
        return tuple(item.get(key) if isinstance(item, dict) else None for key in self.keys)

    def broken_rules(self, value: Any, old: Any, path: str) -> Iterator[FieldError]:
        """The rules' errors in `value`, which is valid otherwise. `old` is None if there was no old value."""
        if old is not None and (value is old or value == old):
            return  # it was accepted before: it is ratcheted, and there is no transition
        if value is None:
            return
        if self.rules is not None:
            for field, message in self.rules.broken(value, old):
                yield invalid(f"{path}{field}".removeprefix(".") or "<nil>", self.type, message)
        if isinstance(value, dict):
            for name, child in self.properties.items():
                if child.has_rules and name in value:
                    before = old.get(name) if isinstance(old, dict) else None
                    yield from child.broken_rules(value[name], before, f"{path}.{name}")
        elif isinstance(value, list) and self.items is not None and self.items.has_rules:
            known = {self._key(entry): entry for entry in old or ()} if self.list_type == "map" else {}
            for index, item in enumerate(value):
                yield from self.items.broken_rules(item, known.get(self._key(item)), f"{path}[{index}]")

    @property
    def has_rules(self) -> bool:
        """Whether this node or one below it has a rule."""
        below = [*self.properties.values(), *([self.items] if self.items is not None else [])]
        return self.rules is not None or any(child.has_rules for child in below)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float) or (isinstance(value, int) and not -_INT64 <= value < _INT64):
        return "number"
    return next(name for name, types in _TYPES.items() if isinstance(value, types))


def _minimum(path: str, value: Any, limit: Any) -> FieldError | None:
    if isinstance(value, (int, float)) and value < limit:
        return invalid(path, value, f"{path} in body should be greater than or equal to {limit}")
    return None


def _maximum(path: str, value: Any, limit: Any) -> FieldError | None:
    if isinstance(value, (int, float)) and value > limit:
        return invalid(path, value, f"{path} in body should be less than or equal to {limit}")
    return None


def _min_length(path: str, value: Any, limit: Any) -> FieldError | None:
    if isinstance(value, str) and len(value) < limit:
        return invalid(path, value, f"{path} in body should be at least {limit} chars long")
    return None


def _max_length(path: str, value: Any, limit: Any) -> FieldError | None:
    return too_long(path, limit) if isinstance(value, str) and len(value) > limit else None


def _min_items(path: str, value: Any, limit: Any) -> FieldError | None:
    if isinstance(value, list) and len(value) < limit:
        return invalid(path, len(value), f"{path} in body should have at least {limit} items")
    return None


def _max_items(path: str, value: Any, limit: Any) -> FieldError | None:
    return too_many(path, len(value), limit) if isinstance(value, list) and len(value) > limit else None


def _max_properties(path: str, value: Any, limit: Any) -> FieldError | None:
    return too_many(path, len(value), limit) if isinstance(value, dict) and len(value) > limit else None


_LIMITS = {
    "minimum": _minimum,
    "maximum": _maximum,
    "minLength": _min_length,
    "maxLength": _max_length,
    "minItems": _min_items,
    "maxItems": _max_items,
    "maxProperties": _max_properties,
}
