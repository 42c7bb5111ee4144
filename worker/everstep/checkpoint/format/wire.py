"""The bytes of a record: one line of JSON, one line with its checksum, and nothing that can execute.

Pure. The checksum is over the exact bytes of the first line, so any reader can check it without re-encoding; a record
that was cut, flipped or joined with another is a `FormatError`. Size and depth are bounded before anything is built.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

import xxhash

from everstep.checkpoint.errors import FormatError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MAX_BYTES: Final = 64 * 2**20
MAX_DEPTH: Final = 64
# Of a record of 64 MiB with nothing but pieces each item takes more than 8 bytes. In memory it takes up to 100.
MAX_ITEMS: Final = 12 * 2**20


def encode(body: dict[str, Json]) -> bytes:
    """The two lines. Raises `FormatError` if the body is too large or too deep to be read back."""
    _check_depth(body, "record")
    line = json.dumps(body, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode()
    if len(line) > MAX_BYTES:
        raise FormatError(f"record of {len(line)} bytes: at most {MAX_BYTES} are allowed")
    return line + b'\n{"xxh3_128":"' + xxhash.xxh3_128_hexdigest(line).encode() + b'"}\n'


def decode(data: bytes, where: str) -> dict[str, Json]:
    """The JSON object in the first line, its checksum verified; `where` names the object in errors."""
    if len(data) > MAX_BYTES + 128:
        raise FormatError(f"{where}: {len(data)} bytes, at most {MAX_BYTES} are allowed")
    line, _, check = data.partition(b"\n")
    if check != b'{"xxh3_128":"' + xxhash.xxh3_128_hexdigest(line).encode() + b'"}\n':
        raise FormatError(f"{where}: the record's checksum does not match: it was cut or changed")
    if (items := line.count(b",") + line.count(b"[") + line.count(b"{")) > MAX_ITEMS:
        raise FormatError(f"{where}: {items} items, at most {MAX_ITEMS} are allowed")
    try:
        body = json.loads(line, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{where}: not JSON: {e}") from e
    if not isinstance(body, dict):
        raise FormatError(f"{where}: not a JSON object")
    _check_depth(body, where)
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


def _check_depth(body: Json, where: str) -> None:
    level: list[Json] = [body]
    for _ in range(MAX_DEPTH):
        below: list[Json] = []
        for value in level:
            if isinstance(value, dict):
                below += [v for v in value.values() if isinstance(v, dict | list)]
            elif isinstance(value, list):
                below += [v for v in value if isinstance(v, dict | list)]
        if not below:
            return
        level = below
    raise FormatError(f"{where}: nested deeper than {MAX_DEPTH} levels")


class Fields:
    """Typed access to a decoded object: each method returns the checked value or raises `FormatError` naming it."""

    def __init__(self, body: Json, where: str) -> None:
        if not isinstance(body, dict):
            raise FormatError(f"{where}: an object is expected, not {type(body).__name__}")
        self._body = body
        self.where = where

    def names(self) -> list[str]:
        return list(self._body)

    def has(self, name: str) -> bool:
        return name in self._body

    def any(self, name: str) -> Json:
        if name not in self._body:
            raise FormatError(f"{self.where}: {name} is missing")
        return self._body[name]

    def integer(self, name: str, low: int = 0, high: int = 2**62) -> int:
        return check_integer(self.any(name), f"{self.where}: {name}", low, high)

    def text(self, name: str, limit: int = 512) -> str:
        value = self.any(name)
        if not isinstance(value, str) or len(value) > limit:
            raise FormatError(f"{self.where}: {name} is not a text of at most {limit} characters")
        return value

    def items(self, name: str) -> list[Json]:
        value = self.any(name)
        if not isinstance(value, list):
            raise FormatError(f"{self.where}: {name} is not a list")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        values = self.items(name)
        if all(type(v) is int and 0 <= v <= 2**62 for v in values):
            return tuple(values)  # type: ignore[arg-type]
        return tuple(check_integer(v, f"{self.where}: {name}", 0, 2**62) for v in values)

    def objects(self, name: str) -> list[Fields]:
        return [Fields(v, f"{self.where}: {name}[{i}]") for i, v in enumerate(self.items(name))]

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.any(name)
        if not isinstance(value, dict):
            raise FormatError(f"{self.where}: {name} is not an object")
        return value


def _short(value: Json) -> str:
    """Python refuses to write integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(str(value)[:40])


def check_integer(value: Json, where: str, low: int, high: int) -> int:
    """The value, if it is an integer between the two bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FormatError(f"{where} is {_short(value)}, not an integer from {low} to {high}")
    return value
