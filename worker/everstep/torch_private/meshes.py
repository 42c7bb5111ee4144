"""Torch's `DeviceMesh`: its parts, its root, and its layout of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def root_of(mesh: Any) -> Any:
    """The mesh from which this one was sliced; itself, if it was not."""
    return mesh._get_root_mesh()


def is_slice(options: Mapping[str, Any]) -> bool:
    """Whether these arguments of a mesh's constructor are those of a slice of another mesh."""
    return options.get("_root_mesh") is not None


def on_slice(mesh: Any, sliced: Callable[[Any], None]) -> None:
    """Call `sliced` with each mesh that is sliced from this one. For the life of the mesh, which is ours."""
    cut = mesh._create_sub_mesh

    def cut_and_noted(*arguments: Any) -> Any:
        part = cut(*arguments)
        sliced(part)
        return part

    mesh._create_sub_mesh = cut_and_noted


def sizes_of(mesh: Any) -> tuple[int, ...]:
    """The size of each dimension, without asking the mesh for its ranks."""
    return tuple(mesh._layout.top_level_sizes)


def relayout(mesh: Any, ranks: torch.Tensor, rank: int) -> None:
    """Give a mesh other ranks, as its constructor would. `rank`: this process's."""
    fresh = type(mesh)(mesh.device_type, ranks, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False, _rank=rank)
    mesh._layout, mesh._rank_map = fresh._layout, fresh._rank_map
    mesh._flatten_rank_map = fresh._flatten_rank_map
    mesh._rank, mesh._coordinate_on_dim = rank, fresh._coordinate_on_dim
    mesh._hash = None
