"""The private names of torch that Everstep uses, all of them, and the test at the start that they are there.

Invariant: a name of torch that begins with `_`, or lies in a module that does, is used nowhere but where this table
says; `tests/unit/test_torch_names.py` reads the sources. A part of torch that is not imported yet is not imported for
this: the start would pay seconds for it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Final

from everstep.contract.refusal import Refusal

VERSIONS: Final = "torch>=2.13,<2.14"  # as in worker/pyproject.toml


class TorchUnusable(Refusal, RuntimeError):
    """The installed torch lacks names that Everstep uses."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names of `holder`, a module or class: what they are needed for, the names, and the files or folders that use
    them."""

    holder: str
    why: str
    names: str
    used_in: str


_DDP = "torch.nn.parallel.distributed"
_C10D = "torch._C._distributed_c10d"
_FSDP = "torch.distributed.fsdp._fully_shard"

TABLE: Final[tuple[Names, ...]] = (
    Names(_C10D, "options, stores and works of a process group that is made in Python",
          "AllToAllOptions AllgatherOptions AllreduceCoalescedOptions AllreduceOptions BarrierOptions BroadcastOptions "
          "BuiltinCommHookType GatherOptions HashStore PrefixStore ProcessGroupGloo ReduceOptions ReduceScatterOptions "
          "ScatterOptions TCPStore Work _create_work_from_future",
          "recovery/ddp recovery/group recovery/forming compat/horovod agent/processes train"),
    Names(f"{_C10D}.ProcessGroupGloo", "gloo's group on an address of ours", "_Options create_device "
          "create_default_device", "recovery/forming"),
    Names(f"{_C10D}.ProcessGroupGloo._Options", "its device, threads and time-out", "_devices _threads _timeout",
          "recovery/forming"),
    Names(f"{_C10D}.ProcessGroup", "a group of several backends, and how many collectives it has begun",
          "_register_backend _get_sequence_number_for_group", "recovery/forming train/worlds.py"),
    Names("torch.distributed.distributed_c10d", "groups that scripts make, and the default group's tables",
          "_new_group_with_tag _world _get_default_store", "recovery train/worlds.py"),
    Names("torch.distributed.rpc", "RPC is refused by name", "_init_rpc_backend", "recovery/group"),
    Names(f"{_DDP}.DistributedDataParallel", "each round makes new reducers; `join` and uneven inputs",
          "_assign_modules_buffers _build_debug_param_to_name_mapping _build_params_for_reducer "
          "_check_and_sync_module_buffers _check_global_requires_backward_grad_sync _comm_hooks _ddp_init_helper "
          "_distributed_rank _get_ddp_logging_data _has_rebuilt_buckets _pre_forward _register_builtin_comm_hook "
          "_set_ddp_runtime_logging_sample_rate _set_static_graph _static_graph_delay_allreduce_enqueued "
          "_sync_final_model _sync_module_buffers _use_python_reducer", "recovery/ddp train"),
    Names(_DDP, "what a rank without inputs does in `join`", "_DDPJoinHook", "recovery/ddp"),
    Names(f"{_C10D}.Reducer", "its buckets, and its work for a rank without inputs",
          "_get_local_used_map _get_zeros_like_grad_buckets _push_all_rebuilt_params _rebuild_buckets "
          "_remove_autograd_hooks _run_comm_hook _set_forward_pass_work_handle _set_mixed_precision_param_dtype",
          "recovery/ddp train"),
    Names("torch.distributed.algorithms.join.Join", "a join outside of the loop is switched off",
          "_enable _join_hooks _joinables _set_joinable_configs", "recovery/ddp"),
    Names("torch.distributed.device_mesh.DeviceMesh", "a mesh whose ranks change",
          "_coordinate_on_dim _create_sub_mesh _flatten_rank_map _get_root_mesh _hash _layout _rank _rank_map "
          "_root_mesh",
          "recovery checkpoint/state"),
    Names(f"{_FSDP}._fsdp_state.FSDPState", "FSDP2's groups in a new round", "_fsdp_param_groups _is_root _state_ctx",
          "recovery/sharding"),
    Names("torch.distributed.fsdp.FSDPModule", "the state of a module", "_get_fsdp_state", "recovery/sharding"),
    Names(f"{_FSDP}._fsdp_param_group.FSDPParamGroup", "gathers in flight are forgotten", "_all_gather_result",
          "recovery/sharding"),
    Names(f"{_FSDP}._fsdp_param.FSDPParam", "a parameter's shard in a new round",
          "_orig_size _sharded_param_data _unsharded_param", "recovery/sharding"),
    Names("torch.distributed.tensor.DTensor", "this rank's part", "_local_tensor", "recovery"),
    Names("torch._prims_common", "strides of a shard", "make_contiguous_strides_for", "recovery/sharding"),
    Names("torch.distributed.tensor.debug", "plans that name ranks are forgotten", "_clear_sharding_prop_cache",
          "recovery/sharding"),
    Names("torch.distributed.optim.ZeroRedundancyOptimizer", "its parts are divided anew",
          "_all_state_dicts _build_param_buckets _clear_cache _overlap_with_ddp _partition_parameters "
          "_sync_param_groups", "recovery/transfer checkpoint/state"),
    Names("torch.Tensor", "changes of a tensor, its memory, its hooks", "_backward_hooks _cdata "
          "_post_accumulate_grad_hooks _version", "recovery train checkpoint/state"),
    Names("torch.nn.Module", "a module's own tables",
          "_backward_hooks _backward_pre_hooks _buffers _forward_hooks _forward_pre_hooks _load_from_state_dict "
          "_load_state_dict_pre_hooks _metadata _modules _non_persistent_buffers_set _parameters",
          "recovery train checkpoint/state"),
    Names("torch.nn.modules.batchnorm", "the class of all batch norms", "_NormBase", "checkpoint/state train/guards"),
    Names("torch.optim.Optimizer", "hooks of an optimizer's step",
          "_optimizer_step_post_hooks _optimizer_step_pre_hooks", "recovery/state train/guards"),
    Names("torch.optim.lr_scheduler.LRScheduler", "how far a schedule is", "_step_count", "checkpoint/convert"),
    Names("torch.amp.GradScaler", "what a scaler has counted in a step",
          "_growth_tracker _per_optimizer_states _scale", "recovery"),
    Names("torch.utils.data.dataloader._BaseDataLoaderIter", "how far a loader of the script is",
          "_dataset _index_sampler _num_yielded", "train/feeding"),
    Names("torch.utils.data.dataloader", "the class of all iterators of loaders", "_BaseDataLoaderIter",
          "train/feeding"),
    Names("torch.utils.data.dataloader._MultiProcessingDataLoaderIter", "workers end with their loader",
          "_shutdown_workers", "data"),
    Names("torch.utils.data.DataLoader", "persistent workers", "_iterator", "data"),
    Names("torch.utils.data._utils.worker", "a stream hides that it is one of several workers", "_worker_info",
          "data"),
    Names("torch._dynamo.eval_frame", "compiled modules", "OptimizedModule", "recovery/ddp"),
    Names("torch._dynamo.eval_frame.OptimizedModule", "the module that was compiled", "_orig_mod",
          "recovery checkpoint/state"),
    Names("torch", "copies of many tensors at once", "_foreach_copy_", "recovery/rollback"),
    Names("torch._C", "whether a backward pass runs; loads without subclasses' code",
          "DisableTorchFunctionSubclass _current_graph_task_id", "checkpoint/state train/guards"),
    Names("torch._C._autograd", "whether the script profiles itself", "_profiler_enabled", "instruments"),
    Names("torch._utils", "torchrun's number of processes", "cpu_count", "agent/processes"),
    Names("torch.numa.binding", "torchrun's binding to CPUs", "_get_logical_cpus_to_bind_to", "agent/processes"),
    Names("torch.autograd.grad_mode", "buffers that are sent count as unchanged", "_unsafe_preserve_version_counter",
          "recovery/ddp"),
    Names("torch.overrides", "a mode of the script's own", "_get_current_function_mode", "train/guards"),
    Names("torch.utils._python_dispatch", "tensors that wrap others", "is_traceable_wrapper_subclass",
          "checkpoint/state"),
    Names("torch.distributed.checkpoint.filesystem", "files of DCP", "_StorageInfo", "checkpoint/convert"),
    Names("torch.serialization", "layouts in files of torch.save", "_get_layout", "checkpoint/convert"),
)  # fmt: skip


def check() -> None:
    """Raise `TorchUnusable` if a name is missing in the parts of torch that are imported."""
    found = _missing(TABLE)
    if found:
        lines = "; ".join(f"{name} ({row.why})" for row, name in found[:8])
        more = f", and {len(found) - 8} more" * (len(found) > 8)
        raise TorchUnusable(
            f"PyTorch {importlib.metadata.version('torch')} lacks what Everstep uses of it: {lines}{more}. Everstep "
            f'{importlib.metadata.version("everstep")} works with {VERSIONS}: pip install "{VERSIONS}"'
        )


@functools.cache
def check_once() -> None:
    """As `check`; the second call does nothing."""
    check()


def _missing(table: Sequence[Names]) -> list[tuple[Names, str]]:
    """The rows of which names are missing, each with the full name."""
    found: list[tuple[Names, str]] = []
    for row in table:
        try:
            holder = _imported(row.holder)
        except AttributeError:
            found.append((row, row.holder))
            continue
        if holder is not None:
            there = set(_names(holder))
            found += [(row, f"{row.holder}.{name}") for name in row.names.split() if name not in there]
    return found


def _imported(path: str) -> Any:
    """The module or class; None if its module is not imported. Raises AttributeError."""
    module, _, rest = path, "", ""
    while module not in sys.modules and "." in module:
        module, _, last = module.rpartition(".")
        rest = f"{last}.{rest}" if rest else last
    holder: Any = sys.modules.get(module)
    if holder is None:
        return None
    for name in rest.split(".") if rest else ():
        if isinstance(holder, ModuleType) and name not in vars(holder) and hasattr(holder, "__path__"):
            return None  # a module of a package that is not imported, or a name that the package makes when asked
        holder = getattr(holder, name)
    return holder


def _names(holder: Any) -> Iterator[str]:
    """The names of a module; or of a class, with those that its methods use of their objects."""
    yield from vars(holder) if isinstance(holder, ModuleType) else dir(holder)
    for kind in getattr(holder, "__mro__", ()):
        yield from vars(kind).get("__annotations__", ())
        for member in vars(kind).values():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if isinstance(function, FunctionType):
                yield from function.__code__.co_names
