"""Rebuilds DistributedDataParallel's reducers for each round, with the same buckets as before.

A reducer holds the number of ranks, and its buckets. It ordered these by the arrival of gradients in its first backward
pass. If an old member kept its buckets and a new member had other ones, they would sum gradients of different
parameters without any error. So every member makes its reducer anew, as DDP's constructor does. The constructor's
broadcast is left out, because the transfer of state is decided elsewhere.

With three ranks or more, the buckets decide in which order the ranks' values are summed, and so the last bits of each
sum. So the order of arrival is part of the training state. `Reducers` learns it once, after the first step with ordered
buckets. It is saved in commits and sent to peers, and later reducers begin with it.

Invariant: all members of a round make their reducers with the same order.
"""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint.state.modules import bare
from everstep.recovery.group.members import Members
from everstep.recovery.group.recoverable import RecoverableGroup
from everstep.torch_private import reducers

# --- averaged
# Finds the parameters that a DDP object averages: those that required gradients when it was made. A script may freeze
# and unfreeze parameters at any time, and torch's reducer keeps the parameters that it was made with. A new reducer
# must be made with the same ones on each rank, whether they require gradients at that moment or not.


def parameters_of(ddp: Any) -> list[torch.nn.Parameter]:
    """The parameters of the DDP object's present reducer, in the order of the module. If the script has frozen or
    unfrozen parameters since, finding them allocates memory for gradients for a moment."""
    if not hasattr(ddp, "reducer"):
        return []  # other hooks average all of them
    now, _ = reducers.parameters_for_reducer(ddp)
    logged = reducers.logged(ddp)
    count, size = logged.get("num_parameter_tensors"), logged.get("total_parameter_size_bytes")
    if (count, size) == (len(now), sum(p.numel() * p.element_size() for p in now)):
        return now
    every = [p for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]
    if count == len(every):
        return every
    try:
        made = {id(p) for bucket in reducers.zero_buckets(ddp) for p in bucket.parameters()}
    except RuntimeError:
        return now  # the reducer does not give sparse gradients
    return [p for p in every if id(p) in made]


def lists_for_reducer(ddp: Any, reduced: Sequence[torch.nn.Parameter]) -> tuple[list[torch.nn.Parameter], list[bool]]:
    """The arguments that DDP's constructor gives its reducer: these parameters, and whether each has a sparse gradient.
    The parameters must require gradients during the call."""
    wanted = set(map(id, reduced))
    parameters, sparse = reducers.parameters_for_reducer(ddp)
    listed = [(p, is_sparse) for p, is_sparse in zip(parameters, sparse, strict=True) if id(p) in wanted]
    return [p for p, _ in listed], [is_sparse for _, is_sparse in listed]


