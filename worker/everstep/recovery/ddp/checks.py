"""Refuses DDP objects that could not go on after the loss of a peer: before the first step, but for `no_sync()`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.checkpoint.state.sharding import is_sharded
from everstep.recovery.errors import LoopError
from everstep.recovery.group.recoverable import RecoverableGroup
from everstep.recovery.group.script_location import script_call_site
from everstep.torch_private import modules, reducers
from everstep.torch_private.patches import replace
from everstep.torch_private.sharded import is_taken_apart

# Types of a hook's settings, which do not change.
_WITHOUT = (dist.ProcessGroup, bool, int, float, str, torch.dtype, torch.device)
_HARMLESS = "torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks"  # whose state is DDP's own


def check(
    parallel: Collection[DistributedDataParallel],
    model_size: int,
    is_across: Callable[[Any], bool],
    tracked: Collection[object] = (),
) -> None:
    """Raises `LoopError` for the first of these that would be wrong, or fail, in another round. `model_size`,
    `is_across`: see `check_replicas`; `tracked`: objects that commits and new processes have."""
    check_replicas(parallel, model_size, is_across)
    compiled = list(modules.all_compiled())
    for ddp in parallel:
        name = type(ddp.module).__name__
        if not isinstance(ddp.process_group, RecoverableGroup):
            raise LoopError(
                f"DistributedDataParallel of {name}: its process group is not the session's. Wrap the module after "
                "everstep.start(), with process_group=dist.new_group() made after it, or with none"
            )
        if any(other is ddp for other in compiled):
            raise LoopError(
                f"torch.compile of DistributedDataParallel({name}): the compiled code holds the process group of the "
                "world in which it was compiled. Compile inside: `DistributedDataParallel(torch.compile(model))`"
            )
        _check_cut(ddp)
        _check_hooks(ddp, None, tracked)
        _check_builtin(ddp, name)


def check_replicas(
    parallel: Iterable[DistributedDataParallel], model_size: int, is_across: Callable[[Any], bool]
) -> None:
    """Check DDP objects in replicas of `model_size` ranks, each with different parameters. `is_across`: whether a group
    consists of one place of all replicas. Raises `LoopError` for the first object that would average
    parameters of different places."""
    for ddp in parallel:
        if model_size > 1 and not is_across(ddp.process_group):
            raise LoopError(
                f"DistributedDataParallel({type(ddp.module).__name__}): with run.mesh(model={model_size}) the ranks of "
                "a replica have parameters of their own, and its process group has several of them. Leave it out, and "
                "write run.average_gradients(model) behind the last backward() of a step; or pass process_group=, of "
                "dist.new_group(range(place, run.world_size, N)) for each place from 0 to N - 1"
            )


def check_hooks(
    parallel: Iterable[DistributedDataParallel], is_free: Callable[[str], bool], tracked: Collection[object] = ()
) -> None:
    """Check hooks in a world that does not change, with commits. Raises `LoopError` for the first hook with a state
    that is not tracked, because no commit holds it, and for a module of which DDP removes parameters.
    `is_free`: whether the script has declared that the state of this name may be lost."""
    for ddp in parallel:
        _check_cut(ddp)
        _check_hooks(ddp, is_free, tracked)


def _check_hooks(ddp: Any, is_free: Callable[[str], bool] | None, tracked: Collection[object]) -> None:
    for hook, state in reducers.comm_hooks(ddp):
        if state is None or isinstance(state, _WITHOUT) or type(state).__module__ == _HARMLESS:
            continue
        if any(state is other for other in tracked):
            continue
        name, kind = type(ddp.module).__name__, type(state).__name__
        if is_free is not None and is_free(kind):
            continue
        raise LoopError(
            f"register_comm_hook of DistributedDataParallel({name}): {getattr(hook, '__qualname__', hook)} keeps what "
            f"each rank has of its own in a {kind}, which is lost with its process, and no other rank has it. Use a "
            "hook without a state: `register_comm_hook(None, default_hooks.bf16_compress_hook)`; or a state with "
            "state_dict() and load_state_dict(), of what is the same on all ranks, and pass it to run.track()"
            + (f"; or, if it may be lost, say so: run.untracked({kind!r})" if is_free is not None else "")
        )


def _check_cut(ddp: Any) -> None:
    """Refuse `device_mesh=`. With it, torch 2.13 replaces a sharded module's parameters by local tensors, and in the
    first forward pass by plain attributes. So neither `state_dict` nor `parameters` has them."""
    cut = next((n for n, p in ddp.module.named_parameters() if is_sharded(p) or is_taken_apart(p)), None)
    if cut is not None:
        raise LoopError(
            f"DistributedDataParallel({type(ddp.module).__name__}): {cut} is cut by tensor parallelism, and torch "
            "takes such parameters out of the module in its first forward pass: no commit, and no process that comes "
            "later, would have them. Leave DistributedDataParallel out, make the mesh with run.mesh(tensor=N), and "
            "write run.average_gradients(model) behind the last backward() of a step"
        )


def _check_builtin(ddp: Any, name: str) -> None:
    if not reducers.comm_hooks(ddp) and (built_in := reducers.logged(ddp).get("comm_hook")):
        raise LoopError(
            f"{built_in} of DistributedDataParallel({name}) is built in, and lost when a round begins. Register it in "
            "Python: `register_comm_hook(None, default_hooks.fp16_compress_hook)`"
        )


# --- no_sync() with static_graph=True
# torch 2.13 learns the graph in a reducer's first pass, and averages gradients in it even in `no_sync()`: then it fails
# with an internal assertion. Each round makes a new reducer, so under everstep-run a script that averages in its first
# step would fail there after a peer is lost. It is refused before that, in its first `no_sync()`.

_FAILS = (
    "torch learns a static graph in a reducer's first pass, and fails if that pass is in no_sync(); after each loss of "
    "a peer there is a new reducer. Leave no_sync() out: `contextlib.nullcontext()` in its place averages the sum so "
    "far in each pass, which comes to the same gradients. Or leave static_graph=True out"
)


@functools.cache
def check_no_sync() -> None:
    """Put the check in place. Called when a run begins; does nothing the second time, whatever other libraries have put
    around it since."""
    replace("no_sync", _checked, DistributedDataParallel)


def _checked(no_sync: Any) -> Any:
    @functools.wraps(no_sync)
    def checked(ddp: Any) -> Any:
        # A DDP object has the second attribute only with a static graph.
        if ddp.static_graph and (
            isinstance(ddp.process_group, RecoverableGroup) or not reducers.delays_static_pass(ddp)
        ):
            site = script_call_site(sys._getframe(1))
            raise LoopError(
                f"no_sync(){site.at if site is not None else ''} of DistributedDataParallel("
                f"{type(ddp.module).__name__}) with static_graph=True: {_FAILS}"
            )
        return no_sync(ddp)

    return checked
