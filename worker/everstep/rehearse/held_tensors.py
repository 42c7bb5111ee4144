"""Reads digests of the tensors that a script's own variables hold and that are not tracked: an average of the weights
kept by hand, a hidden state, a replay buffer.

What stands in a module or in a container is one value, under the name of the outermost one. A tensor that hangs in a
graph of derivatives is a result of its step, and left out. Bounds: `VISITS` objects, `MOST` tensors, `MOST_BYTES`; what
lies beyond is named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash

from everstep.checkpoint.state.alike import first_bytes
from everstep.checkpoint.state.layouts import is_dense, size_of
from everstep.checkpoint.state.sharding import local_of
from everstep.rehearse.record import DIGEST, MOST_BYTES
from everstep.train.guards.script_objects import Held, walk

VISITS = 8000
MOST = 1024  # tensors
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)


def held_tensors(
    roots: Iterable[tuple[str, Any]], tracked: Mapping[str, Any], closed: Iterable[object] = ()
) -> tuple[dict[str, str], list[str]]:
    """What each value is and its digest, by name; and the names of what is too much to be read. `roots`: the script's
    values, by name. `closed`: objects that are not looked into, beside what is `tracked`. Raises what the script's
    own classes raise."""
    known = _storages(tracked)
    modules = {id(one) for one in tracked.values() if isinstance(one, torch.nn.Module)}
    others = [one for one in tracked.values() if id(one) not in modules]  # a module's own attributes are not saved
    groups: dict[str, str] = {}  # each container and module with the name of the outermost one that it stands in
    found: dict[str, list[Held]] = {}
    count, beyond = 0, list[str]()
    for held in islice(walk(roots, [*closed, *others]), VISITS):
        value = held.value
        if isinstance(value, _CONTAINERS) or (isinstance(value, torch.nn.Module) and not _saves(value, known)):
            groups[held.name] = groups.get(held.owner, held.name)
        elif isinstance(value, torch.Tensor | np.ndarray) and _is_own(value, known):
            count += 1
            name = groups.get(held.owner, held.name)
            if count > MOST:
                beyond.append(name)
            else:
                found.setdefault(name, []).append(held)
    left, values = MOST_BYTES, dict[str, str]()
    sizes = {name: sum(_size(one.value) for one in parts) for name, parts in found.items() if name not in beyond}
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        left -= size
        if left < 0:
            beyond.append(name)
        else:
            values[name] = _text(name, found[name])
    return values, sorted(set(beyond))


def _saves(module: torch.nn.Module, known: set[int]) -> bool:
    """Whether its parameters are tracked."""
    return any(_storage(one) in known for one in module.parameters())


def _is_own(value: torch.Tensor | np.ndarray, known: set[int]) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    return value.grad_fn is None and not value.is_meta and _storage(value) not in known


def _storages(tracked: Mapping[str, Any]) -> set[int]:
    """Of the tensors that are tracked. A view of one of them is tracked too."""
    modules = [one for one in tracked.values() if isinstance(one, torch.nn.Module)]  # save no plain attributes
    found = {_storage(one) for module in modules for one in (*module.parameters(), *module.buffers())}
    others = {name: one for name, one in tracked.items() if not isinstance(one, torch.nn.Module)}
    for held in walk(others.items()):
        if isinstance(held.value, torch.Tensor):
            found.add(_storage(held.value))
    return found


def _storage(tensor: torch.Tensor) -> int:
    """The address of its memory; of one that has none (empty, sparse), of the object."""
    part = local_of(tensor.detach())
    return (part.untyped_storage().data_ptr() if is_dense(part) else 0) or -id(tensor)


def _size(value: Any) -> int:
    return int(value.nbytes) if isinstance(value, np.ndarray) else size_of(value)


def _text(name: str, parts: list[Held]) -> str:
    found = xxhash.xxh3_128()
    for held in parts:
        value = held.value
        found.update(f"{held.name}{value.dtype}{tuple(value.shape)}".encode())
        if isinstance(value, np.ndarray):
            found.update(np.ascontiguousarray(value).tobytes())
        else:
            part = local_of(value.detach())
            found.update(first_bytes(part, MOST_BYTES))
    if len(parts) > 1 or parts[0].name != name:
        what = f"{len(parts)} tensor{'s' if len(parts) > 1 else ''}"
    else:
        what = f"tensor of shape {list(parts[0].value.shape)}"
    return f"{what}{DIGEST}{found.hexdigest()}"
