"""Repairs what FSDP2 (`fully_shard`) keeps from step to step, after a failed step or for another shard.

A sharded module stays as it is: its groups are ours, and it asks them for their sizes at each collective. Invariant:
after `reset` nothing of the failed step is left in the modules, neither gathered parameters nor gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from everstep.checkpoint.state.sharding import is_sharded
from everstep.recovery.errors import LoopError
from everstep.recovery.sharding.tensor_parallel import Cut
from everstep.recovery.state import model_parts
from everstep.recovery.state.shape import MODEL, TENSOR
from everstep.torch_private import sharded

# Classes that shard without DTensors. A script builds its objects in a world of one: there they take their state for
# whole, and later they reduce nothing.
_REFUSED = ("FullyShardedDataParallel",)


class NotRecoverable(LoopError):
    """The tracked state is sharded in a way that recovery in process cannot handle."""


def check(state: Mapping[str, Any], device_mesh: Any) -> None:
    """Refuse a state that is sharded over anything but `device_mesh`, which is `RecoverableMesh.over` (None: refuse any
    sharded state). Treated as replicated, it would be trained wrongly without an error. Raises `NotRecoverable`."""
    by_tensor = device_mesh is not None and device_mesh.mesh_dim_names == (TENSOR,)
    by_script = device_mesh is not None and MODEL in device_mesh.mesh_dim_names
    for key, target in state.items():
        parts = target.modules() if isinstance(target, torch.nn.Module) else [target]
        for part in parts:
            for kind in type(part).__mro__:
                if kind.__name__ in _REFUSED:
                    raise NotRecoverable(
                        f"{key}: no process can go on with {kind.__name__} when a peer is lost. Use fully_shard() "
                        "with mesh=run.mesh(shard=N), which divides parameters, gradients and the optimizer's state. "
                        "To divide the optimizer's state alone (ZeRO stage 1), leave the others whole in a step: "
                        "model.set_requires_gradient_sync(batch.last) and model.set_reshard_after_backward(batch.last) "
                        "before the forward pass of each micro-batch"
                    )
        for name, tensor in _tensors(key, target):
            if not is_sharded(tensor):
                continue
            if by_script:
                raise NotRecoverable(
                    f"{name} is a DTensor, and run.mesh(model=N) is for models that the script itself divides, in "
                    "plain tensors. Make the mesh with run.mesh(tensor=N) for parallelize_module(), and with "
                    "run.mesh(shard=N) for fully_shard()"
                )
            if by_tensor and tensor.device_mesh != device_mesh:
                raise NotRecoverable(
                    f"{name} is sharded over {tensor.device_mesh}, and the run's mesh is run.mesh(tensor=N), whose "
                    '["tensor"] alone a model may be cut over: `parallelize_module(model, mesh["tensor"], plan)`. FSDP '
                    "and tensor parallelism in one run, and replicate(), cannot go on when a peer is lost: average the "
                    "gradients over the replicas with run.average_gradients(model)"
                )
            if device_mesh is None or tensor.device_mesh != device_mesh:
                raise NotRecoverable(
                    f"{name} is sharded over {tensor.device_mesh}, which cannot change when a peer is lost. Make the "
                    "mesh with run.mesh(shard=N), and shard over all of it; or, for tensor parallelism, with "
                    'run.mesh(tensor=N), and cut over mesh["tensor"]'
                )
            if by_tensor and not all(p.is_replicate() or type(p).__name__ == "Shard" for p in tensor.placements):
                raise NotRecoverable(
                    f"{name} has the placement {tensor.placements[0]}: of tensor parallelism Shard and Replicate can "
                    "go on when a peer is lost. Give parallelize_module() a plan that makes these, such as "
                    "ColwiseParallel() and RowwiseParallel()"
                )
    if by_script:
        model_parts.check(state)
    elif device_mesh is not None:
        _check_tracked(state, "parallelize_module()" if by_tensor else "fully_shard()")


def _check_tracked(state: Mapping[str, Any], call: str) -> None:
    """Refuse a sharded job whose steps cannot be voted on or taken back, because their modules or optimizers are not
    tracked."""
    modules = {id(p) for t in state.values() if isinstance(t, torch.nn.Module) for p in t.parameters() if is_sharded(p)}
    stepped = [(key, p) for key, t in state.items() if isinstance(t, torch.optim.Optimizer)
               for group in t.param_groups for p in group["params"] if is_sharded(p)]  # fmt: skip
    if not modules or not stepped:
        raise NotRecoverable(
            f"run.mesh() was called, and no {'optimizer' if modules else 'module'} that is sharded over it is tracked. "
            f"Call {call}, make the optimizer of what it returns, and pass both themselves to run.track()"
        )
    for key, parameter in stepped:
        if id(parameter) not in modules:
            raise NotRecoverable(
                f"{key} changes a sharded parameter of shape {list(parameter.shape)} whose module is not tracked: pass "
                "the module itself to run.track()"
            )


def is_offloaded(state: Mapping[str, Any]) -> bool:
    """Whether shards rest in the memory of the CPU (`CPUOffloadPolicy`), and the optimizer's state with them."""
    modules = (m for t in state.values() if isinstance(t, torch.nn.Module) for m in t.modules())
    return any(parameter.offload_to_cpu for module in modules for parameter in sharded.shards_of(module))


class ShardedObjects:
    """The FSDP2 modules among the tracked objects, those that are cut over `mesh["tensor"]`, and the optimizers."""

    def __init__(self, state: Mapping[str, Any], over: Any = None) -> None:
        self._optimizers = [t for t in state.values() if isinstance(t, torch.optim.Optimizer)]
        self._modules = [t for t in state.values() if isinstance(t, torch.nn.Module)]
        self._cut = Cut(self._modules if over is not None and over.mesh_dim_names == (TENSOR,) else (), over)

    def arrived(self) -> None:
        """Wait for the collectives from whose results gradients are computed. Raises `PeerLost`."""
        self._cut.arrived()

    def reset(self) -> None:
        """Clean up after the present step failed."""
        for module in self._roots():
            sharded.forget_gathers(module)
            module.reset_iter_state()
        for parameter in self._parameters():
            # Torch's reset leaves gradients that were not reduced yet. With them the repeated step would be wrong.
            sharded.forget_gradients(parameter)

    @torch.no_grad()
    def hold(self, shard: int) -> None:
        """Hold another shard from now on. Its contents are invalid until it is filled."""
        for parameter in self._parameters():
            sharded.hold(parameter, shard)
        self._cut.hold(shard)
        for optimizer in self._optimizers:
            optimizer.state.clear()  # its shapes may differ

    def _roots(self) -> Iterator[Any]:
        return (m for m in self._sharded() if sharded.is_root(m))

    def _sharded(self) -> Iterator[Any]:
        for module in self._modules:
            yield from (m for m in module.modules() if sharded.is_fully_sharded(m))

    def _parameters(self) -> Iterator[Any]:
        for module in self._sharded():
            yield from sharded.shards_of(module)


def _tensors(key: str, target: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(target, torch.nn.Module):
        yield from ((f"{key}.{name}", t) for name, t in (*target.named_parameters(), *target.named_buffers()))
    elif isinstance(target, torch.optim.Optimizer):
        groups = target.param_groups
        yield from ((f"{key}: parameter {i}", p) for i, p in enumerate(p for g in groups for p in g["params"]))
    elif isinstance(target, torch.Tensor):
        yield key, target
