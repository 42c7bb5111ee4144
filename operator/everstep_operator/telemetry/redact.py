"""Keeping secrets out of text that leaves the process. Pure.

Invariant: a value under a secret-sounding key, and a credential of a known shape anywhere in a text, never passes. It
errs on the side of hiding: a log without a name is a nuisance, a log with a token is an incident.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "[redacted]"
MAX_DEPTH = 6
MAX_ITEMS = 64

_KEY = re.compile(
    r"token|secret|passw(or)?d|passphrase|credential|authorization|cookie|api[-_]?key|access[-_]?key|private[-_]?key",
    re.IGNORECASE,
)
# Each pattern keeps its first group, so that the reader still sees what was hidden.
_SHAPES = (
    re.compile(r"(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE),
    re.compile(r"()\beyJ[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]*"),  # JWT, as every service-account token
    re.compile(r"(://[^/\s:@]{0,100}:)[^/\s@]{1,200}(?=@)"),  # scheme://user:password@host
    re.compile(r"()\bAKIA[0-9A-Z]{16}\b"),
    re.compile(r"([?&]X-Amz-(?:Signature|Credential|Security-Token)=)[^&\s]+", re.IGNORECASE),
    re.compile(
        r"""((?:token|secret|passw(?:or)?d|secret_access_key|api_key)["']?\s{0,3}[=:]\s{0,3}["']?)[^\s"',;&}\]]{1,4096}""",
        re.IGNORECASE,
    ),
)


def secret_key(name: str) -> bool:
    """Whether a field of this name holds something that must not be shown."""
    return _KEY.search(name) is not None


def text(value: str) -> str:
    """The text with every credential of a known shape hidden."""
    for shape in _SHAPES:
        value = shape.sub(rf"\1{HIDDEN}", value)
    return value


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
