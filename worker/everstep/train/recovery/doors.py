"""The functions of torch.distributed by which a script would make a world of its own, while Everstep makes the worlds.

Before its first round a process is alone, so torch's own functions would give it groups and meshes of one, without a
word. Each is refused by name here, or made one that follows the world. Uses names of torch's that are not public;
`tests/agent/test_agent_scope.py` watches them. What is put in their place asks first whether the default group is
ours, so it changes nothing elsewhere.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from everstep.train.recovery.group import RecoverableGroup
from everstep.train.recovery.scope import NO_SUBGROUPS, script_asks
from everstep.train.step import LoopError

_NO_MESH = (
    "a mesh that the script makes has the world in which it was made: this process alone. For replicas × shards write "
    "`mesh = run.mesh(shard=N)` for FSDP2, or `mesh = run.mesh(tensor=N)` for tensor parallelism. Meshes of more "
    "dimensions and pipelines cannot go on when a peer is lost: run them under torchrun, which starts all processes "
    "again from the last commit"
)
_NO_INIT = "everstep.start() has made the process group: delete this line"
_NO_JOIN = (
    "uneven inputs are taken by run.loader, whose batch.scale weights them: leave `join` out, because a rank that has "
    "joined answers for others in collectives that nobody could repeat"
)


def check_first() -> None:
    """Before `everstep.start` makes the default group: the script has not. Raises `LoopError`."""
    if dist.is_initialized():
        raise LoopError(
            f"dist.init_process_group(){_line_of('init_process_group')} came before everstep.start(), which makes the "
            "process group, one that peers can leave and join. Delete that line (and destroy_process_group()), and "
            "call everstep.start() first; groups, meshes and DDP come after it"
        )


def put_up(most: int, ours: Callable[[], bool], make: Callable[[str | None], Any]) -> None:
    """Once, with our default group in place. `most`: processes that the job may come to have; `ours`: whether we ask
    c10d for a group just now; `make`: a group of all ranks, with a description."""
    world = dist.group.WORLD
    new_group = distributed_c10d._new_group_with_tag
    barrier = distributed_c10d.monitored_barrier
    ranks_of = distributed_c10d.get_process_group_ranks

    def here() -> bool:
        return world is not None and dist.group.WORLD is world

    def new_group_with_tag(ranks: Any = None, *arguments: Any, **named: Any) -> Any:
        if here() and not ours():
            everyone = (list(range(n)) for n in {most, dist.get_world_size()} if n > 1 or most == 1)
            if ranks is not None and sorted(ranks) not in everyone:
                _refuse(f"dist.new_group({list(ranks)})", NO_SUBGROUPS)
            return make(named.get("group_desc"))
        return new_group(ranks, *arguments, **named)

    def monitored_barrier(group: Any = None, *arguments: Any, **named: Any) -> Any:
        """torch has it for gloo's own groups alone. Whom it waits for in vain, the agent names."""
        if isinstance(group or dist.group.WORLD, RecoverableGroup):
            return dist.barrier(group)
        return barrier(group, *arguments, **named)

    @functools.wraps(ranks_of)
    def get_process_group_ranks(group: Any = None) -> list[int]:
        """torch keeps them in a table, and asks no group."""
        if isinstance(asked := group or dist.group.WORLD, RecoverableGroup):
            asked.ask_ranks("get_process_group_ranks")
        return ranks_of(group)

    distributed_c10d._new_group_with_tag = new_group_with_tag
    _replace(distributed_c10d, "get_process_group_ranks", get_process_group_ranks)
    _replace(distributed_c10d, "monitored_barrier", monitored_barrier)
    for holder, name, what, why in (
        (distributed_c10d, "split_group", "dist.split_group()", NO_SUBGROUPS),
        (distributed_c10d, "shrink_group", "dist.shrink_group()", NO_SUBGROUPS),
        (RecoverableGroup, "split_group", "split_group()", NO_SUBGROUPS),
        (RecoverableGroup, "merge_remote_group", "merge_remote_group()", NO_SUBGROUPS),
        (distributed_c10d, "init_process_group", "dist.init_process_group()", _NO_INIT),
        (Join, "__init__", "Join()", _NO_JOIN),
        (DistributedDataParallel, "join", "join()", _NO_JOIN),
    ):
        _replace(holder, name, _refusing(getattr(holder, name), here, what, why))
    _meshes(here)


def _meshes(here: Callable[[], bool]) -> None:
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  few scripts shard

    make = DeviceMesh.__init__

    def init(mesh: Any, *arguments: Any, **named: Any) -> None:
        if here() and named.get("_root_mesh") is None and (asked := script_asks(sys._getframe(1))) is not None:
            raise LoopError(f"{asked.function or 'DeviceMesh'}{asked.at}: {_NO_MESH}")
        make(mesh, *arguments, **named)

    DeviceMesh.__init__ = init  # type: ignore[method-assign, assignment]


def _refusing(function: Any, here: Callable[[], bool], what: str, why: str) -> Any:
    @functools.wraps(function)
    def refusing(*arguments: Any, **named: Any) -> Any:
        if here():
            _refuse(what, why)
        return function(*arguments, **named)

    return refusing


def _refuse(what: str, why: str) -> NoReturn:
    asked = script_asks(sys._getframe(1))
    raise LoopError(f"{what}{asked.at if asked is not None else ''}: {why}")


def _replace(holder: Any, name: str, function: Any) -> None:
    setattr(holder, name, function)
    if holder is distributed_c10d:
        setattr(dist, name, function)


def _line_of(function: str) -> str:
    """` (train.py:31)`: where the script calls it, as far as its text says."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        lines = Path(script).read_text().splitlines() if script else []
    except (OSError, UnicodeDecodeError):
        lines = []
    found = next((i for i, line in enumerate(lines, 1) if f"{function}(" in line.partition("#")[0]), None)
    return f" ({Path(str(script)).name}:{found})" if found is not None else ""
