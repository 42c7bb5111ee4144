"""A session's mesh in a process that meets nobody: for what FSDP2 and the mesh do between two rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from everstep.recovery.group.recoverable import RecoverableGroup
from everstep.recovery.group.script_location import ScriptLocation
from everstep.recovery.sharding.mesh import RecoverableMesh
from everstep.recovery.state.shape import SHARD

_asked: list[RecoverableGroup] = []


@contextmanager
def world_of_one() -> Iterator[None]:
    """c10d as a script has it before its first round."""
    if not hasattr(dist.Backend, "MESHTEST"):
        dist.Backend.register_backend("meshtest", lambda *_: _asked[-1], devices=["cpu"])
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    if made:
        dist.destroy_process_group()


def mesh_of(
    shards: int, provisional: int = 0, kind: str = SHARD, scope: ScriptLocation | None = None
) -> RecoverableMesh:
    def new_group(description: str) -> RecoverableGroup:
        _asked.append(RecoverableGroup(scope=scope))
        dist.new_group([0], backend="meshtest", group_desc=description)
        return _asked[-1]

    return RecoverableMesh(shards, provisional, "cpu", RecoverableGroup(), new_group, kind)
