"""Makes torch's `join` for uneven inputs right in a step that may be repeated: `with model.join():`, `Join([model])`.

A rank that has no inputs left ("joined") answers the collectives of the others until they have none left either. All of
these collectives are in the step, so a lost peer ends them, and the step is repeated as a whole. Four things are not as
in torch 2.13, because there they are wrong where gradients are summed over several passes, or where the join ends
before the training does:

- A joined rank gives its accumulated gradients, and takes the average: at the end all ranks have the same gradients. In
  torch it gives zeros and takes nothing.
- If an optimizer has stepped inside the join, all that is tracked goes from the last rank to the others. torch sends
  the parameters alone, and not the optimizer's moments.
- Behind the join, DDP works as before it. torch goes on to ask for joined ranks, which a new process would not do.
- Passes that only some ranks synchronize are refused. torch would average them with other passes, or wait for ever.

A join around the session's loop has nothing to do, because all ranks take the same number of steps, so it is switched
off. Invariant: all ranks decide alike, by values that they have reduced.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from everstep.recovery.ddp.reducers import lists_for_reducer, parameters_of, requiring_gradients
from everstep.recovery.errors import LoopError
from everstep.recovery.group.script_location import script_call_site
from everstep.torch_private import joins, reducers, tensors
from everstep.torch_private.patches import replace

_NOT_ALIKE = (
    "some ranks average their gradients in this pass, and others accumulate them in no_sync(). Inside `join` all ranks "
    "that still have inputs must do the same in the same pass: leave no_sync() out (gradients are accumulated without "
    "it too), or enter it by the number of the pass, and not for all but a rank's own last one"
)
_NOT_AVERAGED = (
    "a rank has no inputs left, and gradients that it has accumulated in no_sync(). With "
    "divide_by_initial_world_size=False nobody can say by how many ranks they are to be divided. Leave no_sync() out, "
    "or write join(divide_by_initial_world_size=True)"
)
_SPARSE = (
    "a rank without inputs cannot take part in the average of sparse gradients: torch gives it none. Make the "
    "embedding with sparse=False, or leave `join` out and take uneven batches from run.loader, whose batch.scale "
    "weights them"
)
_STATIC = (
    "static_graph=True: torch learns the graph in each rank's first pass, with a collective that later passes do not "
    "have, so a rank without inputs there would not match the others, now or behind a recovery. Leave "
    "static_graph=True out; find_unused_parameters=True is for layers that are left out"
)
_SOME_RANKS = (
    "an optimizer has stepped in it, and its process group has not all ranks, so the session cannot bring the "
    "ranks to one state. Write `join` into `with step:`, around the backward passes of one optimizer's step, and "
    "optimizer.step() behind it"
)

_entered: list[Join] = []  # those that are not left yet
_hooks: dict[int, JoinHook] = {}  # of the DDP objects in them, by identity
# The gradients of each DDP object that was in a join, as they were last used: when the present step began, or by an
# optimizer since then; None before either.
_there: weakref.WeakKeyDictionary[DistributedDataParallel, list[Any] | None] = weakref.WeakKeyDictionary()
# How many steps optimizers of its parameters have made. A parameter's version does not tell of those through `.data`.
_steps: weakref.WeakKeyDictionary[DistributedDataParallel, int] = weakref.WeakKeyDictionary()
_give: list[Callable[[int], None]] = []


@functools.cache
def install() -> None:
    """Put the replacements in place. Called when a run begins; does nothing the second time, whatever other libraries
    have put around them since."""
    replace("__init__", _off_until_entered, Join)
    replace("__enter__", lambda _: _enter, Join)
    replace("__exit__", _leave, Join)
    replace("join_hook", lambda _: _join_hook, DistributedDataParallel)
    joins.replace_pass_check(_tell)
    register_optimizer_step_post_hook(_stepped)


def gives(give: Callable[[int], None]) -> None:
    """Set the function that brings all ranks to the tracked state of one of them. It is collective."""
    _give[:] = [give]


def step_begins() -> None:
    """A step of the session begins: a join that was entered before has nothing to do in it."""
    for join in _entered:
        joins.enable(join, on=False)
    for ddp in list(_there):
        _there[ddp] = _marks(ddp)


def is_entered() -> bool:
    """Whether the script is inside of a join."""
    return bool(_entered)


class JoinHook(joins.DDPJoinHook):
    """What a rank without inputs does for one DDP object."""

    def __init__(self, ddp: Any, divide_by_initial_world_size: bool) -> None:
        super().__init__(ddp, divide_by_initial_world_size)  # type: ignore[no-untyped-call]
        self._parameters = list(ddp.module.parameters())
        self.initial = divide_by_initial_world_size
        self.begin()

    def begin(self) -> None:
        """The join is entered."""
        self._before = self._changes()
        self._known = 0  # changes of parameters before the newest pass
        self._quiet = False  # whether this rank's newest pass was in no_sync
        self._same = False  # whether this rank has the gradients of the others
        # Gradients that nothing has changed since then were used by an optimizer.
        there = _there.setdefault(self.ddp, None)
        self._own = there is None or there != _marks(self.ddp)

    @property
    def moved(self) -> int:
        """How often parameters have changed since the join was entered: the same on all ranks with as many passes."""
        return self._changes() - self._before

    def _changes(self) -> int:
        return tensors.sum_of_versions(self._parameters) + _steps.get(self.ddp, 0)

    def passes(self, *, synchronized: bool) -> None:
        """A forward pass of this rank begins, whose backward pass may follow."""
        self._known, self._quiet, self._own, self._same = self.moved, not synchronized, True, synchronized

    @property
    def lacks(self) -> bool:
        """Whether this rank has gradients that cannot be averaged any more."""
        return self._quiet and not self.initial and self._known == self.moved

    def main_hook(self) -> None:
        """Answer the collectives of one pass of the others."""
        ddp: Any = self.ddp
        ddp.reducer.prepare_for_forward()
        reducers.rebuild_buckets(ddp)
        joins.sync_buffers(ddp)
        synchronized, moved, _, cleared = _agree(ddp, self, joined=True)
        ddp.require_forward_param_sync = synchronized
        # The others begin with new gradients: their optimizer has made its step, or they have left it out.
        if moved != self._known or (cleared and self._same):
            self._own, self._known = False, moved
        if synchronized:
            self._average()
            reducers.keep_order(ddp)
            self._own = self._same = True

    def _average(self) -> None:
        ddp: Any = self.ddp
        buckets = reducers.zero_buckets(ddp)
        hooked = bool(reducers.comm_hooks(ddp)) or bool(reducers.logged(ddp).get("comm_hook"))
        share = 1.0 if hooked else 1.0 / dist.get_world_size(ddp.process_group)
        with torch.no_grad():
            works = []
            for bucket in buckets:
                for p, part in _parts(bucket) if self._own and self.initial else ():
                    if p.grad is not None:
                        part.copy_(p.grad * share)
                works.append(joins.run_hook(ddp, bucket))
            for bucket, work in zip(buckets, works, strict=True):
                averaged = work.wait()
                averaged = averaged[0] if isinstance(averaged, list | tuple) else averaged
                if averaged.data_ptr() != bucket.buffer().data_ptr():
                    bucket.buffer().copy_(averaged)
            used = self._used()
            for bucket in buckets:
                for p, part in _parts(bucket):
                    if used is not None and id(p) not in used:
                        continue
                    if p.grad is None:
                        p.grad = torch.empty_like(p)
                    p.grad.copy_(part)

    def _used(self) -> set[int] | None:
        """The parameters that any rank has used in the pass, by identity; None if DDP does not ask for them."""
        ddp: Any = self.ddp
        if not ddp.find_unused_parameters:
            return None
        used = joins.used_map(ddp)
        dist.all_reduce(used, group=ddp.process_group)
        listed = parameters_of(ddp)
        return {id(p) for p, count in zip(listed, used.tolist(), strict=True) if count}

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have joined: bring them to one state."""
        ddp: Any = self.ddp
        sent = torch.tensor(
            [joins.rank_of(ddp) if is_last_joiner else -1, not is_last_joiner, self.moved],
            dtype=torch.int64, device=ddp.device,
        )  # fmt: skip
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=ddp.process_group)
        source, uneven, moved = sent.tolist()
        if moved != self._known:  # the last rank's optimizer has used the gradients
            _there[ddp] = _marks(ddp)
        if uneven and moved:
            if dist.get_world_size(ddp.process_group) != dist.get_world_size():
                raise LoopError(f"join(){_at()}: {_SOME_RANKS}")
            if _give:
                _give[0](source)
            else:
                joins.sync_parameters(ddp, is_last_joiner)
        elif ddp.forward_sync_buffers and ddp.modules_buffers:
            joins.send_buffers(ddp, source)


