"""Which tensors and arrays inside plain values have another form in the commit than in the state that was passed.

Pure trees, as `tree.Flattener` encodes them. Invariant: a live tensor or array that a commit's value would replace,
instead of filling it, is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from everstep.checkpoint.format.manifest import Entry
from everstep.checkpoint.state.tree import DTYPES, join

_TAGS: Final = {"$tensor": "tensor", "$ndarray": "array"}
_INSTEAD: Final = "None in its place takes what the commit has"


@dataclass(frozen=True, slots=True)
class Misfit:
    """A place in a value, and what is the matter. `shape`: only the shape is another one, so it may be left."""

    path: str
    text: str
    shape: bool = False


def misfits(
    tree: Any, live: Any, path: str, entries: Mapping[str, Entry], tensors: Mapping[str, torch.Tensor], cast: bool
) -> Iterator[Misfit]:
    """The places where `live` has a tensor or an array that what stands there in `tree` does not go into."""
    if (own := _tagged(live)) is not None:
        theirs = _tagged(tree)
        if theirs is None or theirs[0] != own[0]:
            there = f"an {theirs[0]}" if theirs and theirs[0] == "array" else "a tensor" if theirs else f"no {own[0]}"
            here = "an array" if own[0] == "array" else "a tensor"
            yield Misfit(path, f"{path}: {there} in the commit, {here} in the state passed; {_INSTEAD}", True)
            return
        tensor, entry = tensors[own[1]], entries[theirs[1]]
        if entry.shape != tuple(tensor.shape):
            text = f"{path}: shape {entry.shape} in the commit, {tuple(tensor.shape)} in the state passed; {_INSTEAD}"
            yield Misfit(path, text, True)
        elif entry.dtype != DTYPES.get(tensor.dtype) and not cast:
            yield Misfit(path, f"{path}: {entry.dtype} in the commit, {DTYPES.get(tensor.dtype)} in the state passed")
        return
    others = dict(_items(tree))
    for name, value in _items(live):
        if name in others:
            shown = join(path, name[1] if isinstance(name[1], str | int) else name[0])
            yield from misfits(others[name], value, shown, entries, tensors, cast)


def _items(tree: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """The parts of an encoded container, each with a text that tells it from the others, and its name."""
    if isinstance(tree, list):
        yield from (((f"[{n}]", n), value) for n, value in enumerate(tree))
    elif isinstance(tree, dict) and len(tree) == 1 and isinstance(parts := tree.get("$tuple"), list):
        yield from (((f"({n})", n), value) for n, value in enumerate(parts))
    elif isinstance(tree, dict) and len(tree) == 1 and isinstance(pairs := tree.get("$dict"), list):
        yield from (((repr(key), key if isinstance(key, str | int) else None), value) for key, value in pairs)
    elif isinstance(tree, dict):
        yield from (((repr(key), key), value) for key, value in tree.items() if not key.startswith("$"))


def _tagged(tree: Any) -> tuple[str, str] | None:
    """The kind of an encoded tensor or array, and its name in the commit."""
    if isinstance(tree, dict) and len(tree) == 1:
        ((tag, name),) = tree.items()
        if tag in _TAGS and isinstance(name, str):
            return _TAGS[tag], name
    return None
