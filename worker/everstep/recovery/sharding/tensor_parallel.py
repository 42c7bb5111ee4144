"""Repairs what tensor parallelism (`parallelize_module`) keeps from step to step. Parameters are sharded while a
process is alone, and again for another shard.

The parameters are DTensors over `run.mesh(tensor=N)["tensor"]`, whose group is ours. A DTensor asks its mesh for its
place in each operation. Invariant: before its first round a process takes shards of its own values only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch

from everstep.checkpoint.state.sharding import is_sharded
from everstep.torch_private import sharded
from everstep.torch_private.patches import replace


def cut_alone(alone: Callable[[Any], bool]) -> None:
    """Let each process take its shard of its own values while `alone(group)`, as with `src_data_rank=None`. Otherwise
    torch sends the shards from the first rank of the mesh, which does not exist yet."""
    placement_types: Any = import_module("torch.distributed.tensor.placement_types")  # few scripts shard

    def scattering(scatter: Any) -> Any:
        def mesh_scatter(output: Any, parts: Any, mesh: Any, mesh_dim: int = 0, *given: Any, **named: Any) -> Any:
            if not alone(mesh.get_group(mesh_dim)):
                return scatter(output, parts, mesh, mesh_dim, *given, **named)
            if not output.is_meta:
                output.copy_(parts[mesh.get_coordinate()[mesh_dim]])
            return None

        return mesh_scatter

    def broadcasting(broadcast: Any) -> Any:
        def mesh_broadcast(tensor: Any, mesh: Any, mesh_dim: int = 0, *given: Any, **named: Any) -> Any:
            if not alone(mesh.get_group(mesh_dim)):
                return broadcast(tensor, mesh, mesh_dim, *given, **named)
            return None

        return mesh_broadcast

    replace("mesh_scatter", scattering, placement_types)
    replace("mesh_broadcast", broadcasting, placement_types)


class Cut:
    """The DTensors of some modules that are sharded over `mesh`, which has one dimension."""

    def __init__(self, modules: Iterable[torch.nn.Module], mesh: Any) -> None:
        self._modules = list(modules)
        self._mesh = mesh

    @torch.no_grad()
    def hold(self, shard: int) -> None:
        """This process has another shard from now on. What it holds is of no use until it is filled."""
        for tensor in self.tensors():
            local = sharded.local(tensor)
            shape = part_of(tensor, shard, self._mesh.size())
            if local.shape != shape:
                sharded.set_local(tensor, local.new_zeros(shape).requires_grad_(local.requires_grad))
                sharded.forget_plans()

    def arrived(self) -> None:
        """Wait for the sums that are gradients, or from which gradients were computed. Raises `PeerLost`."""
        for parameter in (p for module in self._modules for p in module.parameters()):
            grad: Any = parameter.grad
            if hasattr(grad, "trigger_wait"):
                parameter.grad = grad.trigger_wait()
            elif is_sharded(grad) and hasattr(part := sharded.local(grad), "trigger_wait"):
                sharded.set_local(grad, part.trigger_wait())

    def tensors(self) -> Iterator[Any]:
        seen: set[int] = set()
        for module in self._modules:
            tensors: Iterable[Any] = (*module.parameters(), *module.buffers())
            for tensor in tensors:
                if id(tensor) not in seen and is_sharded(tensor) and tensor.device_mesh == self._mesh:
                    seen.add(id(tensor))
                    yield tensor


def part_of(tensor: Any, shard: int, shards: int) -> torch.Size:
    """The shape of shard number `shard` of a DTensor over a mesh of one dimension."""
    size, (placement,) = list(tensor.shape), tensor.placements
    if placement.is_shard():
        each = -(-size[placement.dim] // shards)
        size[placement.dim] = max(0, min(each, size[placement.dim] - shard * each))
    return torch.Size(size)


def whole_here(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that each rank of a replica has whole, as DTensors or not, with their values in this process."""
    for key, target in state.items():
        if isinstance(target, torch.nn.Module):
            for name, tensor in target.named_parameters():
                if not is_sharded(tensor):
                    yield f"{key}.{name}", tensor.detach()
                elif all(p.is_replicate() for p in tensor.placements):  # type: ignore[attr-defined]
                    yield f"{key}.{name}", tensor.detach().to_local()  # type: ignore[attr-defined]