def _agree(ddp: Any, hook: JoinHook, *, joined: bool, synchronized: bool = False) -> tuple[bool, int, int, bool]:
    """Tell all ranks whether this one averages the gradients of the pass that begins. Returns whether they do, how
    often their parameters have changed, how many ranks have inputs, and whether these begin without gradients. Raises
    `LoopError` on all ranks."""
    sent = [0, 0, 0, hook.lacks, 0] if joined else [synchronized, 1, hook.moved, 0, _is_cleared(ddp)]
    if ddp.static_graph:
        raise LoopError(f"join(){_at()} of DistributedDataParallel({type(ddp.module).__name__}) with {_STATIC}")
    values = torch.tensor(sent, dtype=torch.int64, device=ddp.device)
    dist.all_reduce(values, group=ddp.process_group)
    averaging, active, moved, lacking, cleared = values.tolist()
    if lacking:
        raise LoopError(f"join(){_at()}: {_NOT_AVERAGED}")
    if 0 < averaging < active:
        raise LoopError(f"no_sync(){_at()}: {_NOT_ALIKE}")
    return averaging > 0, moved // max(1, active), active, 0 < active == cleared


def _tell(ddp: Any, is_joined_rank: bool) -> None:
    """In place of DDP's method, which is called in a forward pass inside of a join."""
    hook = _hooks[id(ddp)]
    synchronized = ddp.require_backward_grad_sync and torch.is_grad_enabled()
    if torch.is_grad_enabled():
        hook.passes(synchronized=synchronized)
    _, _, active, _ = _agree(ddp, hook, joined=is_joined_rank, synchronized=synchronized)
    if not hook.initial:
        # torch's own wait for this number never ends with a group that is made in Python.
        reducers.divide_by(ddp, active)


