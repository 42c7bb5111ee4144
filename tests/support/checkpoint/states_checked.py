"""Saves a state that `states.py` or `states_placed.py` describes, and looks whether it comes back equal."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, settings
from torch.distributed.tensor import DTensor

import everstep
from everstep.checkpoint.state.layouts import span
from everstep.storage import MemoryStore, ObjectStore
from support.checkpoint import states
from support.checkpoint.states_held import differences, fillable, held, own_part

FEW, MANY = 200, 10_000


def times(examples: int, *phases: Phase) -> settings:
    """`make test` has the same states each time; other ones are drawn where many are, in `make soak`."""
    return settings(
        max_examples=examples, deadline=None, database=None, report_multiple_bugs=False, derandomize=examples < MANY,
        suppress_health_check=list(HealthCheck), phases=phases or list(Phase),
    )  # fmt: skip


def committed(state: dict[str, Any], store: ObjectStore | None = None) -> ObjectStore:
    """A store with a commit of this state. Collective where there are several processes."""
    store = MemoryStore() if store is None else store
    with everstep.Checkpointer(store=store, nonfinite="allow", on_event=lambda kind, **_: None) as run:
        run.restore(dict(state))
        run.save(1, state).wait(30)
    if dist.is_initialized():
        dist.barrier()  # rank 0 has committed
    return store


def same(was: Any, now: Any) -> None:
    found = differences(was, now)
    assert not found, "; ".join(found)


def parts_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All that is in a value, and itself, with their places."""
    yield path, value
    items: Any = value if isinstance(value, list | tuple) else ()
    if isinstance(value, collections.abc.Mapping):
        items = value.values()  # by number: NaN is a key that is not found again
    for place, item in enumerate(items):
        yield from parts_of(item, (*path, place))


def saved_parts(key: str, value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All that a commit holds of the value under this key of a state."""
    return parts_of(value.state_dict() if hasattr(value, "state_dict") else value, (key,))


def is_filled(value: Any) -> bool:
    """Whether a script may have a name of its own for it: then it is filled, and not replaced."""
    filled = (torch.Tensor, np.ndarray, bytearray, dict, list, collections.UserDict)
    return isinstance(value, filled) and fillable(value)


def partly_shared(parts: Iterable[Any]) -> set[int]:
    """By identity, the tensors and arrays whose memory is partly another's, which may be given memory of their own."""
    spans = {}
    for part in parts:
        if isinstance(part, torch.Tensor) and part.layout is torch.strided:
            spans[id(part)] = span(own_part(part))
        elif isinstance(part, np.ndarray):
            spans[id(part)] = np.lib.array_utils.byte_bounds(part)
    listed = sorted((begin, end, number) for number, (begin, end) in spans.items())
    pairs = [(a, b) for i, a in enumerate(listed) for b in listed[i + 1 :] if b[0] < a[1] and a[:2] != b[:2]]
    return {number for pair in pairs for *_, number in pair}


def check(described: dict[str, states.Object], store: ObjectStore | None = None) -> None:
    """Save a state; read it as it is, into a blank one of the same form, and where tensors are cut into one that is cut
    in another way. Raises `AssertionError`."""
    store = committed(states.build(described), store)
    want = states.build(described)
    same({key: held(value) for key, value in want.items()}, dict(everstep.load(store=store).state))
    assert len(everstep.open_commit(store=store).names()) == places(want), "what is one in memory is held once"
    check_filled(described, want, store, moved=False)
    if any(isinstance(part, DTensor) for key in want for _, part in saved_parts(key, want[key])):
        check_filled(described, want, store, moved=True)


def check_filled(described: dict[str, states.Object], want: dict[str, Any], store: ObjectStore, *, moved: bool) -> None:
    into = states.build(described, blank=True, moved=moved)
    plain = [key for key, target in described.items() if target.kind == "value"]
    before = {key: [(path, part) for path, part in parts_of(into[key]) if is_filled(part)] for key in plain}
    crossed = partly_shared([part for parts in before.values() for _, part in parts])
    everstep.load(store=store, state=into)
    for key, value in want.items():
        now = into[key]
        if key in plain:
            same(value, now)
            after = dict(parts_of(now))
            for path, part in before[key]:
                if after.get(path) is not part and path in after and id(part) not in crossed:
                    raise AssertionError(f"{key}{path}: {type(part)} was replaced")
        elif isinstance(value, torch.nn.Module):
            own_parts, parts = dict(value.state_dict()), dict(now.state_dict())
            same(held(own_parts.pop("_extra_state")), held(parts.pop("_extra_state")))
            same(own_parts, parts)
        else:
            same(held(value), held(now))


def places(state: dict[str, Any]) -> int:
    """How many tensors a commit has to hold."""
    found: set[Any] = set()
    for key, value in state.items():
        for path, tensor in saved_parts(key, value):
            if isinstance(tensor, np.ndarray) or (isinstance(tensor, torch.Tensor) and not tensor.numel()):
                found.add(path)
            elif isinstance(tensor, torch.Tensor):
                part = own_part(tensor)
                cut = tensor.placements if isinstance(tensor, DTensor) else None
                views = (tensor.is_conj(), tensor.is_neg(), tensor.dtype)
                memory = part.untyped_storage()._cdata, part.storage_offset()
                found.add((memory, cut, tuple(tensor.shape), tensor.stride(), views))
    return len(found)