@contextmanager
def requiring_gradients(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Let the parameters require gradients while a reducer is made: it needs the graph node of each one's gradient."""
    frozen = [p for p in parameters if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


# --- reducers

log = logging.getLogger("everstep.train")

BUCKETS = "ddp_buckets"  # the name of a `Reducers` in the state of a run


@dataclass(eq=False, slots=True)
class _OrderedDDP:
    """A DDP object that orders its buckets, known by the name of its tracked module and a digest of its parameters."""

    reference: weakref.ref[DistributedDataParallel]
    name: str
    parameters: str
    count: int  # of its parameters
    order: tuple[int, ...] | None = None  # of its parameters, by their gradients' first arrival; None: not known yet
    made: tuple[int, ...] | None = None  # the order with which its present reducer was made


class Reducers:
    """The DDP objects of this process, found once, after the script has built them. A tracked object of the session."""

    everstep_optional = True  # commits of runs without a session lack it

    def __init__(self, state: Mapping[str, Any]) -> None:
        ddps = parallel() if dist.is_available() and dist.is_initialized() else []
        # An object that the script dropped may not be collected yet, or be so on one rank only.
        if len(ddps) > 1 or any(not isinstance(ddp.process_group, RecoverableGroup) for ddp in ddps):
            del ddps
            gc.collect()
            ddps = parallel()
        self._references = [weakref.ref(ddp) for ddp in ddps]
        self._reduced = weakref.WeakKeyDictionary({ddp: parameters_of(ddp) for ddp in ddps})
        names = _names(state)
        ordered = [
            _ordered(ddp, name, self._reduced[ddp])
            for ddp in ddps
            if _orders_buckets(ddp) and (name := _name(ddp, names))
        ]
        # Ranks order their objects one after the other. Two that cannot be told apart are left to torch.
        count = Counter((o.name, o.parameters) for o in ordered)
        self._ordered = sorted(
            (o for o in ordered if count[o.name, o.parameters] == 1), key=lambda o: (o.name, o.parameters)
        )
        # Held until their orders are known: an object that the script drops is collected at a different moment on each
        # rank.
        self._unknown: list[tuple[_OrderedDDP, DistributedDataParallel]] = []
        self._had: list[DistributedDataParallel] = []  # those whose buckets all members had laid out
        self._syncs: list[tuple[DistributedDataParallel, bool]] = []  # whether the next forward pass syncs buffers
        self._find_unknown()

    def __len__(self) -> int:
        return len(self.alive())

    def alive(self) -> list[DistributedDataParallel]:
        """The DDP objects that the script still holds."""
        return [ddp for reference in self._references if (ddp := reference()) is not None]

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
        """The parameters whose gradients this DDP object averages."""
        return self._reduced[ddp]

    def learn(self) -> None:
        """Learn the order after a completed step: order the buckets now if the next forward pass would. Collective
        until the order is known, which is after the first step (with a static graph, after the second)."""
        if not self._unknown:
            return
        for ordered, ddp in self._unknown:
            ordered.order = ordered.made = _learn(ddp, ordered.count)
        self._find_unknown()

    def agree(self, members: Members) -> None:
        """Give all members exactly the orders of the member that knows most: a peer may have been lost while they
        learned. Collective."""
        mine = json.dumps(self.state_dict()).encode()
        known = sum(o.order is not None for o in self._ordered)
        gathered = members.gather((known, xxhash.xxh3_64_intdigest(mine) >> 1))
        if len(set(gathered)) == 1:
            return
        giver = max(range(len(gathered)), key=lambda rank: (gathered[rank][0], -rank))
        orders = _saved_orders(json.loads(members.from_rank(giver, mine if members.rank == giver else b"")))
        for ordered in self._ordered:
            ordered.order = _parse_order(orders.get((ordered.name, ordered.parameters)), ordered.count)
        self._find_unknown()

    def rebuild(self) -> None:
        """Make all reducers anew for the round that has begun. On every member, after `agree`."""
        by_object = {o.reference(): o for o in self._ordered}
        for ddp in self.alive():
            known = by_object.get(ddp)
            made = rebuild(ddp, known.order if known is not None else None, self._reduced[ddp])
            if known is not None:
                known.made = made

    def can_renew(self) -> bool:
        """Whether `renew` can follow the next backward pass."""
        known = {o.reference() for o in self._ordered if o.made is not None}
        self._had = [ddp for ddp in self.alive() if reducers.has_rebuilt_buckets(ddp)]
        self._syncs = buffer_syncs(self.alive())
        return all(ddp in known and not ddp.static_graph for ddp in self._had)

    def renew(self) -> None:
        """Make reducers anew in this process alone, after a backward pass that the other ranks have not made. They
        behave as the others' reducers do at the beginning of a pass. Collectives must be stood in for meanwhile."""
        self.rebuild()
        for ddp in self._had:  # their first forward pass of this world has done so, too
            reducers.rebuild_buckets(ddp)
        restore_buffer_syncs(self._syncs)
        self._had, self._syncs = [], []

    def resume(self) -> None:
        """After a restore in a world that stays, make the reducers anew whose order has changed. On every rank."""
        for ordered in self._ordered:
            ddp = ordered.reference()
            if ddp is not None and ordered.order is not None and ordered.order != ordered.made:
                ordered.made = rebuild(ddp, ordered.order, self._reduced[ddp])

    def state_dict(self) -> dict[str, Any]:
        # An order is saved as one string, because thousands of single numbers would slow down a save.
        return {
            "orders": [
                {"name": o.name, "parameters": o.parameters, "order": " ".join(map(str, o.order))}
                for o in self._ordered
                if o.order is not None
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the orders that fit; a module with other parameters finds its own. Raises `ValueError` for an invalid
        order."""
        orders = _saved_orders(state)
        parsed = {id(o): _parse_order(orders.get((o.name, o.parameters)), o.count) for o in self._ordered}
        for ordered in self._ordered:
            ordered.order = parsed[id(ordered)] or ordered.order
        self._find_unknown()

    def _find_unknown(self) -> None:
        """Update the fields that depend on the known orders."""
        self._unknown = [(o, ddp) for o in self._ordered if o.order is None and (ddp := o.reference()) is not None]


def parallel() -> list[DistributedDataParallel]:
    """The DDP objects of this process, but for those of groups that were destroyed: an earlier run's, which an error or
    a variable still holds."""
    made = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
    return [ddp for ddp in made if not _is_destroyed(ddp.process_group)]


def _is_destroyed(group: Any) -> bool:
    if isinstance(group, RecoverableGroup):
        return False
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return True
    return False


def buffer_syncs(ddps: Iterable[DistributedDataParallel]) -> list[tuple[DistributedDataParallel, bool]]:
    """Whether the next forward pass of each begins with a broadcast of rank 0's buffers. After a forward pass without
    gradients, or in `no_sync`, the next one leaves it out."""
    return [(ddp, ddp.require_forward_param_sync) for ddp in ddps]


def restore_buffer_syncs(syncs: Iterable[tuple[DistributedDataParallel, bool]]) -> None:
    """Restore the result of `buffer_syncs`. Otherwise a rank could begin a broadcast that the others leave out."""
    for ddp, syncs_next in syncs:
        ddp.require_forward_param_sync = syncs_next


def rebuild(
    ddp: Any, order: Sequence[int] | None = None, reduced: Sequence[torch.nn.Parameter] | None = None
) -> tuple[int, ...] | None:
    """Make the reducer of a DDP object anew, with its present parameters, or with `reduced` if that is given. `order`
    is a permutation of them. With it, the next forward pass makes the same buckets as gradients that arrive in that
    order, and keeps them. Returns the order that was used, which is not `order` if that is of other parameters. No
    collective."""
    if not hasattr(ddp, "reducer"):
        return None  # other hooks average all of its parameters
    reduced = parameters_of(ddp) if reduced is None else reduced
    with requiring_gradients(reduced):
        return _rebuild(ddp, order, reduced)


def _rebuild(ddp: Any, order: Sequence[int] | None, reduced: Sequence[torch.nn.Parameter]) -> tuple[int, ...] | None:
    hooks, builtin = reducers.comm_hooks(ddp), reducers.builtin_hook(ddp)
    reducers.drop_reducer(ddp)
    parameters, expect_sparse = lists_for_reducer(ddp, reduced)
    if ddp.static_graph and hooks:
        order = None  # in the first pass of a static graph, torch gives each bucket the number 0, so there must be one
    if order is not None and len(order) != len(parameters):
        order = None
    if order is not None:
        # The reducer then numbers parameters by arrival. Old numbers are used nowhere: everything that uses numbers is
        # made below from these lists.
        parameters, expect_sparse = [parameters[i] for i in order], [expect_sparse[i] for i in order]
    reducers.make_reducer(ddp, parameters, expect_sparse, hooks, builtin)
    if order is None:
        return None
    reducers.keep_order(ddp)
    return tuple(order)


def _names(state: Mapping[str, Any]) -> dict[int, str]:
    """The names of the tracked modules and of their parts, by identity."""
    names: dict[int, str] = {}
    for key, value in state.items():
        if isinstance(value, torch.nn.Module):
            for path, module in bare(value).named_modules():
                names.setdefault(id(module), f"{key}.{path}" if path else key)
    return names


def _name(ddp: Any, names: Mapping[int, str]) -> str:
    """The name of the object's module, or of the first part of it that has one; empty if none is tracked."""
    return next((names[id(part)] for part in bare(ddp).modules() if id(part) in names), "")


def _orders_buckets(ddp: Any) -> bool:
    """Whether this DDP object orders its buckets by arrival, over all ranks."""
    return (
        hasattr(ddp, "reducer")
        and (ddp.static_graph or not ddp.find_unused_parameters)
        and not reducers.uses_python_reducer(ddp)
        and ddp.process_group is dist.group.WORLD
    )


def _ordered(ddp: Any, name: str, parameters: Sequence[torch.nn.Parameter]) -> _OrderedDDP:
    """The digest is of the names, shapes and types of the parameters that its reducer has, as they were registered."""
    names = {id(p): path for path, p in ddp.module.named_parameters()}
    listed = [(names.get(id(p), ""), list(p.shape), str(p.dtype)) for p in parameters]
    return _OrderedDDP(weakref.ref(ddp), name, xxhash.xxh3_64_hexdigest(json.dumps(listed).encode()), len(parameters))


def _learn(ddp: Any, count: int) -> tuple[int, ...] | None:
    """The order of its buckets, made now if its first backward pass is over."""
    reducers.rebuild_buckets(ddp)
    order = reducers.bucket_order(ddp)
    if not order and reducers.has_rebuilt_buckets(ddp):
        order = reducers.bucket_order(ddp, each=True)
    try:
        return _parse_order(order, count)
    except ValueError as e:
        log.warning("the last bits may differ after a recovery: torch says of its buckets %s", e)
        return None


def _saved_orders(state: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    return {(each["name"], each["parameters"]): each["order"] for each in state["orders"]}


def _parse_order(text: str | None, count: int) -> tuple[int, ...] | None:
    """Parse an order of `count` parameters; None if there is no text. Raises `ValueError` if it is not an order."""
    if not text:
        return None
    words = text.split()
    if sorted(words) != sorted(map(str, range(count))):
        raise ValueError(f"{text[:100]!r} is no order of {count} parameters")
    return tuple(map(int, words))
