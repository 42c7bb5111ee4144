"""A mesh before its first round, when neither the number of replicas nor this process's replica is known.

Torch's own mesh would answer for a world of one replica. So a script that asks is refused, as it is when it asks a
group. Torch itself gets an answer, because it builds modules over the mesh. Invariant: after `end` the mesh is torch's
own again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from everstep.recovery.group.recoverable import RecoverableGroup
from everstep.torch_private import meshes


def begin(mesh: Any, inside: RecoverableGroup, kind: str) -> None:
    """Refuse the script's questions to the mesh. `inside`: the group of a replica's ranks, in the dimension called
    `kind`."""
    mesh._everstep = (inside, kind)
    mesh.__class__ = _asking()


def end(mesh: Any) -> None:
    """Stop, because the mesh has its place in a round."""
    if isinstance(mesh, _asking()):
        del mesh._everstep
        mesh.__class__ = _torchs()


def _torchs() -> Any:
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  few scripts shard

    return DeviceMesh


@cache
def _asking() -> Any:
    class Unmoved(_torchs()):  # type: ignore[misc]
        _everstep: tuple[RecoverableGroup, str]

        def _ask(self, what: str) -> None:
            inside, _ = self._everstep
            inside.ask_ranks(f"mesh.{what}")

        def _is_inside(self, mesh_dim: int | str | None) -> bool:
            """Whether the dimension, or the whole mesh, contains only ranks of one replica."""
            _, kind = self._everstep
            names = self.mesh_dim_names or ()
            if isinstance(mesh_dim, int) and -len(names) <= mesh_dim < len(names):
                return bool(names[mesh_dim] == kind)
            return mesh_dim == kind or (mesh_dim is None and names == (kind,))

        def _knows(self, mesh_dim: int | str | None) -> bool:
            """Whether this process's rank in the group is final."""
            inside, _ = self._everstep
            return inside.knows_place and self._is_inside(mesh_dim)

        def __repr__(self) -> str:
            # torch's own text would show one replica. Printing a mesh is no reason to refuse a script.
            _, kind = self._everstep
            sizes = zip(self.mesh_dim_names or (), meshes.sizes_of(self), strict=False)
            shown = ", ".join(f"{name}={size if name == kind else '?'}" for name, size in sizes)
            return f"DeviceMesh(({shown}), '{self.device_type}', its ranks are known from run.steps() on)"

        def size(self, mesh_dim: Any = None) -> Any:
            if not self._is_inside(mesh_dim):
                self._ask("size()")
            return super().size(mesh_dim)

        @property
        def shape(self) -> Any:
            if not self._is_inside(None):
                self._ask("shape")
            return super().shape

        @property
        def mesh(self) -> Any:
            self._ask("mesh")
            return super().mesh

        def get_local_rank(self, mesh_dim: Any = None) -> Any:
            if not self._knows(mesh_dim):
                self._ask("get_local_rank()")
            return super().get_local_rank(mesh_dim)

        def get_coordinate(self) -> Any:
            if not self._knows(None):
                self._ask("get_coordinate()")
            return super().get_coordinate()

    return Unmoved
