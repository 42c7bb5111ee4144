"""DistributedDataParallel's reducer: its parameters, buckets and hooks, and how it is made anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from everstep.torch_private.patches import Replacements

_BUILTIN = "BuiltinCommHookType."
_PASSES = 100  # between two passes of which torch logs; its default


def has_rebuilt_buckets(ddp: Any) -> bool:
    """Whether the present reducer has laid out its buckets in the order in which gradients arrive."""
    return bool(ddp._has_rebuilt_buckets)


def rebuild_buckets(ddp: Any) -> None:
    """Lay out the buckets in the order of arrival now, if the next forward pass would. The first time collective.
    Raises `RuntimeError` where a backward pass has not averaged all gradients."""
    if ddp.reducer._rebuild_buckets():
        ddp._has_rebuilt_buckets = True


def logged(ddp: Any) -> Mapping[str, Any]:
    """What DDP knows about itself: numbers of its parameters, its hook, the order of its buckets."""
    logged: Mapping[str, Any] = ddp._get_ddp_logging_data()
    return logged


def bucket_order(ddp: Any, *, each: bool = False) -> str:
    """The numbers of the parameters in the order of the buckets, with spaces between them; empty if torch has not
    logged it. torch logs in the first ten passes and in each 100th. `each`: also in this one."""
    if each:
        ddp._set_ddp_runtime_logging_sample_rate(1)
    ddp.logger.set_runtime_stats_and_log()
    if each:
        ddp._set_ddp_runtime_logging_sample_rate(_PASSES)
    return str(logged(ddp).get("rebuilt_per_bucket_param_indices", "")).replace(",", " ")


def parameters_for_reducer(ddp: Any) -> tuple[list[torch.nn.Parameter], list[bool]]:
    """What DDP's constructor gives its reducer: the parameters that require gradients now, and whether each has a
    sparse gradient."""
    parameters, sparse = ddp._build_params_for_reducer()
    return list(parameters), list(sparse)


def zero_buckets(ddp: Any) -> Sequence[Any]:
    """Buckets of zeros in the layout of the reducer's own. Raises `RuntimeError` if gradients are sparse."""
    buckets: Sequence[Any] = ddp.reducer._get_zeros_like_grad_buckets()
    return buckets


def comm_hooks(ddp: Any) -> list[tuple[Any, Any]]:
    """The hooks that were registered in Python, each with its state."""
    return list(ddp._comm_hooks)


def builtin_hook(ddp: Any) -> Any:
    """The C++ hook that was registered, if any."""
    name = str(logged(ddp).get("comm_hook", ""))
    public: Any = dist
    return getattr(public.BuiltinCommHookType, name.removeprefix(_BUILTIN)) if name.startswith(_BUILTIN) else None


def uses_python_reducer(ddp: Any) -> bool:
    """Whether torch.compile's reducer is used, which has no buckets."""
    return bool(ddp._use_python_reducer)


def delays_static_pass(ddp: Any) -> bool:
    """Of a DDP object with a static graph: whether its first pass is over. Others do not have the attribute."""
    return bool(ddp._static_graph_delay_allreduce_enqueued)


def drop_reducer(ddp: Any) -> None:
    """Take the present reducer's hooks off the parameters. A new one is to be made."""
    ddp.reducer._remove_autograd_hooks()


def make_reducer(
    ddp: Any,
    parameters: list[torch.nn.Parameter],
    sparse: list[bool],
    hooks: Sequence[tuple[Any, Any]],
    builtin: Any,
) -> None:
    """Make the reducer as DDP's constructor does, without its broadcast. `hooks`, `builtin`: what `comm_hooks` and
    `builtin_hook` gave before, to be registered again."""
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    ddp._has_rebuilt_buckets = False
    ddp.require_forward_param_sync = True
    if ddp.static_graph:
        ddp.static_graph = False  # otherwise the next call would return early
        ddp._set_static_graph()
    ddp._comm_hooks.clear()
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    if builtin is not None:
        ddp._register_builtin_comm_hook(builtin)


def keep_order(ddp: Any) -> None:
    """Tell a new reducer that all gradients have arrived in the order of its parameters: so it keeps that order."""
    ddp.reducer._push_all_rebuilt_params()


def divide_by(ddp: Any, count: int | None) -> None:
    """Let the reducer divide the sums of gradients by this number; None: by that of all ranks."""
    divisor: torch.futures.Future[Any] = torch.futures.Future()
    divisor.set_result([torch.tensor([count or 0])])
    c10d: Any = torch._C._distributed_c10d
    ddp.reducer._set_forward_pass_work_handle(c10d._create_work_from_future(divisor), count is None)


def replace_pre_forward(replaced: Replacements, make: Callable[[Any], Any]) -> None:
    """Replace, until `replaced.end()`, what runs before DDP's module in a forward pass and has its collectives."""
    replaced.put("_pre_forward", make, DistributedDataParallel)
