"""How two checkpoints differ: two commits, or a commit and what another library has written.

Tensors are compared one after the other, so no more than two are in memory. Invariant: everything that is not the same
is in the report, NaN beside NaN being the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.checkpoint.convert.source import Form, Source
from everstep.checkpoint.format.boxes import whole
from everstep.checkpoint.format.manifest import CommitRecord
from everstep.checkpoint.format.wire import Json
from everstep.checkpoint.load.reading import read_box
from everstep.checkpoint.save.shard import torch_dtype
from everstep.checkpoint.state.tree import join, unflatten
from everstep.storage import ObjectStore


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference under one name. `kind`: "missing" (in the second), "added" (in the second only), "shape",
    "dtype", "values" (`elements` differ, by at most `greatest`; infinity beside NaN) or "value" (no tensor)."""

    name: str
    kind: str
    text: str
    elements: int = 0
    greatest: float = 0.0


def of_commit(store: ObjectStore, record: CommitRecord) -> Source:
    """A commit as a source."""
    values: Mapping[str, Any] = record.values if isinstance(record.values, dict) else {}
    entries = {e.name: e for e in record.entries}

    def read(names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, read_box(store, record, entries[name], whole(entries[name].shape))

    forms = {name: Form(e.shape, torch_dtype(e)) for name, e in entries.items()}
    own = {
        f"@{rank}/{key}": body for rank, bodies in enumerate(values.get("ranks", ())) for key, body in bodies.items()
    }
    return Source(f"step {record.step}", {**values.get("state", {}), **own}, forms, read)


def differences(left: Source, right: Source) -> Iterator[Difference]:
    """The differences, by name. A tensor's name is its place in the state; each of several tied tensors has one."""
    here, there = _Tree.of(left), _Tree.of(right)
    for name in sorted({*here.leaves, *there.leaves}):
        if name not in there.leaves:
            yield Difference(name, "missing", f"only in {left.what}")
        elif name not in here.leaves:
            yield Difference(name, "added", f"only in {right.what}")
        else:
            difference = _compared(name, left, here.leaves[name], right, there.leaves[name])
            if difference is not None:
                yield difference
    for name in sorted(here.kinds.keys() & there.kinds.keys()):
        if here.kinds[name] != there.kinds[name]:
            yield Difference(name, "value", f"{here.kinds[name]} → {there.kinds[name]}")


def value_at(source: Source, name: str) -> Any:
    """The tensor or value of this name, decoded. Raises `KeyError` if there is none."""
    leaf = _Tree.of(source).leaves[name]
    if isinstance(leaf, _Tensor):
        return _read(source, leaf.entry)
    return unflatten(leaf, {}, name)


def names_of(source: Source) -> tuple[str, ...]:
    """All names, sorted."""
    return tuple(sorted(_Tree.of(source).leaves))


@dataclass(frozen=True, slots=True)
class _Tensor:
    entry: str


@dataclass(slots=True)
class _Tree:
    """The content of a source, by path: its leaves, and a description of each container's kind. Two sources may have
    the same leaves in containers of different kinds."""

    leaves: dict[str, _Tensor | Json] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Source) -> _Tree:
        slashed = sorted(key for key in source.bodies if "/" in key and not key.startswith("@"))
        tree = cls()
        tree.kinds["(the state)"] = f"a state with the keys {', '.join(map(repr, slashed))}" if slashed else "a state"
        for key, body in sorted(source.bodies.items()):
            if isinstance(body, dict):
                tree.add(body["tree"], key)
        return tree

    def add(self, tree: Json, path: str) -> None:
        """Add a tree at `path`. An empty container is a leaf too. If two leaves have one path, as for the keys "0" and
        0 of a dict, a "~" is added to the second."""
        items: list[tuple[str | int, Json]] = []
        kind = ""
        match tree:
            case {"$tensor": str() as entry} | {"$ndarray": str() as entry} if _is_tag(tree):
                self.leaves[self._free(path)] = _Tensor(entry)
                return
            case {"$tuple": list() as values}:
                kind, items = "a tuple", list(enumerate(values))
            case list() as values:
                kind, items = "a list", list(enumerate(values))
            case {"$dict": list() as pairs}:
                items = [(_key(p[0]), p[1]) for p in sorted(pairs, key=json.dumps) if isinstance(p, list)]
                odd = sorted(json.dumps(p[0]) for p in pairs if isinstance(p, list) and not isinstance(p[0], str))
                kind = f"a dict with the keys {', '.join(odd)}" if odd else "a dict"
            case dict() if not _is_tag(tree):
                kind, items = "a dict", list(tree.items())
        if kind:
            self.kinds[path] = kind
        if not items:
            self.leaves[self._free(path)] = tree
        for name, value in items:
            self.add(value, join(path, name))

    def _free(self, path: str) -> str:
        while path in self.leaves:
            path += "~"
        return path


