"""How two checkpoints differ: two commits, or a commit and what another library has written.

Tensors are compared one after the other, so no more than two are in memory. Invariant: everything that is not the same
is in the report, NaN beside NaN being the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from everstep.checkpoint.boxes import whole
from everstep.checkpoint.manifest import CommitRecord
from everstep.checkpoint.reading import read_box
from everstep.checkpoint.shard import torch_dtype
from everstep.checkpoint.source import Form, Source
from everstep.checkpoint.tree import join, unflatten
from everstep.checkpoint.wire import Json
from everstep.storage import ObjectStore


@dataclass(frozen=True, slots=True)
class Difference:
    """What is not the same under a name. `kind`: "missing" (in the second), "added" (in the second only), "shape",
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
    own = {f"@{rank}/{key}": body for rank, held in enumerate(values.get("ranks", ())) for key, body in held.items()}
    return Source(f"step {record.step}", {**values.get("state", {}), **own}, forms, read)


def differences(one: Source, other: Source) -> Iterator[Difference]:
    """What differs, by name. Names of tensors are their places in the state: of tied ones each has one."""
    places, others = _places(one), _places(other)
    for name in sorted({*places, *others}):
        if name not in others:
            yield Difference(name, "missing", f"only in {one.what}")
        elif name not in places:
            yield Difference(name, "added", f"only in {other.what}")
        else:
            found = _compared(name, one, places[name], other, others[name])
            if found is not None:
                yield found
    kinds, theirs = _kinds(one), _kinds(other)
    for name in sorted(kinds.keys() & theirs.keys()):
        if kinds[name] != theirs[name]:
            yield Difference(name, "value", f"{kinds[name]} → {theirs[name]}")


def value_at(source: Source, name: str) -> Any:
    """The tensor or value of this name, decoded. Raises `KeyError` if there is none."""
    place = _places(source)[name]
    if isinstance(place, _Tensor):
        return _read(source, place.entry)
    return unflatten(place, {}, name)


def names_of(source: Source) -> tuple[str, ...]:
    """All names, sorted."""
    return tuple(sorted(_places(source)))


@dataclass(frozen=True, slots=True)
class _Tensor:
    entry: str


def _places(source: Source) -> dict[str, _Tensor | Json]:
    found: dict[str, _Tensor | Json] = {}
    for key, body in sorted(source.bodies.items()):
        if isinstance(body, dict):
            _collect(body["tree"], key, found)
    return found


def _kinds(source: Source) -> dict[str, str]:
    """What each container is, in words: leaves of the same names may lie in another one."""
    slashed = sorted(key for key in source.bodies if "/" in key.removeprefix("@"))
    found = {"(the state)": f"a state with the keys {', '.join(map(repr, slashed))}" if slashed else "a state"}
    for key, body in source.bodies.items():
        if isinstance(body, dict):
            _collect_kinds(body["tree"], key, found)
    return found


def _collect_kinds(tree: Json, path: str, found: dict[str, str]) -> None:
    items: Iterable[tuple[Any, Json]] = ()
    match tree:
        case {"$tuple": list() as values}:
            found[path], items = "a tuple", enumerate(values)
        case list() as values:
            found[path], items = "a list", enumerate(values)
        case {"$dict": list() as pairs}:
            items = [(_key(pair[0]), pair[1]) for pair in pairs if isinstance(pair, list)]
            odd = sorted(
                json.dumps(pair[0]) for pair in pairs if isinstance(pair, list) and not isinstance(pair[0], str)
            )
            found[path] = f"a dict with the keys {', '.join(odd)}" if odd else "a dict"
        case dict() if not _is_tag(tree):
            found[path], items = "a dict", tree.items()
    for name, value in items:
        _collect_kinds(value, join(path, name), found)


def _key(encoded: Json) -> str | int:
    return encoded if isinstance(encoded, str | int) else json.dumps(encoded)


def _collect(tree: Json, path: str, found: dict[str, _Tensor | Json]) -> None:
    """The leaves of an encoded tree by their paths; an empty container is a leaf. Of two that have one path, as the
    keys "0" and 0 of a dict, the second has a "~" behind it."""
    match tree:
        case {"$tensor": str() as entry} | {"$ndarray": str() as entry} if isinstance(tree, dict) and _is_tag(tree):
            found[_free(path, found)] = _Tensor(entry)
        case {"$tuple": list() as items} | (list() as items) if items:
            for at, value in enumerate(items):
                _collect(value, join(path, at), found)
        case {"$dict": list() as pairs} if pairs:
            for pair in sorted(pairs, key=json.dumps):
                assert isinstance(pair, list)
                _collect(pair[1], join(path, _key(pair[0])), found)
        case dict() if tree and not _is_tag(tree):
            for name, value in tree.items():
                _collect(value, join(path, name), found)
        case _:
            found[_free(path, found)] = tree


def _free(path: str, found: Mapping[str, object]) -> str:
    while path in found:
        path += "~"
    return path


def _is_tag(tree: dict[str, Json]) -> bool:
    return len(tree) == 1 and next(iter(tree)).startswith("$")


def _compared(name: str, one: Source, a: _Tensor | Json, other: Source, b: _Tensor | Json) -> Difference | None:
    if not isinstance(a, _Tensor) or not isinstance(b, _Tensor):
        return (
            None if a == b and type(a) is type(b) else Difference(name, "value", f"{_said(one, a)} → {_said(other, b)}")
        )
    before, after = one.tensors[a.entry], other.tensors[b.entry]
    if before.shape != after.shape:
        return Difference(name, "shape", f"{list(before.shape)} → {list(after.shape)}")
    x, y = _read(one, a.entry), _read(other, b.entry)
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
        differ = exact[0].view(torch.int64) != exact[1].view(torch.int64)  # whole numbers that no float tells apart too
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


def _said(source: Source, place: _Tensor | Json) -> str:
    if isinstance(place, _Tensor):
        form = source.tensors[place.entry]
        return f"a tensor {_plain(form.dtype)} {list(form.shape)}"
    text = json.dumps(place)
    return text if len(text) <= 60 else text[:59] + "…"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
