"""The values of a JSON document from somebody else: each is read by its type and bound, or refused by its name.

Pure. Invariant: whatever is read, the error is DocumentInvalid and its text is short.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

MAX_AGENT = 64
MAX_NUMBER = 2**53  # what every JSON reader keeps exact
PIECE = 256  # rows that are read at a time: 0.5 ms

T = TypeVar("T")
_AGENT = re.compile(r"[A-Za-z0-9._-]+")
_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxdict = 10
_REPR.maxstring = _REPR.maxlong = 80


class RendezvousFailed(Exception):
    """Base of all errors of a rendezvous."""


class DocumentInvalid(RendezvousFailed):
    """Bytes or values that are no rendezvous document; the text names the field."""


def parse_object(data: bytes, limit: int) -> Mapping[str, Any]:
    """A JSON object of at most `limit` bytes. Raises DocumentInvalid."""
    if len(data) > limit:
        raise DocumentInvalid(f"{len(data)} bytes, at most {limit} are expected")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise DocumentInvalid(f"not JSON: {e}") from e
    if not isinstance(body, dict):
        raise DocumentInvalid("not a JSON object")
    return body


def number(value: object, name: str, below: int = MAX_NUMBER, low: int = 0) -> int:
    if type(value) is not int or not low <= value < below:
        raise DocumentInvalid(f"{name}: {short(value)} is not an integer from {low} to {below - 1}")
    return value


def flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise DocumentInvalid(f"{name}: {short(value)} is neither true nor false")
    return value


def text(value: object, name: str, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise DocumentInvalid(f"{name}: {short(value)} is not a text of at most {limit} characters")
    return value


def agent_name(value: object, name: str) -> str:
    """An agent's id goes into keys and URLs, so it is letters, digits, dot, dash and underscore."""
    if not isinstance(value, str) or len(value) > MAX_AGENT or _AGENT.fullmatch(value) is None:
        raise DocumentInvalid(f"{name}: {short(value)} is not 1 to {MAX_AGENT} of letters, digits, '.', '-', '_'")
    return value


def each(rows: object, name: str, limit: int, read: Callable[[object, str], T]) -> Generator[None, None, tuple[T, ...]]:
    if not isinstance(rows, list) or len(rows) > limit:
        raise DocumentInvalid(f"{name}: a list of at most {limit} is expected")
    fields: list[T] = []
    for at in range(0, len(rows), PIECE):
        fields += [read(row, name) for row in rows[at : at + PIECE]]
        yield
    return tuple(fields)


def whole(steps: Generator[None, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def short(value: object) -> str:
    """The value in at most 80 characters. Its cost is bounded too: a value from outside may be long or deep."""
    shown = _REPR.repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
