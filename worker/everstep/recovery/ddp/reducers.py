"""DistributedDataParallel's reducers: made anew for each round, with buckets that add up as those before them did.

A reducer knows the number of ranks, and buckets that it ordered by the gradients' arrival in its first backward pass.
A member that keeps old buckets beside a new one that has others adds up gradients of different parameters, without any
error. So every member makes its reducer anew, as DDP's constructor does, without that constructor's broadcast: who
gives its state to whom is agreed on elsewhere.

How gradients share buckets decides, with three ranks or more, in which order the ranks' values are summed, and so the
last bits of each sum. So the order of arrival is part of the training state: `Reducers` learns it once, after the first
step that DDP orders its buckets by, commits and peers carry it, and reducers that are made later begin with it.

Invariant: all members of a round make their reducers with the same order. Uses names of torch's that are not public;
`tests/recovery/test_recovery_reducers.py` watches them.
"""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch._C import _distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint.state.modules import bare
from everstep.recovery.ddp.averaged import lists_for_reducer, parameters_of, requiring_gradients
from everstep.recovery.group.members import Members

log = logging.getLogger("everstep.train")

BUCKETS = "ddp_buckets"  # the name of a `Reducers` in the state of a run
BUILTIN = "BuiltinCommHookType."
SAMPLE_RATE = 100  # torch's default, of passes


@dataclass(eq=False, slots=True)
class _Orderly:
    """A DDP object of a tracked module that orders its buckets, by its name and a digest of its parameters."""

    reference: weakref.ref[DistributedDataParallel]
    name: str
    parameters: str
    count: int  # of its parameters
    order: tuple[int, ...] | None = None  # of its parameters, by their gradients' first arrival; None: not known yet
    made: tuple[int, ...] | None = None  # the order that its present reducer was made with


