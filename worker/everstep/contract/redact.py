"""Keeping credentials out of text that leaves a process. Pure.

Invariant: a credential of a known shape anywhere in a text never passes. It errs on the side of hiding: a log without a
name is a nuisance, a log with a token is an incident.
"""

from __future__ import annotations

import re

HIDDEN = "[redacted]"

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


def text(value: str) -> str:
    """The text with every credential of a known shape hidden."""
    for shape in _SHAPES:
        value = shape.sub(rf"\1{HIDDEN}", value)
    return value
