"""Which part of each of a commit's tensors this rank needs. The objects that it is put into decide that.

A sharded live tensor needs its own box, which becomes a tensor that is sharded in the same way. Any other tensor is
needed whole. Optimizer state that does not exist yet is sharded as its parameter is.

Bytes are read into the live tensors where the result is the same: the first use of new memory costs more than reading
the bytes, and the state would be in memory twice. Invariant: a live tensor is filled in place only if the commit fits
all of the state, and all of that tensor's key exactly. So a load that is refused has changed nothing.
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
from everstep.checkpoint.state.union import Union, inside, levels_of, paths, unrequested

log = logging.getLogger("everstep.checkpoint")


@dataclass(frozen=True, slots=True)
class Target:
    """A box of an entry that this rank needs. `shared`: every rank needs all of it. `model`: a tensor that is sharded
    in the way that the result must be; None for a plain result. `memory`: the live tensor that the bytes may be read
    into, if there is one."""

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

    Raises `StateMismatch` if the commit does not fit: before anything is read, so that all ranks can stop.
    """
    values: Any = record.values if isinstance(record.values, dict) else {}
    fitted = fit(state, captured, record, rank, selection)
    models: dict[str, torch.Tensor] = {}
    apart = set[str]()  # read whole: they go into several live tensors that are sharded in different ways
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
    result = []
    for entry in record.entries:
        if entry.name in own:
            result.append(Target(entry, whole(entry.shape), False))
        elif entry.name in shared or entry.name in united:
            together = entry.name not in united
            result.append(_target(entry, models.get(entry.name), live.get(entry.name), group, together))
    return result


def of_all_ranks(
    state: Mapping[str, Any], captured: Captured, ranks: Ranks, unions: bool, record: CommitRecord,
    selection: Selection | None = None,
) -> list[Target]:  # fmt: skip
    """`targets`, and a check that the ranks together request all names in the commit's unions. `unions`: whether some
    rank's state has a union. Collective if there is one, in a state or in the commit.

    Raises `StateMismatch`: on this rank if its own state does not fit, on all ranks if a name would be lost.
    """
    values: Any = record.values if isinstance(record.values, dict) else {}
    saved = {key: body for key, body in values.get("state", {}).items() if body.get("union")}
    problem: CheckpointError | None = None
    result: list[Target] = []
    requested: list[str] | None = None
    try:
        result = targets(state, captured, record, ranks.rank, ranks.group, selection)
        bodies = fit(state, captured, record, ranks.rank, selection).bodies
        trees = {key: bodies[key]["tree"] for key in saved if key in bodies}
        requested = [name for key, tree in trees.items() for name in paths(tree, key, levels_of(saved[key]))]
    except CheckpointError as e:
        problem = e
    if unions or saved:
        by_rank = [
            json.loads(zlib.decompress(data)) for data in ranks.from_each(zlib.compress(json.dumps(requested).encode()))
        ]
        if all(names is not None for names in by_rank):
            if selection is None or selection.whole:
                _check_requested(saved, {name for names in by_rank for name in names}, ranks.rank)
        elif problem is None:  # before a byte is read into the state
            problem = CheckpointError("another rank's state does not fit the commit, and that rank says why")
    if problem is not None:
        raise problem
    return result


def _check_requested(saved: Mapping[str, Any], requested: set[str], rank: int) -> None:
    if (complaint := unrequested(saved, requested)) is not None:
        raise StateMismatch(complaint)
    for key in sorted(saved) if rank == 0 else ():
        if not any(name in requested for name in paths(saved[key]["tree"], key, levels_of(saved[key]))):
            log.warning("the commit holds %r, which no rank asks for", key)


def is_united(target: Any, body: Mapping[str, Any]) -> bool:
    """Whether ranks may request different names of the commit's content under this key."""
    return isinstance(target, Union) or bool(body.get("union"))


def _target(entry: Entry, model: torch.Tensor | None, live: torch.Tensor | None, group: Any, together: bool) -> Target:
    if model is None:
        box = whole(entry.shape)
        return Target(entry, box, together, memory=_memory_of(live, box))
    if tuple(model.shape) != entry.shape:
        raise StateMismatch(
            f"{entry.name}: has shape {entry.shape} in the commit, {tuple(model.shape)} in the state passed"
        )
    part = holding(entry.name, model, group)
    if part is None:
        return Target(entry, Box((0,) * len(entry.shape), (0,) * len(entry.shape)), False, model)
    # An axis of length 1 may have any stride, and `to_local` may change it. torch refuses to copy between two tensors
    # of one memory whose strides differ, and `load_state_dict` would copy so.
    in_place = live is not None and 1 not in part.local.shape
    memory = _memory_of(part.local if in_place else None, part.box)
    return Target(entry, part.box, together and part.box == whole(entry.shape), model, memory)


def _memory_of(local: torch.Tensor | None, box: Box) -> torch.Tensor | None:
    """The tensor, if the bytes of this box can be read directly into its memory; else None."""
    if local is None or local.device.type != "cpu" or tuple(local.shape) != box.shape:
        return None
    return local if local.is_contiguous() and not local.is_conj() and not local.is_neg() else None


def _of_parameters(
    parameters: Mapping[str | int, Any], body: Mapping[str, Any], record: CommitRecord, key: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The names of optimizer state in the commit that belongs to sharded parameters, each with its parameter."""
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
