"""Decodes the bytes of a watch into events, and the bytes of an answer into objects.

Invariant: whatever bytes arrive, the result is decoded values or one error of this package, and lines and bodies are
bounded. If an object is nested deeper than any real one, its depths are cut off: an error would hide every other object
of the same list. Anybody who may create a custom resource can make such an object.
"""

import logging
import re
from collections.abc import AsyncGenerator, AsyncIterable
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from everstep_operator.kube.client import Bookmark, Changed, EventType, WatchEvent
from everstep_operator.kube.errors import Operation, ServerError, StatusBody, StreamBroken, from_status
from everstep_operator.kube.wire import KubeObject

T = TypeVar("T", bound=KubeObject)

log = logging.getLogger(__name__)

MAX_DEPTH = 100  # a pod template needs about 15; the decoder's own limit is the interpreter's recursion limit
# By default etcd refuses objects above 1.5 MiB; managed fields and encoding may double that.
MAX_LINE = 8 * 1024 * 1024
MAX_BODY = 128 * 1024 * 1024  # a page of 500 objects, each far larger than a pod


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Page(msgspec.Struct, Generic[T]):
    """One page of a list."""

    metadata: _ListMeta
    items: list[T] | None = None


class _Frame(msgspec.Struct):
    type: str
    object: msgspec.Raw


_frames = msgspec.json.Decoder(_Frame)
_statuses = msgspec.json.Decoder(StatusBody)
_bookmarks = msgspec.json.Decoder(KubeObject)


@cache  # one entry a resource: a decoder is compiled once
def _decoder(shape: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(shape)


def decode_object(struct: type[T], body: bytes, operation: Operation) -> T:
    """One object. Raises `ServerError` for a body that is none."""
    decoded: T = _decode(struct, body, operation)
    return decoded


def decode_page(struct: type[T], body: bytes, operation: Operation) -> Page[T]:
    """One page of a list. Raises `ServerError` for a body that is none."""
    page: Page[T] = _decode(Page[struct], body, operation)  # type: ignore[valid-type]
    return page


def _decode(shape: Any, body: bytes, operation: Operation) -> Any:
    try:
        try:
            return _decoder(shape).decode(body)
        except RecursionError:
            log.warning(
                "answer nested too deeply: its depths were cut off",
                extra={"request": str(operation), "max_depth": MAX_DEPTH},
            )
            return _decoder(shape).decode(cut_depths(body))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ServerError(f"the answer cannot be decoded: {error}; {body[:200]!r}", operation=operation) from error


def decode_event(struct: type[T], line: bytes, operation: Operation) -> WatchEvent[T]:
    """One line of a watch. Raises the error that an ERROR event carries, and `StreamBroken` for anything unreadable."""
    try:
        try:
            return _event(struct, line, operation)
        except RecursionError:
            log.warning(
                "event nested too deeply: its depths were cut off",
                extra={"request": str(operation), "max_depth": MAX_DEPTH},
            )
            return _event(struct, cut_depths(line), operation)
    except (msgspec.DecodeError, RecursionError) as error:
        raise StreamBroken(f"a line is no watch event: {error}; {line[:200]!r}", operation=operation) from error


def _event(struct: type[T], line: bytes, operation: Operation) -> WatchEvent[T]:
    frame = _frames.decode(line)
    match frame.type:
        case "ADDED" | "MODIFIED" | "DELETED":
            return Changed(EventType(frame.type), _decoder(struct).decode(frame.object))
        case "BOOKMARK":
            return Bookmark(_bookmarks.decode(frame.object).metadata.resource_version)
        case "ERROR":
            raise from_status(_statuses.decode(frame.object), operation)
        case other:
            raise StreamBroken(f"unknown event type {other[:40]!r}", operation=operation)


_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def cut_depths(body: bytes, max_depth: int = MAX_DEPTH) -> bytes:
    """The JSON text, with null in place of every array and object nested deeper than `max_depth`."""
    parts: list[bytes] = []
    depth = 0
    start = 0
    for token in _STRUCTURE.finditer(body):
        match body[token.start()]:
            case 0x5B | 0x7B:  # [ {
                depth += 1
                if depth == max_depth + 1:
                    parts += (body[start : token.start()], b"null")
            case 0x5D | 0x7D:  # ] }
                depth -= 1
                if depth == max_depth:
                    start = token.end()
            case _:
                pass  # a string: brackets in it do not count
    # A part beyond the limit that was never closed is dropped, and the text stays invalid.
    return b"".join((*parts, body[start:] if depth <= max_depth else b""))


async def split_lines(
    chunks: AsyncIterable[bytes], operation: Operation, max_line: int = MAX_LINE
) -> AsyncGenerator[bytes, None]:
    """The non-empty lines of a stream. Raises `StreamBroken` for a line beyond `max_line` bytes, or a stream that ends
    inside a line."""
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        # Only whole lines are taken: the bytes after the last newline wait for the rest of their line.
        end = buffer.rfind(b"\n")
        if end >= 0:
            for line in bytes(buffer[:end]).split(b"\n"):
                if len(line) > max_line:
                    raise StreamBroken(
                        f"a line of {len(line)} bytes exceeds the limit of {max_line}", operation=operation
                    )
                if line.strip():
                    yield line
            del buffer[: end + 1]
        if len(buffer) > max_line:
            raise StreamBroken(f"a line exceeds the limit of {max_line} bytes", operation=operation)
    if buffer.strip():
        raise StreamBroken(f"the stream ended inside a line, after {len(buffer)} bytes of it", operation=operation)