def _key(encoded: Json) -> str | int:
    return encoded if isinstance(encoded, str | int) else json.dumps(encoded)


def _is_tag(tree: Json) -> bool:
    return isinstance(tree, dict) and len(tree) == 1 and next(iter(tree)).startswith("$")


def _compared(name: str, left: Source, a: _Tensor | Json, right: Source, b: _Tensor | Json) -> Difference | None:
    if not isinstance(a, _Tensor) or not isinstance(b, _Tensor):
        return (
            None
            if a == b and type(a) is type(b)
            else Difference(name, "value", f"{_text(left, a)} → {_text(right, b)}")
        )
    before, after = left.tensors[a.entry], right.tensors[b.entry]
    if before.shape != after.shape:
        return Difference(name, "shape", f"{list(before.shape)} → {list(after.shape)}")
    x, y = _read(left, a.entry), _read(right, b.entry)
    count, greatest = _distance(x, y)
    if before.dtype != after.dtype:
        more = f", {_amount(count, x.numel(), greatest)}" if count else ", equal values"
        return Difference(name, "dtype", f"{_plain(before.dtype)} → {_plain(after.dtype)}{more}", count, greatest)
    return Difference(name, "values", _amount(count, x.numel(), greatest), count, greatest) if count else None


def _distance(x: torch.Tensor, y: torch.Tensor) -> tuple[int, float]:
    """How many elements differ, and the greatest difference; infinite where one is NaN and the other is not."""
    if x.is_complex() or y.is_complex():
        x, y = (torch.view_as_real(t.to(torch.complex128)) for t in (x, y))
    if not x.is_floating_point() and not y.is_floating_point():
        exact = [t if t.dtype == torch.uint64 else t.to(torch.int64) for t in (x, y)]
        # Compared as integers: two large ones may be the same number as floats.
        differ = exact[0].view(torch.int64) != exact[1].view(torch.int64)
        if (x.dtype == torch.uint64) != (y.dtype == torch.uint64):
            differ |= exact[0].view(torch.int64) < 0  # 2^63 and more, beside what is less than 0
        apart = (exact[0].double()[differ] - exact[1].double()[differ]).abs()
        return int(differ.sum()), max(1.0, float(apart.max())) if apart.numel() else 0.0
    rounded = torch.zeros(x.shape, dtype=torch.bool)
    for whole_, other in ((x, y), (y, x)):
        if whole_.dtype == torch.int64:  # which has more digits than any float
            rounded = whole_ != other.to(torch.float64).nan_to_num().to(torch.int64)
    x, y = x.to(torch.float64), y.to(torch.float64)
    differ = ((x != y) | rounded) & ~(x.isnan() & y.isnan())
    apart = (x[differ] - y[differ]).abs()
    return int(differ.sum()), float(apart.nan_to_num(math.inf, math.inf).max()) if apart.numel() else 0.0


def _amount(count: int, total: int, greatest: float) -> str:
    return f"{count} of {total} elements differ, by {greatest:.6g} at most"


def _read(source: Source, entry: str) -> torch.Tensor:
    return next(iter(source.read([entry])))[1]


def _text(source: Source, leaf: _Tensor | Json) -> str:
    if isinstance(leaf, _Tensor):
        form = source.tensors[leaf.entry]
        return f"a tensor {_plain(form.dtype)} {list(form.shape)}"
    text = json.dumps(leaf)
    return text if len(text) <= 60 else text[:59] + "…"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