def _join_hook(ddp: Any, **options: Any) -> JoinHook:
    """In place of `DistributedDataParallel.join_hook`."""
    if hasattr(ddp, "reducer"):
        reduced = parameters_of(ddp)
        with requiring_gradients(reduced):
            sparse = any(lists_for_reducer(ddp, reduced)[1])
        if sparse:
            raise LoopError(f"join(){_at()} of DistributedDataParallel({type(ddp.module).__name__}): {_SPARSE}")
    return JoinHook(ddp, options.get("divide_by_initial_world_size", True))


def _off_until_entered(init: Any) -> Any:
    @functools.wraps(init)
    def switched_off(join: Any, *arguments: Any, **options: Any) -> None:
        init(join, *arguments, **options)
        join._everstep_enable = joins.is_enabled(join)
        joins.enable(join, on=False)  # until it is entered

    return switched_off


def _enter(join: Any) -> None:
    joins.enable(join, on=join._everstep_enable)
    _entered.append(join)
    for hook in joins.hooks_of(join):
        if isinstance(hook, JoinHook):
            _hooks[id(hook.ddp)] = hook
            hook.begin()


def _leave(leave: Any) -> Any:
    @functools.wraps(leave)
    def left(join: Any, *error: Any) -> Any:
        try:
            return leave(join, *error)
        finally:
            _entered[:] = [other for other in _entered if other is not join]
            for joinable in joins.joined_by(join):
                _hooks.pop(id(joinable), None)
            if joins.is_enabled(join):
                joins.enable(join, on=False)
                _forget_divisor(join)

    return left


def _forget_divisor(join: Any) -> None:
    """Let DDP divide by the number of all ranks again. Its reducer would divide by the ranks of its last pass in the
    join."""
    for joinable in joins.joined_by(join):
        if isinstance(joinable, DistributedDataParallel) and hasattr(joinable, "reducer"):
            reducers.divide_by(joinable, None)


def _parts(bucket: Any) -> Any:
    """The parameters of a bucket, each with the part of the bucket that has its gradient's layout."""
    buffer, at = bucket.buffer(), 0
    for p in bucket.parameters():
        part = buffer[at : at + p.numel()]
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(p)
        yield p, part.as_strided(p.size(), p.stride()) if dense else part.view(p.size())
        at += p.numel()


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """An optimizer has used the gradients of its parameters."""
    if not _there:
        return
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for ddp in list(_there):
        if any(id(p) in own for p in ddp.module.parameters()):
            _steps[ddp] = _steps.get(ddp, 0) + 1
            _there[ddp] = _marks(ddp)


def _is_cleared(ddp: Any) -> bool:
    """Whether it has no gradients, or zeros. Most often the first one that is looked at tells."""
    gradients = (p.grad for p in ddp.module.parameters() if p.grad is not None)
    return torch.is_grad_enabled() and not any(bool(gradient.any()) for gradient in gradients)


def _marks(ddp: Any) -> list[Any]:
    """Values that differ when gradients have changed."""
    return tensors.marks(p.grad for p in ddp.module.parameters())


def _at() -> str:
    site = script_call_site(sys._getframe(1))
    return site.at if site is not None else ""