class Reducers:
    """The DDP objects of this process, found once: after the script has built them. A tracked object of the session."""

    everstep_optional = True  # commits of before this was saved

    def __init__(self, state: Mapping[str, Any]) -> None:
        found = parallel() if dist.is_available() and dist.is_initialized() else []
        if len(found) > 1:  # what the script dropped may be gone on one rank, and not yet on another
            del found
            gc.collect()
            found = parallel()
        self._found = [weakref.ref(ddp) for ddp in found]
        self._reduced = weakref.WeakKeyDictionary({ddp: parameters_of(ddp) for ddp in found})
        names = _names(state)
        orderly = [
            _orderly(ddp, name, self._reduced[ddp]) for ddp in found if _orders(ddp) and (name := _name(ddp, names))
        ]
        # Ranks order theirs in turn, so two that nobody can tell apart are left to torch.
        count = Counter((o.name, o.parameters) for o in orderly)
        self._orderly = sorted(
            (o for o in orderly if count[o.name, o.parameters] == 1), key=lambda o: (o.name, o.parameters)
        )
        # Held until they are known: one that the script drops goes at another moment on each rank.
        self._unknown: list[tuple[_Orderly, DistributedDataParallel]] = []
        self._had: list[DistributedDataParallel] = []  # whose buckets were laid out, by the others too
        self._syncs: list[tuple[DistributedDataParallel, bool]] = []  # whose next forward pass takes rank 0's buffers
        self._settle()

    def __len__(self) -> int:
        return len(self.alive())

    def alive(self) -> list[DistributedDataParallel]:
        """Those that the script still holds."""
        return [ddp for reference in self._found if (ddp := reference()) is not None]

    def broadcast(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The buffers of tracked modules that a forward pass takes from rank 0, by name: the same on all ranks."""
        syncing = [ddp for ddp in self.alive() if ddp.forward_sync_buffers]
        taken = {
            id(b) for ddp in syncing for name, b in ddp.module.named_buffers() if name not in ddp.parameters_to_ignore
        }
        modules = {key: bare(target) for key, target in sorted(state.items()) if isinstance(target, torch.nn.Module)}
        return {
            f"{key}.{name}": buffer
            for key, module in modules.items()
            for name, buffer in module.named_buffers()
            if id(buffer) in taken
        }

    def reduced(self, ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
        """The parameters whose gradients it averages."""
        return self._reduced[ddp]

    def learn(self) -> None:
        """A step is complete: order the buckets now if the next forward pass would, and note how. Collective, until the
        order is known, which is after the first step (the second of a static graph)."""
        if not self._unknown:
            return
        for orderly, ddp in self._unknown:
            orderly.order = orderly.made = _learn(ddp, orderly.count)
        self._settle()

    def agree(self, members: Members) -> None:
        """All members know what the one that knows most does, and nothing else: a peer may have been lost while they
        learned. Collective."""
        mine = json.dumps(self.state_dict()).encode()
        known = sum(o.order is not None for o in self._orderly)
        told = members.gather((known, xxhash.xxh3_64_intdigest(mine) >> 1))
        if len(set(told)) == 1:
            return
        giver = max(range(len(told)), key=lambda rank: (told[rank][0], -rank))
        said = _said(json.loads(members.from_rank(giver, mine if members.rank == giver else b"")))
        for orderly in self._orderly:
            orderly.order = _order(said.get((orderly.name, orderly.parameters)), orderly.count)
        self._settle()

    def rebuild(self) -> None:
        """For the round that has begun. On every member, after `agree`."""
        orderly = {o.reference(): o for o in self._orderly}
        for ddp in self.alive():
            known = orderly.get(ddp)
            made = rebuild(ddp, known.order if known is not None else None, self._reduced[ddp])
            if known is not None:
                known.made = made

    def can_renew(self) -> bool:
        """Before a pass that `renew` is to follow: whether it knows how."""
        known = {o.reference() for o in self._orderly if o.made is not None}
        self._had = [ddp for ddp in self.alive() if ddp._has_rebuilt_buckets]
        self._syncs = buffer_syncs(self.alive())
        return all(not ddp._has_rebuilt_buckets or (ddp in known and not ddp.static_graph) for ddp in self.alive())

    def renew(self) -> None:
        """In this process alone, whose backward pass the others have not made: reducers that do as those do that are
        there, from the beginning of a pass. With collectives stood in for."""
        self.rebuild()
        for ddp in self._had:  # as their first forward pass of this world has done
            ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()
        restore_buffer_syncs(self._syncs)
        self._had, self._syncs = [], []

    def resume(self) -> None:
        """The state was restored, in a world that stays: make those anew whose order is another. On every rank."""
        for orderly in self._orderly:
            ddp = orderly.reference()
            if ddp is not None and orderly.order is not None and orderly.order != orderly.made:
                orderly.made = rebuild(ddp, orderly.order, self._reduced[ddp])

    def state_dict(self) -> dict[str, Any]:
        # An order is one text: thousands of numbers would each cost a save something.
        return {
            "orders": [
                {"name": o.name, "parameters": o.parameters, "order": " ".join(map(str, o.order))}
                for o in self._orderly
                if o.order is not None
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what fits: a module of other parameters finds its own order. Raises `ValueError` for what is none."""
        said = _said(state)
        found = {id(o): _order(said.get((o.name, o.parameters)), o.count) for o in self._orderly}
        for orderly in self._orderly:
            orderly.order = found[id(orderly)] or orderly.order
        self._settle()

    def _settle(self) -> None:
        """What is known has changed."""
        self._unknown = [(o, ddp) for o in self._orderly if o.order is None and (ddp := o.reference()) is not None]


def parallel() -> list[DistributedDataParallel]:
    """The DDP objects of this process."""
    return [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]


def buffer_syncs(ddps: Iterable[DistributedDataParallel]) -> list[tuple[DistributedDataParallel, bool]]:
    """Whether the next forward pass of each begins with a broadcast of rank 0's buffers. A forward pass without
    gradients, or in `no_sync`, leaves that broadcast out of the one behind it."""
    return [(ddp, ddp.require_forward_param_sync) for ddp in ddps]


def restore_buffer_syncs(syncs: Iterable[tuple[DistributedDataParallel, bool]]) -> None:
    """As `buffer_syncs` found it. A rank that begins a broadcast which the others leave out is waited for by nobody."""
    for ddp, syncs_next in syncs:
        ddp.require_forward_param_sync = syncs_next


def rebuild(
    ddp: Any, order: Sequence[int] | None = None, reduced: Sequence[torch.nn.Parameter] | None = None
) -> tuple[int, ...] | None:
    """Make the reducer of a DDP object anew, of the parameters that it has, which are `reduced` if that is passed. With
    `order`, a permutation of them, its next forward pass makes the buckets that gradients arriving in that order would
    have made, and they stay so. What it was made with is returned: not `order` if it is of others. No collective."""
    if not hasattr(ddp, "reducer"):
        return None  # all of its parameters are left to other hooks
    reduced = parameters_of(ddp) if reduced is None else reduced
    with requiring_gradients(reduced):
        return _rebuild(ddp, order, reduced)


def _rebuild(ddp: Any, order: Sequence[int] | None, reduced: Sequence[torch.nn.Parameter]) -> tuple[int, ...] | None:
    hooks, builtin = list(ddp._comm_hooks), _builtin_hook(ddp)
    ddp.reducer._remove_autograd_hooks()
    parameters, expect_sparse = lists_for_reducer(ddp, reduced)
    if ddp.static_graph and hooks:
        order = None  # torch tells a hook in the first pass of a static graph that each bucket is number 0: have one
    if order is not None and len(order) != len(parameters):
        order = None
    if order is not None:
        # The reducer's numbers are then those of arrival. Nothing keeps the old ones: all that knows numbers is made
        # below, of these lists.
        parameters, expect_sparse = [parameters[i] for i in order], [expect_sparse[i] for i in order]
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    ddp._has_rebuilt_buckets = False
    ddp.require_forward_param_sync = True
    if ddp.static_graph:
        ddp.static_graph = False  # or the next call takes it for done
        ddp._set_static_graph()
    ddp._comm_hooks.clear()
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    if builtin is not None:
        ddp._register_builtin_comm_hook(builtin)
    if order is None:
        return None
    ddp.reducer._push_all_rebuilt_params()
    return tuple(order)


def _names(state: Mapping[str, Any]) -> dict[int, str]:
    """Of the tracked modules and of their parts, by identity."""
    names: dict[int, str] = {}
    for key, value in state.items():
        if isinstance(value, torch.nn.Module):
            for path, module in bare(value).named_modules():
                names.setdefault(id(module), f"{key}.{path}" if path else key)
    return names


def _name(ddp: Any, names: Mapping[int, str]) -> str:
    """Of its module, or of the first part of it that has one; empty for what nobody tracks and nothing restores."""
    return next((names[id(part)] for part in bare(ddp).modules() if id(part) in names), "")


def _orders(ddp: Any) -> bool:
    """Whether this one orders its buckets by arrival, over all ranks."""
    return (
        hasattr(ddp, "reducer")
        and (ddp.static_graph or not ddp.find_unused_parameters)
        and not ddp._use_python_reducer
        and ddp.process_group is dist.group.WORLD
    )


def _orderly(ddp: Any, name: str, parameters: Sequence[torch.nn.Parameter]) -> _Orderly:
    """The digest is of the names, shapes and types of the parameters that its reducer has, as they were registered."""
    names = {id(p): path for path, p in ddp.module.named_parameters()}
    listed = [(names.get(id(p), ""), list(p.shape), str(p.dtype)) for p in parameters]
    return _Orderly(weakref.ref(ddp), name, xxhash.xxh3_64_hexdigest(json.dumps(listed).encode()), len(parameters))


def _learn(ddp: Any, count: int) -> tuple[int, ...] | None:
    """The order of its buckets, made now if its first backward pass is over."""
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
    told = _told(ddp)
    if not told and ddp._has_rebuilt_buckets:
        told = _told(ddp, each=True)
    try:
        return _order(told, count)
    except ValueError as e:
        log.warning("the last bits may differ after a recovery: torch says of its buckets %s", e)
        return None


def _told(ddp: Any, *, each: bool = False) -> str:
    """What torch notes of the buckets that a reducer has ordered: in its first ten passes and in each 100th. `each`: in
    this one."""
    if each:
        ddp._set_ddp_runtime_logging_sample_rate(1)
    ddp.logger.set_runtime_stats_and_log()
    if each:
        ddp._set_ddp_runtime_logging_sample_rate(SAMPLE_RATE)
    return str(ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")).replace(",", " ")


def _said(state: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    return {(each["name"], each["parameters"]): each["order"] for each in state["orders"]}


def _order(text: str | None, count: int) -> tuple[int, ...] | None:
    """None if nothing is said. Raises `ValueError` if what is said is no order of so many parameters."""
    if not text:
        return None
    words = text.split()
    if sorted(words) != sorted(map(str, range(count))):
        raise ValueError(f"{text[:100]!r} is no order of {count} parameters")
    return tuple(map(int, words))


def _builtin_hook(ddp: Any) -> Any:
    """The communication hook of C++ that was registered with it, if any."""
    name = ddp._get_ddp_logging_data().get("comm_hook", "")
    return (
        getattr(_distributed_c10d.BuiltinCommHookType, name.removeprefix(BUILTIN)) if name.startswith(BUILTIN) else None
    )
