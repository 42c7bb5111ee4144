"""Which part of each of a commit's tensors this rank needs, judged by the objects that it will be put into.

A sharded live tensor needs its own box, and gets it back as a tensor sharded like it; everything else is needed whole.
Optimizer state that does not exist yet is sharded as its parameter is.

Bytes are read into the live tensors where the result is the same: the first use of new memory costs more than reading
the bytes, and the state would be held twice. Invariant: a live tensor is filled in place only if the commit fits all of
the state, and all of that tensor's key exactly; so what is refused because it does not fit was not changed.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from everstep.checkpoint.errors import CheckpointError, StateMismatch
from everstep.checkpoint.format.boxes import Box, whole
from everstep.checkpoint.format.manifest import CommitRecord, Entry
from everstep.checkpoint.load.fit import fillable, fit, tensors_of
from everstep.checkpoint.load.selection import Selection
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.state.capture import Captured, parameters_of
from everstep.checkpoint.state.sharding import holding, is_sharded, like, one_layout
from everstep.checkpoint.state.tree import references
from everstep.checkpoint.state.union import Union, inside, levels_of, paths, unasked

log = logging.getLogger("everstep.checkpoint")


@dataclass(frozen=True, slots=True)
class Target:
    """A box of an entry that this rank needs. `shared`: every rank needs all of it. `model` is sharded as the result is
    to be; None for a plain tensor. `memory` is the live tensor that the bytes may be read into, if there is one."""

    entry: Entry
    box: Box
    shared: bool
    model: torch.Tensor | None = None
    memory: torch.Tensor | None = None

    def finish(self, local: torch.Tensor) -> torch.Tensor:
        return local if self.model is None else like(self.model, local)


def targets(
    state: Mapping[str, Any], captured: Captured, record: CommitRecord, rank: int, group: Any = None,
    selection: Selection | None = None,
) -> list[Target]:  # fmt: skip
    """The targets in `state` for the commit's entries, in their order. `captured` is the present content of `state`.

    Raises `StateMismatch` if the commit does not fit: here, before anything is read, so that every rank learns of it.
    """
    values: Any = record.values if isinstance(record.values, dict) else {}
    fitted = fit(state, captured, record, rank, selection)
    models: dict[str, torch.Tensor] = {}
    apart = set[str]()  # goes into several tensors that are sharded in different ways: each takes its part of the whole
    for name, own_names in fitted.live.items():
        found_in = [captured.tensors[own] for own in own_names]
        if one_layout(found_in):
            models[name] = found_in[0]
        elif any(map(is_sharded, found_in)):
            apart.add(name)
    shared, own, united = set[str](), set[str](), set[str]()
    for key, body in fitted.bodies.items():
        target = inside(state[key])
        if getattr(target, "everstep_per_rank", False):
            own.update(references(body["tree"]))
            continue
        (united if is_united(state[key], values.get("state", {}).get(key, {})) else shared).update(
            references(body["tree"])
        )
        if isinstance(target, torch.optim.Optimizer):
            placed = _of_parameters(parameters_of(state, key, body), body, record, key)
            models |= {name: like for name, like in placed if name not in models and name not in apart}
    live = fillable(fitted, captured, {e.name: e for e in record.entries})
    live = {name: tensor for name, tensor in live.items() if name not in apart}
    found = []
    for entry in record.entries:
        if entry.name in own:
            found.append(Target(entry, whole(entry.shape), False))
        elif entry.name in shared or entry.name in united:
            together = entry.name not in united
            found.append(_target(entry, models.get(entry.name), live.get(entry.name), group, together))
    return found


def of_all_ranks(
    state: Mapping[str, Any], captured: Captured, ranks: Ranks, unions: bool, record: CommitRecord,
    selection: Selection | None = None,
) -> list[Target]:  # fmt: skip
    """`targets`, and that the ranks ask together for all that the commit's unions hold. `unions`: some rank's state has
    one. Collective where there is one, here or in the commit.

    Raises `StateMismatch`: on this rank if its own state does not fit, on all if a name would be lost.
    """
    values: Any = record.values if isinstance(record.values, dict) else {}
    saved = {key: body for key, body in values.get("state", {}).items() if body.get("union")}
    problem: CheckpointError | None = None
    found: list[Target] = []
    asked: list[str] | None = None
    try:
        found = targets(state, captured, record, ranks.rank, ranks.group, selection)
        bodies = fit(state, captured, record, ranks.rank, selection).bodies
        asked = [n for key in saved if key in bodies for n in paths(bodies[key]["tree"], key, levels_of(saved[key]))]
    except CheckpointError as e:
        problem = e
    if unions or saved:
        told = [
            json.loads(zlib.decompress(data)) for data in ranks.from_each(zlib.compress(json.dumps(asked).encode()))
        ]
        if all(names is not None for names in told):
            if selection is None or selection.whole:
                _check_asked(saved, {name for names in told for name in names}, ranks.rank)
        elif problem is None:  # before a byte is read into the state
            problem = CheckpointError("another rank's state does not fit the commit, and that rank says why")
    if problem is not None:
        raise problem
    return found


def _check_asked(saved: Mapping[str, Any], asked: set[str], rank: int) -> None:
    if (complaint := unasked(saved, asked)) is not None:
        raise StateMismatch(complaint)
    for key in sorted(saved) if rank == 0 else ():
        if not any(name in asked for name in paths(saved[key]["tree"], key, levels_of(saved[key]))):
            log.warning("the commit holds %r, which no rank asks for", key)


def is_united(target: Any, body: Mapping[str, Any]) -> bool:
    """Whether ranks may ask for other names of what the commit holds under this key."""
    return isinstance(target, Union) or bool(body.get("union"))


def _target(entry: Entry, model: torch.Tensor | None, live: torch.Tensor | None, group: Any, together: bool) -> Target:
    if model is None:
        box = whole(entry.shape)
        return Target(entry, box, together, memory=_memory_of(live, box))
    if tuple(model.shape) != entry.shape:
        raise StateMismatch(
            f"{entry.name}: has shape {entry.shape} in the commit, {tuple(model.shape)} in the state passed"
        )
    held = holding(entry.name, model, group)
    if held is None:
        return Target(entry, Box((0,) * len(entry.shape), (0,) * len(entry.shape)), False, model)
    # An axis of length 1 has any stride, and `to_local` gives it another one than the tensor's own part may have; torch
    # refuses to copy between two of one memory whose strides differ, as `load_state_dict` does.
    in_place = live is not None and 1 not in held.local.shape
    memory = _memory_of(held.local if in_place else None, held.box)
    return Target(entry, held.box, together and held.box == whole(entry.shape), model, memory)


def _memory_of(local: torch.Tensor | None, box: Box) -> torch.Tensor | None:
    """The tensor, if the bytes of this box can be put straight into its memory."""
    if local is None or local.device.type != "cpu" or tuple(local.shape) != box.shape:
        return None
    return local if local.is_contiguous() and not local.is_conj() and not local.is_neg() else None


def _of_parameters(
    parameters: Mapping[str | int, Any], body: Mapping[str, Any], record: CommitRecord, key: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The names of the optimizer state that the commit holds for sharded parameters, with the parameter."""
    if not any(is_sharded(p) for p in parameters.values()):
        return
    shapes = {e.name: e.shape for e in record.entries}
    for number, names in tensors_of(body).items():
        parameter = parameters.get(number)
        if parameter is None or not is_sharded(parameter):
            continue
        for name in names:
            if shapes.get(name) == tuple(parameter.shape):
                yield name, parameter
            elif len(shapes.get(name, ())) > 1:
                raise StateMismatch(
                    f"{name}: is no scalar and not of its parameter's shape, so how it is sharded cannot be told: make "
                    f"one optimizer step before restore(), so that {key!r} holds such tensors"
                )
