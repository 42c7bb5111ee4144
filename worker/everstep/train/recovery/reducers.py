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
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import xxhash
from torch._C import _distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint.state import bare
from everstep.train.recovery.members import Members

BUCKETS = "ddp_buckets"  # the name of a `Reducers` in the state of a run
BUILTIN = "BuiltinCommHookType."


@dataclass(eq=False, slots=True)
class _Orderly:
    """A DDP object that orders its buckets, by the name that it is tracked by and a digest of its parameters."""

    reference: weakref.ref[DistributedDataParallel]
    name: str
    parameters: str
    order: tuple[int, ...] | None = None  # of its parameters, by their gradients' first arrival; None: not known yet
    made: tuple[int, ...] | None = None  # the order that its present reducer was made with


class Reducers:
    """The DDP objects of this process, found once: after the script has built them. A tracked object of the session."""

    everstep_optional = True  # commits of before this was saved

    def __init__(self, state: Mapping[str, Any]) -> None:
        found = parallel() if dist.is_available() and dist.is_initialized() else []
        self._found = [weakref.ref(ddp) for ddp in found]
        names = {id(bare(value)): name for name, value in state.items()}
        orderly = [
            _Orderly(weakref.ref(ddp), names.get(id(bare(ddp)), ""), _digest(ddp)) for ddp in found if _orders(ddp)
        ]
        # Their buckets are made by collectives, so all ranks must take them in turn: two that nobody can tell apart
        # are left to torch.
        count = Counter((o.name, o.parameters) for o in orderly)
        self._orderly = sorted(
            (o for o in orderly if count[o.name, o.parameters] == 1), key=lambda o: (o.name, o.parameters)
        )
        self._unknown = list(self._orderly)

    def __len__(self) -> int:
        return len(self.alive())

    def alive(self) -> list[DistributedDataParallel]:
        """Those that the script still holds."""
        return [ddp for reference in self._found if (ddp := reference()) is not None]

    def learn(self) -> None:
        """A step is complete: order the buckets now if the next forward pass would, and note how. Collective, until the
        order is known, which is after the first step (the second of a static graph)."""
        for orderly in self._unknown:
            ddp = orderly.reference()
            if ddp is not None and (order := _learn(ddp)) is not None:
                orderly.order = orderly.made = order
        if self._unknown:
            self._unknown = [o for o in self._unknown if o.order is None]

    def agree(self, members: Members) -> None:
        """All members know what one of them knows: a peer may have been lost while they learned. Collective."""
        mine = json.dumps(self.state_dict()).encode()
        told = members.gather((len(self._known()), xxhash.xxh3_64_intdigest(mine) >> 1))
        if len(set(told)) == 1:
            return
        giver = max(range(len(told)), key=lambda rank: (told[rank][0], -rank))
        self.load_state_dict(json.loads(members.from_rank(giver, mine if members.rank == giver else b"")))

    def rebuild(self) -> None:
        """For the round that has begun. On every member, after `agree`."""
        orderly = {id(ddp): o for o in self._orderly if (ddp := o.reference()) is not None}
        ordered = {id_: o.order for id_, o in orderly.items()}
        alive = {id(ddp): ddp for ddp in self.alive()}
        for id_, ddp in alive.items():
            if id_ not in orderly:
                rebuild(ddp)
        for id_, o in orderly.items():  # collective, so by name
            o.made = rebuild(alive[id_], ordered[id_])

    def resume(self) -> None:
        """The state was restored, in a world that stays: make those anew whose order is another. Collective."""
        for orderly in self._orderly:
            ddp = orderly.reference()
            if ddp is not None and orderly.order is not None and orderly.order != orderly.made:
                orderly.made = rebuild(ddp, orderly.order)

    def state_dict(self) -> dict[str, Any]:
        return {
            "orders": [
                {"name": o.name, "parameters": o.parameters, "order": list(o.order or ())} for o in self._known()
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what fits: a module of other parameters finds its own order."""
        said = {(each["name"], each["parameters"]): tuple(each["order"]) for each in state["orders"]}
        for orderly in self._orderly:
            orderly.order = said.get((orderly.name, orderly.parameters), orderly.order)
        self._unknown = [o for o in self._orderly if o.order is None]

    def _known(self) -> list[_Orderly]:
        return [o for o in self._orderly if o.order is not None]


def parallel() -> list[DistributedDataParallel]:
    """The DDP objects of this process."""
    return [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]


def rebuild(ddp: Any, order: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """Make the reducer of a DDP object anew. With `order`, a permutation of its parameters, the buckets are those that
    gradients arriving in that order would have made, and stay so; collective then. What it was made with is returned: a
    static graph whose script has a communication hook begins with one bucket, as torch makes it."""
    if not hasattr(ddp, "reducer"):
        return None  # all of its parameters are left to other hooks
    hooks, builtin = list(ddp._comm_hooks), _builtin_hook(ddp)
    if ddp.static_graph and hooks:
        order = None  # in the first pass of a static graph torch gives hooks number 0 for each of several buckets
    ddp.reducer._remove_autograd_hooks()
    parameters, expect_sparse = ddp._build_params_for_reducer()
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
    ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()
    return tuple(order)


def _orders(ddp: Any) -> bool:
    """Whether this one orders its buckets by arrival, over all ranks."""
    return (
        hasattr(ddp, "reducer")
        and (ddp.static_graph or not ddp.find_unused_parameters)
        and not ddp._use_python_reducer
        and ddp.process_group is dist.group.WORLD
    )


def _digest(ddp: Any) -> str:
    """Of the names, shapes and types of the parameters that its reducer has, in the order of registration."""
    if not hasattr(ddp, "reducer"):
        return ""
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    parameters, _ = ddp._build_params_for_reducer()
    listed = [(names.get(id(p), ""), list(p.shape), str(p.dtype)) for p in parameters]
    return xxhash.xxh3_64_hexdigest(json.dumps(listed).encode())


def _learn(ddp: Any) -> tuple[int, ...] | None:
    """The order of its buckets, made now if its first backward pass is over."""
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True
    if not ddp._has_rebuilt_buckets:
        return None
    ddp.logger.set_runtime_stats_and_log()
    said = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    order = tuple(int(word) for word in said.replace(",", " ").split())
    return order or None


def _builtin_hook(ddp: Any) -> Any:
    """The communication hook of C++ that was registered with it, if any."""
    name = ddp._get_ddp_logging_data().get("comm_hook", "")
    return (
        getattr(_distributed_c10d.BuiltinCommHookType, name.removeprefix(BUILTIN)) if name.startswith(BUILTIN) else None
    )
