"""Keeps secrets out of text that leaves the process. Pure.

Invariant: neither the value of a key with a secret-sounding name nor a credential of a known shape passes. In doubt it
hides: a log without a name is a nuisance, but a log with a token is an incident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.contract.redact import HIDDEN, secret_name, text

MAX_DEPTH = 6
MAX_ITEMS = 64

# Fields of our own log lines: keys of jobs on the work queue, and how many.
_NO_SECRETS = frozenset({"key", "keys"})


def secret_key(name: str) -> bool:
    """Whether the value of a field with this name must not be shown."""
    return name not in _NO_SECRETS and secret_name(name)


def value(item: object, depth: int = 0) -> object:
    """A JSON-ready copy of `item` without secrets, cut at MAX_DEPTH levels and MAX_ITEMS items a level."""
    if item is None or isinstance(item, bool | int | float):
        return item
    if isinstance(item, str):
        return text(item)
    if depth >= MAX_DEPTH:
        return "[deeper]"
    if isinstance(item, Mapping):
        pairs = list(item.items())[:MAX_ITEMS]
        return {str(k): HIDDEN if secret_key(str(k)) else value(v, depth + 1) for k, v in pairs}
    if isinstance(item, Sequence | set | frozenset) and not isinstance(item, bytes | bytearray):
        return [value(v, depth + 1) for v in list(item)[:MAX_ITEMS]]
    return text(str(item))
