"""Parses label selectors as the server does: `a=b`, `a!=b`, `a in (b,c)`, `a notin (b)`, `a`, `!a`, joined by commas.

Field selectors are `a.b=c`, joined by commas, over the few fields of a kind that the operator asks for.

Invariant: a selector that the server would refuse is refused, and never taken as one that matches everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from everstep_local.apiserver.refusals import bad_request

Selector: TypeAlias = Callable[[Mapping[str, str]], bool]

_FIELDS = {"Event": ("reason", "regarding.uid", "type")}
_KEY = r"(?:[A-Za-z0-9.-]+/)?[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_VALUE = r"[A-Za-z0-9._-]*"
_TERM = re.compile(
    rf"\s*(?:(?P<absent>!\s*{_KEY})|(?P<key>{_KEY})\s*(?:(?P<op>==|=|!=)\s*(?P<value>{_VALUE})"
    rf"|\s(?P<set>in|notin)\s*\((?P<values>\s*{_VALUE}(?:\s*,\s*{_VALUE})*\s*)\))?)\s*(?:,|$)"
)


@lru_cache(maxsize=256)
def parse(text: str) -> Selector:
    """The selector as a predicate over labels. Raises Refusal (400)."""
    terms: list[Selector] = []
    position = 0
    while position < len(text):
        requirement = _TERM.match(text, position)
        if requirement is None or requirement.end() == position:
            raise bad_request(f"unable to parse requirement: {text[position : position + 60]!r} of {text[:200]!r}")
        terms.append(_term(requirement))
        position = requirement.end()
    return lambda labels: all(term(labels) for term in terms)


def fields(kind: str, text: str) -> Callable[[Mapping[str, Any]], bool]:
    """The field selector as a predicate over objects of `kind`. Raises Refusal (400)."""
    terms = [term.partition("=") for term in text.split(",")]
    for path, equals, _ in terms:
        if not equals or path not in _FIELDS.get(kind, ()):
            raise bad_request(f"field label not supported: {path[:200]}")
    return lambda raw: all(_field(raw, path) == value for path, _, value in terms)


def _field(raw: Mapping[str, Any], path: str) -> str:
    value: Any = raw
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return "" if value is None else str(value)


def _term(match: re.Match[str]) -> Selector:
    if match["absent"]:
        absent = match["absent"][1:].strip()
        return lambda labels: absent not in labels
    key = match["key"]
    if match["op"]:
        value = match["value"]
        if match["op"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if match["set"]:
        values = frozenset(part.strip() for part in match["values"].split(","))
        if match["set"] == "in":
            return lambda labels: labels.get(key) in values
        # As on the server, an object without the label is not in the set either.
        return lambda labels: labels.get(key) not in values
    return lambda labels: key in labels
