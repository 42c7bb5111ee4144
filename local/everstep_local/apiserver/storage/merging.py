"""Copies and merges JSON values without changing shared parts.

Invariant: arguments are never changed, and unchanged parts are the same objects in the result. So a comparison of two
versions is cheap where they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from everstep_local.apiserver.refusals import Refusal, bad_request
from everstep_local.apiserver.storage.store import Json

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()
MAX_BODY = 3 * 1024 * 1024  # bytes; the server's limit of a request


def copied(body: Mapping[str, Any]) -> Json:
    """A copy as JSON values, to which the caller has no reference. Raises Refusal (400, 413)."""
    try:
        text = _encoder.encode(body)
        value = _decoder.decode(text)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise bad_request(f"the object provided is not JSON: {error}") from error
    if len(text) > MAX_BODY:
        raise Refusal(413, "RequestEntityTooLarge", f"Request entity too large: limit is {MAX_BODY}")
    if not isinstance(value, dict):
        raise bad_request("the object provided is not a JSON object")
    return value


def merged(old: Any, patch: Any) -> Any:
    """RFC 7386: `patch` laid over `old`, null deletes."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def without_nulls(value: Any) -> Any:
    """`value` without null fields, as a typed object is read. The same object if there are none."""
    if isinstance(value, dict):
        present = {key: without_nulls(item) for key, item in value.items() if item is not None}
        same = len(present) == len(value) and all(present[key] is value[key] for key in present)
        return value if same else present
    if isinstance(value, list):
        items = [without_nulls(item) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    return value


def same(left: Any, right: Any) -> bool:
    """Whether two values are the same to a typed object, for which an empty list or map is the same as an absent
    one."""
    if left is right or left == right:
        return True
    if isinstance(left, dict) and isinstance(right, dict):
        return all(same(left.get(key), right.get(key)) for key in left.keys() | right.keys())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left in _EMPTY and right in _EMPTY


_EMPTY: tuple[Any, ...] = (None, {}, [])


def at_path(value: Any, path: tuple[str, ...]) -> Any:
    """The value at `path`; None if there is none."""
    for field in path:
        value = value.get(field) if isinstance(value, dict) else None
    return value


def put_at(value: Json, path: tuple[str, ...], item: Any) -> Json:
    """`value` with `item` at `path`."""
    field, *rest = path
    inner = value.get(field)
    return {**value, field: put_at(inner if isinstance(inner, dict) else {}, tuple(rest), item) if rest else item}
