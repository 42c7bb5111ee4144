"""What the `values` of a commit may be, checked where a record is decoded.

Pure. Whoever loads a commit takes its values for what this writer makes of a state. A record of another hand has to be
refused before that, with the one error that makes a restore step over it. Invariant: of values that `check_values`
passed, each key has a kind and a tree, each tag can be decoded, and each reference is to a tensor of the commit.
"""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Mapping
from typing import Final

from everstep.checkpoint.errors import FormatError
from everstep.checkpoint.format.wire import Json

KINDS: Final = ("module", "stateful", "optimizer", "value")
FLOATS: Final = ("nan", "inf", "-inf")
_NOT_NUMPYS: Final = ("BF16", "F8_E4M3", "F8_E5M2")


def check_values(values: Json, dtypes: Mapping[str, str], where: str) -> None:
    """Raise `FormatError` naming the place. `dtypes`: of the commit's tensors, by name; {} for a compacted record."""
    if not isinstance(values, dict):
        raise FormatError(f"{where}: values is a {_type(values)}, not an object")
    _check_bodies(values.get("state", {}), dtypes, f"{where}: values: state")
    ranks = values.get("ranks", [])
    if not isinstance(ranks, list):
        raise FormatError(f"{where}: values: ranks is a {_type(ranks)}, not a list")
    for rank, bodies in enumerate(ranks):
        _check_bodies(bodies, dtypes, f"{where}: values: ranks[{rank}]")
    if not _is_list_of_texts(values.get("nonfinite", [])):
        raise FormatError(f"{where}: values: nonfinite is not a list of texts")
    metrics = values.get("metrics", {})
    if not isinstance(metrics, dict) or not all(_is_number(value) for value in metrics.values()):
        raise FormatError(f"{where}: values: metrics is not an object of numbers")


def _check_bodies(bodies: Json, dtypes: Mapping[str, str], where: str) -> None:
    if not isinstance(bodies, dict):
        raise FormatError(f"{where} is a {_type(bodies)}, not an object")
    for key, body in bodies.items():
        at = f"{where}[{key[:80]!r}]"
        if not isinstance(body, dict) or "tree" not in body:
            raise FormatError(f"{at} is not an object with a tree")
        kind, tree = body.get("kind"), body["tree"]
        if kind not in KINDS:
            raise FormatError(f"{at}: kind {str(kind)[:40]!r} is none of {', '.join(KINDS)}")
        if not isinstance(body.get("class", ""), str) or not isinstance(body.get("union", False), bool):
            raise FormatError(f"{at}: class is not a text, or union is neither true nor false")
        if "names" in body and not _is_list_of_texts(body["names"]):
            raise FormatError(f"{at}: names is not a list of texts")
        if kind in ("module", "optimizer") and not isinstance(tree, dict):
            raise FormatError(f"{at}: the tree of a {kind} is a {_type(tree)}, not an object")
        if kind == "optimizer":
            _check_optimizer(tree, at)
        _check_tree(tree, dtypes, at)
        _check_tree(body.get("metadata"), {}, f"{at}: metadata")


def _check_optimizer(tree: Json, at: str) -> None:
    """One that was saved by the names of its parameters."""
    for part in ("state", "param_groups"):
        named = tree.get(part) if isinstance(tree, dict) else None
        if not isinstance(named, dict) or not all(isinstance(value, dict) for value in named.values()):
            raise FormatError(f"{at}: {part} of an optimizer's tree is not an object of objects")


def _check_tree(tree: Json, dtypes: Mapping[str, str], at: str) -> None:
    """Depth is bounded by the record's."""
    if isinstance(tree, list):
        for value in tree:
            _check_tree(value, dtypes, at)
    elif isinstance(tree, dict):
        tag = next((key for key in tree if key.startswith("$")), None)
        if tag is None:
            for value in tree.values():
                _check_tree(value, dtypes, at)
        elif len(tree) > 1 or not _is_tagged(tag, tree[tag], dtypes, at):
            raise FormatError(f"{at}: {tag[:40]} {str(tree[tag])[:80]!r} cannot be decoded")


def _is_tagged(tag: str, body: Json, dtypes: Mapping[str, str], at: str) -> bool:
    match tag, body:
        case "$float", str():
            return body in FLOATS
        case "$tensor", str():
            return body in dtypes
        case "$ndarray", str():
            return dtypes.get(body, "BF16") not in _NOT_NUMPYS
        case "$bytes", str():
            try:
                base64.b64decode(body, validate=True)
            except (binascii.Error, ValueError):
                return False
            return True
        case "$tuple", list():
            _check_tree(body, dtypes, at)
            return True
        case "$dict", list():
            for pair in body:
                if not isinstance(pair, list) or len(pair) != 2 or not _is_key(pair[0]):
                    return False
                _check_tree(pair[0], dtypes, at)
                _check_tree(pair[1], dtypes, at)
            return True
    return False


def _is_key(key: Json) -> bool:
    """Whether it decodes to what a mapping can have for a key."""
    if isinstance(key, dict) and len(key) == 1:
        ((tag, body),) = key.items()
        return tag in ("$float", "$bytes", "$tensor") or (
            tag == "$tuple" and isinstance(body, list) and all(_is_key(item) for item in body)
        )
    return not isinstance(key, dict | list)


def _is_list_of_texts(value: Json) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_number(value: Json) -> bool:
    """An integer may be larger than any floating-point number, and could not be compared with one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _type(value: Json) -> str:
    return {list: "list", dict: "object", str: "text", type(None): "null"}.get(type(value), type(value).__name__)
