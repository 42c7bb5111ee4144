"""Checks that bytes have the shape of a rendezvous document, before any objects are made of them.

`json.loads` builds all objects of a megabyte before any check, which blocks the event loop for up to 23 ms. Here the
first value of a wrong type, or the first list that is too long, ends the reading, and fields that this release does not
know are skipped: 2 ms at most. A document of the right shape is then checked by `everstep.contract.document`.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from everstep.contract.document import (
    MAX_HISTORY,
    MAX_MEMBERS,
    MAX_REPORTS,
    MAX_STOPPING,
    PAST_AGENTS,
    VERSION,
    DocumentInvalid,
)

SMALL = 16 * 1024  # bytes; a smaller document is cheap, so the contract checks it and names the wrong field better

_Names: TypeAlias = Annotated[list[str], msgspec.Meta(max_length=MAX_MEMBERS)]
_Member: TypeAlias = tuple[int, str, int, int, str, int, int]
_Members: TypeAlias = Annotated[list[_Member], msgspec.Meta(max_length=MAX_MEMBERS)]
_Past: TypeAlias = Annotated[list[str], msgspec.Meta(max_length=PAST_AGENTS)]


class _Document(msgspec.Struct):
    version: int
    sizes: tuple[int, int, Annotated[list[int], msgspec.Meta(max_length=MAX_MEMBERS)]]
    round: int
    members: _Members
    gone: Annotated[list[tuple[str, str]], msgspec.Meta(max_length=MAX_MEMBERS)]
    joining: _Members
    seats: Annotated[list[tuple[int, str, int, _Past]], msgspec.Meta(max_length=MAX_MEMBERS)]
    reports: Annotated[list[tuple[str, str, bool, int]], msgspec.Meta(max_length=MAX_REPORTS)]
    done: _Names
    in_process: bool
    restarts: int
    history: Annotated[list[tuple[int, str, str, bool]], msgspec.Meta(max_length=MAX_HISTORY)]
    id: str
    floor: int
    stopping: Annotated[list[str], msgspec.Meta(max_length=MAX_STOPPING)]
    ruled: bool
    surge: int
    broken: str | None = None
    boundary: int | None = None
    closed: str | None = None


class _Version(msgspec.Struct):
    version: Any = None


_DOCUMENT, _VERSION = msgspec.json.Decoder(_Document), msgspec.json.Decoder(_Version)


def check_shape(data: bytes) -> None:
    """Raises DocumentInvalid, naming the place of the first value that is wrong."""
    if len(data) <= SMALL:
        return
    try:
        _DOCUMENT.decode(data)
    except msgspec.ValidationError as e:
        raise DocumentInvalid(_other_version(data) or str(e)) from e
    except (ValueError, RecursionError) as e:
        raise DocumentInvalid(f"not JSON: {e}") from e


def _other_version(data: bytes) -> str | None:
    """The version of a document of a newer release, which may have another shape; None if it has this version."""
    try:
        version = _VERSION.decode(data).version
    except (ValueError, RecursionError):
        return None
    if version is None or version == VERSION:
        return None
    return f"version: {str(version)[:40]} is not {VERSION}: agents of different releases share one job; use one"
