"""The private names that Everstep uses, all of them: what each is for, since when it exists, what would replace it.

`since`: the first version that has all names of the row, among those that were looked into: of torch 2.0, 2.3, 2.6,
2.8, 2.10, 2.12 and 2.13; of other libraries the tested one. A row that only 2.13 has is the first to look at with a new
version. Names without `_` are here if they lie in a private place, or are not documented.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Names:
    """Names of `holder`, a module or class, that `module` of this package uses. `why`: what for. `instead`: the public
    way that would replace them."""

    module: str
    holder: str
    names: str
    why: str
    since: str
    instead: str

    @property
    def library(self) -> str:
        return self.holder.partition(".")[0]


# For each library the requirement that the tests run with.
TESTED: Final = {
    "torch": "torch>=2.13,<2.14",  # as in worker/pyproject.toml
    "accelerate": "accelerate==1.15.0",
    "transformers": "transformers==5.24.0",
    "lightning": "lightning==2.6.6",
    "urllib3": "urllib3==2.8.0",
    "fsspec": "fsspec==2026.9.0",
    "s3fs": "s3fs==2026.9.0",
    "gcsfs": "gcsfs==2026.10.1",
    "litdata": "litdata>=0.2.76",
}

_C10D = "torch._C._distributed_c10d"
_DDP = "torch.nn.parallel.distributed"
_FSDP = "torch.distributed.fsdp._fully_shard"
_LOADER = "torch.utils.data.dataloader"
_FIT = "lightning.pytorch.loops"

_NONE = "none yet"
_MEMBERS = "groups whose members can change (torchcomms, ADR 0032)"
_REDUCER = "a reducer that is made anew for another world, and that tells and takes the order of its buckets"
_FSDP_WORLD = "FSDP2 over a mesh that may be given other ranks"

TABLE: Final[tuple[Names, ...]] = (
    # Groups
    Names("groups", _C10D, "AllgatherOptions", "the options of a gather that was given none", "2.0",
          "torch.distributed.distributed_c10d exports it as it does the other options"),
    Names("groups", f"{_C10D}.ProcessGroupGloo", "_Options create_device create_default_device",
          "gloo's group on an address of ours", "2.0", "an address among the options of new_group()"),
    Names("groups", f"{_C10D}.ProcessGroupGloo._Options", "_devices _threads _timeout",
          "its device, threads and time-out", "2.0", "an address among the options of new_group()"),
    Names("groups", f"{_C10D}.ProcessGroup", "_register_backend _get_sequence_number_for_group",
          "a group of several backends, and how many collectives it has begun", "2.0",
          "torch's flight recorder counts the collectives of NCCL"),
    Names("groups", "torch.distributed.distributed_c10d", "_new_group_with_tag _world _get_default_store",
          "groups that scripts make, and the default group's tables", "2.3", _MEMBERS),
    Names("groups", "torch.distributed.rpc", "_init_rpc_backend", "RPC is refused by name", "2.0",
          "none is needed once RPC is gone: torch has deprecated parts of it"),
    # DistributedDataParallel
    Names("reducers", f"{_DDP}.DistributedDataParallel",
          "_build_debug_param_to_name_mapping _build_params_for_reducer _comm_hooks _ddp_init_helper "
          "_get_ddp_logging_data _has_rebuilt_buckets _pre_forward _register_builtin_comm_hook "
          "_set_ddp_runtime_logging_sample_rate _set_static_graph _static_graph_delay_allreduce_enqueued "
          "_use_python_reducer", "each round makes new reducers, with the buckets of the old ones", "2.3", _REDUCER),
    Names("reducers", f"{_C10D}.Reducer",
          "_get_zeros_like_grad_buckets _push_all_rebuilt_params _rebuild_buckets _remove_autograd_hooks "
          "_set_forward_pass_work_handle _set_mixed_precision_param_dtype", "its buckets", "2.3", _REDUCER),
    Names("reducers", _C10D, "_create_work_from_future", "the number by which a reducer divides", "2.0",
          "a divisor as an option of DDP"),
    # Joins
    Names("joins", f"{_DDP}.DistributedDataParallel",
          "_assign_modules_buffers _check_and_sync_module_buffers _check_global_requires_backward_grad_sync "
          "_distributed_rank _sync_final_model _sync_module_buffers", "uneven inputs", "2.0",
          "torch's own join, once a rank that has joined takes the average too"),
    Names("joins", _DDP, "_DDPJoinHook", "what a rank without inputs does in `join`", "2.0",
          "JoinHook, once DDP works with any"),
    Names("joins", f"{_C10D}.Reducer", "_get_local_used_map _run_comm_hook", "its work for a rank without inputs",
          "2.0", "torch's own join, once a rank that has joined takes the average too"),
    Names("joins", "torch.distributed.algorithms.join.Join", "_enable _join_hooks _joinables _set_joinable_configs",
          "a join outside of the loop is switched off", "2.0", "Join(enable=) that can be changed"),
    Names("joins", "torch.autograd.grad_mode", "_unsafe_preserve_version_counter",
          "buffers that are sent count as unchanged", "2.0", _NONE),
    # Meshes and sharded state
    Names("meshes", "torch.distributed.device_mesh.DeviceMesh",
          "_coordinate_on_dim _create_sub_mesh _flatten_rank_map _get_root_mesh _hash _layout _rank _rank_map "
          "_root_mesh", "a mesh whose ranks change", "2.10", "a mesh that may be given other ranks"),
    Names("sharded", f"{_FSDP}._fsdp_state.FSDPState", "_fsdp_param_groups _is_root _state_ctx",
          "FSDP2's groups in a new round", "2.12", _FSDP_WORLD),
    Names("sharded", "torch.distributed.fsdp.FSDPModule", "_get_fsdp_state", "the state of a module", "2.6",
          _FSDP_WORLD),
    Names("sharded", f"{_FSDP}._fsdp_param_group.FSDPParamGroup", "_all_gather_result",
          "gathers in flight are forgotten", "2.3", "FSDPModule.reset_iter_state(), once it does that"),
    Names("sharded", f"{_FSDP}._fsdp_param.FSDPParam", "_orig_size _sharded_param_data _unsharded_param",
          "a parameter's shard in a new round", "2.3", _FSDP_WORLD),
    Names("sharded", "torch.distributed.tensor.DTensor", "_local_tensor", "this rank's part", "2.0",
          "DTensor.to_local(), once it gives the tensor itself"),
    Names("sharded", "torch._prims_common", "make_contiguous_strides_for", "strides of a shard", "2.0",
          "torch.empty(size, device='meta').stride()"),
    Names("sharded", "torch.distributed.tensor.debug", "_clear_sharding_prop_cache",
          "plans that name ranks are forgotten", "2.12", _NONE),
    Names("sharded", "torch.distributed.fsdp._flat_param.FlatParameter", "_is_flat_param",
          "flat parameters are each rank's own", "2.3", "FSDP2, which has none"),
    Names("sharded", "torch.distributed.tensor.parallel.ddp", "_st_info", "DDP with device_mesh= is refused", "2.3",
          _NONE),
    # Tensors
    Names("tensors", "torch.Tensor", "_version", "in-place changes of a tensor", "2.0", _NONE),
    Names("tensors", "torch.UntypedStorage", "_cdata", "identifies a storage, also an empty one", "2.0", _NONE),
    Names("tensors", "torch.distributed.tensor.DTensor", "_local_tensor", "the tensor that counts changes", "2.0",
          "DTensor.to_local(), once it gives the tensor itself"),
    Names("tensors", "torch", "_foreach_copy_", "copies of many tensors at once", "2.3",
          "a loop of copy_(), which takes longer"),
    Names("tensors", "torch._C", "DisableTorchFunctionSubclass", "copies without a subclass's code", "2.0",
          "torch.DisableTorchFunctionSubclass, once it is documented"),
    Names("tensors", "torch.utils._python_dispatch", "is_traceable_wrapper_subclass", "tensors that wrap others", "2.3",
          "torch.utils.is_traceable_wrapper_subclass, once there is one"),
    Names("tensors", "torch.Tensor", "_backward_hooks _post_accumulate_grad_hooks",
          "hooks that a script registers in its loop", "2.3", _NONE),
    # Modules
    Names("modules", "torch.nn.Module",
          "_buffers _load_from_state_dict _load_state_dict_pre_hooks _metadata _modules _non_persistent_buffers_set "
          "_parameters",
          "a module's own tables, and how it reads a state", "2.0",
          "named_parameters(recurse=False) and its kin read them, but do not write, nor say which buffers are saved"),
    Names("modules", "torch.nn.Module",
          "_backward_hooks _backward_pre_hooks _forward_hooks _forward_pre_hooks",
          "hooks that a script registers in its loop", "2.0", _NONE),
    Names("modules", "torch.nn.modules.batchnorm", "_NormBase", "the class of all batch norms", "2.0",
          "a tuple of the six public classes"),
    Names("modules", "torch._dynamo.eval_frame", "OptimizedModule", "compiled modules", "2.0", _NONE),
    Names("modules", "torch._dynamo.eval_frame.OptimizedModule", "_orig_mod", "the module that was compiled", "2.0",
          _NONE),
    # Optimizers, scalers, schedules
    Names("optimizers", "torch.optim.Optimizer", "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
          "hooks of an optimizer that did not call its __init__", "2.0",
          "register_step_pre_hook(), once it makes the tables"),
    Names("optimizers", "torch.distributed.optim.ZeroRedundancyOptimizer",
          "_all_state_dicts _build_param_buckets _clear_cache _overlap_with_ddp _partition_parameters "
          "_sync_param_groups", "its parts are divided anew", "2.0", "FSDP2, which shards the optimizer's state too"),
    Names("optimizers", "torch.optim.lr_scheduler.LRScheduler", "_step_count", "how far a schedule in a file is", "2.0",
          "none is needed if files say what they hold"),
    Names("optimizers", "torch.amp.GradScaler", "_growth_tracker _per_optimizer_states _scale",
          "what a scaler has counted in a step", "2.0", "get_scale(), which waits for the device"),
    # Loaders
    Names("loaders", _LOADER, "_BaseDataLoaderIter", "the class of all iterators of loaders", "2.0", _NONE),
    Names("loaders", f"{_LOADER}._BaseDataLoaderIter", "_dataset _index_sampler _num_yielded",
          "how far a loader of the script is", "2.0", "torchdata's StatefulDataLoader, if the script uses it"),
    Names("loaders", f"{_LOADER}._MultiProcessingDataLoaderIter", "_shutdown_workers", "workers end with their loader",
          "2.0", "a close() of loaders"),
    Names("loaders", "torch.utils.data.DataLoader", "_index_sampler _iterator",
          "persistent workers, and what gives the indices", "2.0", "a close() of loaders"),
    Names("loaders", "torch.utils.data._utils.fetch", "_IterableDatasetFetcher _MapDatasetFetcher",
          "a rehearsal sees what workers read with", "2.0", _NONE),
    Names("loaders", "torch.utils.data._utils.worker", "_worker_info",
          "a stream hides that it is one of several workers", "2.0", _NONE),
    # Files
    Names("files", "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", "files of DCP", "2.3",
          "a reader of DCP's descriptions that runs no pickle"),
    Names("files", "torch.distributed.checkpoint.filesystem", "_StorageInfo", "files of DCP", "2.0",
          "a reader of DCP's descriptions that runs no pickle"),
    Names("files", "torch.serialization", "_get_layout", "layouts in files of torch.save", "2.0",
          "torch.load(weights_only=True), once it reads DCP's descriptions"),
    # Autograd, pipelines, torchrun
    Names("autograd", "torch._C", "_current_graph_task_id", "whether a backward pass runs, and which", "2.0", _NONE),
    Names("autograd", "torch._C._autograd", "_profiler_enabled", "whether the script profiles itself", "2.0", _NONE),
    Names("pipelines", "torch.distributed.pipelining.schedules.PipelineScheduleSingle", "_n_microbatches",
          "whether a target can be divided", "2.6", "none; torch divides without a check"),
    Names("launcher", "torch._utils", "cpu_count", "torchrun's number of processes", "2.12",
          "len(os.sched_getaffinity(0)), where that is the same"),
    Names("launcher", "torch.numa.binding", "_get_logical_cpus_to_bind_to", "torchrun's binding to CPUs", "2.10",
          _NONE),
    # Accelerate
    Names("accelerate", "accelerate.accelerator.Accelerator",
          "_custom_objects _dataloaders _models _optimizers _schedulers", "what a script has prepared", "1.15",
          "start(accelerator, model=, optimizer=, …), which names all objects"),
    Names("accelerate", "accelerate.state.GradientState", "_set_sync_gradients _shared_state",
          "a lost step's body runs to its end without a step", "1.15", "sync_gradients that can be set"),
    Names("accelerate", "accelerate.state.PartialState", "_shared_state", "the world of a round", "1.15", _NONE),
    Names("accelerate", "accelerate.state.AcceleratorState", "_shared_state", "the world of a round", "1.15", _NONE),
    # Trainer
    Names("transformers", "transformers.trainer.Trainer",
          "_created_lr_scheduler _eval_dataloaders _finalize_training _load_from_checkpoint _maybe_log_save_evaluate "
          "_prepare_for_training _tr_loss", "the loop is entered again in each round", "5.24",
          "a Trainer that goes on from a state in memory"),
    # Lightning
    Names("lightning", f"{_FIT}.fit_loop._FitLoop", "_combined_loader _data_fetcher _data_source _restarting",
          "the fit loop is entered again in each round", "2.6", "a fit loop that goes on from a state in memory"),
    Names("lightning", f"{_FIT}.training_epoch_loop._TrainingEpochLoop", "_broadcast_sigterm_tensor _restarting",
          "the same", "2.6", "a fit loop that goes on from a state in memory"),
    Names("lightning", f"{_FIT}.evaluation_loop._EvaluationLoop", "_combined_loader _module_mode",
          "a validation that was interrupted", "2.6", "a fit loop that goes on from a state in memory"),
    Names("lightning", "lightning.pytorch.trainer.trainer.Trainer", "_detect_anomaly _logger_connector _run_stage",
          "what `fit` does around the fit loop", "2.6", "a fit loop that goes on from a state in memory"),
    Names("lightning",
          "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector",
          "_callback_metrics reset_metrics reset_results", "metrics, without a collective", "2.6", _NONE),
    Names("lightning", "lightning.pytorch.LightningModule", "_current_fx_name", "a hook that was interrupted", "2.6",
          _NONE),
    Names("lightning", "lightning.pytorch.plugins.Precision", "_wrap_closure", "forward and backward of a step", "2.6",
          _NONE),
    Names("lightning", "lightning.pytorch.callbacks.ModelCheckpoint",
          "_defer_save_until_validation _last_checkpoint_saved _last_global_step_saved",
          "its newest save, by which each rank decides", "2.6", "ModelCheckpoint.state_dict(), once it has them"),
    Names("lightning", "lightning.fabric.utilities.distributed", "_sync_ddp", "means of integers over gloo", "2.6",
          _NONE),
    # Stores and data
    Names("libraries", "urllib3.connection.HTTPConnection", "_dns_host _new_conn",
          "connections with a bound of their own", "2.8", _NONE),
    Names("libraries", "urllib3.response.HTTPResponse", "_fp", "a body is read into memory of ours", "2.8",
          "readinto() that makes no copy"),
    Names("libraries", "fsspec.spec.AbstractFileSystem", "_strip_protocol", "the path in a URL", "2026.9",
          "url_to_fs(), which makes the file system too"),
    Names("libraries", "s3fs.core.S3FileSystem", "_call_s3", "a read that is given its own conditions", "2026.9",
          "call_s3(), in a thread of its own"),
    Names("libraries", "gcsfs.core.GCSFileSystem", "_location _request",
          "uploads in parts, and requests that are sent once", "2026.10", "an option for the number of attempts"),
    Names("libraries", "litdata.streaming.serializers", "_get_serializers", "litdata's samples", "0.2.76", _NONE),
    Names("libraries", "litdata.utilities._pytree", "treespec_loads", "litdata's samples", "0.2.76", _NONE),
    Names("libraries", "litdata.streaming.compression", "_COMPRESSORS", "litdata's compressed chunks", "0.2.76", _NONE),
)  # fmt: skip
