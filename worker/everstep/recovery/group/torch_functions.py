"""The functions of torch.distributed by which a script would make a world of its own, while Everstep makes the worlds.

Before its first round a process is alone, so torch's own functions would give it groups and meshes of one, without a
word. Each is refused by name here, or made one that follows the world. Uses names of torch's that are not public;
`tests/agent/test_agent_scope.py` watches them. What is put in their place asks first whether the default group is
ours, so it changes nothing elsewhere.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from everstep.recovery.errors import LoopError
from everstep.recovery.group.recoverable import RecoverableGroup
from everstep.recovery.group.script_location import NO_PIPELINE, NO_SUBGROUPS, script_call_site

_NO_MESH = (
    "a mesh that the script makes has the world in which it was made: this process alone. For replicas × shards write "
    "`mesh = run.mesh(shard=N)` for FSDP2, `mesh = run.mesh(tensor=N)` for tensor parallelism, or `mesh = "
    "run.mesh(model=N)` for a model that the script divides with process groups of its own. Meshes of more dimensions "
    "cannot go on when a peer is lost: run them under torchrun, which starts all processes again from the last commit"
)
_PIPELINING = "torch.distributed.pipelining."
_NO_SHAPES = (
    "a stage that is not told its shapes runs its layers once more to find them out, on the step's random numbers. "
    "Give it input_args= and output_args=, tensors of one micro-batch's shapes"
)
_NO_RPC = (
    "it has a world of its own, whose members cannot change, and a call to a peer that is lost is not repeated. Leave "
    "it out, and use collectives, or dist.send and dist.recv, inside `with step:`; or run the script under torchrun, "
    "which starts all processes again from the last commit"
)
_NO_HANDMADE = (
    "nobody makes a group that the script builds itself anew when a peer is lost, and its collectives would wait for "
    "the lost one. Write dist.new_group(), a group of all ranks, after everstep.start(); for a group of some ranks "
    "`run.mesh(model=N)` before it"
)
_NO_INIT = "everstep.start() has made the process group: delete this line"
_NO_JOIN = (
    "uneven inputs are taken by run.loader, whose batch.scale weights them: leave `join` out, because a rank that has "
    "joined answers for others in collectives that nobody could repeat"
)


_making: list[bool] = []  # a schedule that lasts as long as its round


@contextmanager
def making_schedule() -> Iterator[None]:
    """Stages of torch's pipelines may be made in it: whoever makes them makes them anew in each round."""
    _making.append(True)
    try:
        yield
    finally:
        _making.pop()


def check_first() -> None:
    """Before `everstep.start` makes the default group: the script has not. Raises `LoopError`."""
    if dist.is_initialized():
        raise LoopError(
            f"dist.init_process_group(){_line_of('init_process_group')} came before everstep.start(), which makes the "
            "process group, one that peers can leave and join. Delete that line (and destroy_process_group()), and "
            "call everstep.start() first; groups, meshes and DDP come after it"
        )


def put_up(most: int, ours: Callable[[], bool], make: Callable[[Sequence[int] | None, str | None], Any]) -> None:
    """Once, with our default group in place. `most`: processes that the job may come to have; `ours`: whether we ask
    c10d for a group just now; `make`: a group of these ranks, None for all, with a description."""
    world = dist.group.WORLD
    new_group = distributed_c10d._new_group_with_tag
    barrier = distributed_c10d.monitored_barrier
    rank_in = distributed_c10d.get_rank

    def here() -> bool:
        return world is not None and dist.group.WORLD is world

    def new_group_with_tag(ranks: Any = None, *arguments: Any, **named: Any) -> Any:
        if here() and not ours():
            return make(None if ranks is None else list(ranks), named.get("group_desc"))
        return new_group(ranks, *arguments, **named)

    def monitored_barrier(group: Any = None, *arguments: Any, **named: Any) -> Any:
        """torch has it for gloo's own groups alone. Whom it waits for in vain, the agent names."""
        if isinstance(group or dist.group.WORLD, RecoverableGroup):
            return dist.barrier(group)
        return barrier(group, *arguments, **named)

    @functools.wraps(rank_in)
    def get_rank(group: Any = None) -> int:
        """torch looks the default group's rank up in a table, which does not know a place before the first round."""
        asking = sys._getframe(1)
        if here() and str(asking.f_globals.get("__name__")).startswith(_PIPELINING):
            _check_stage(asking)
        if isinstance(group, RecoverableGroup) and group.knows_place:
            return group.rank()
        return int(rank_in(group))

    distributed_c10d._new_group_with_tag = new_group_with_tag
    _replace(distributed_c10d, "get_rank", get_rank)
    _replace(distributed_c10d, "new_subgroups", _new_subgroups(dist.new_subgroups, here, most))
    _replace(distributed_c10d, "new_subgroups_by_enumeration", _by_enumeration(dist.new_subgroups_by_enumeration, here))
    for name in ("get_process_group_ranks", "get_global_rank", "get_group_rank"):
        _replace(distributed_c10d, name, _of_table(getattr(distributed_c10d, name)))
    _replace(distributed_c10d, "monitored_barrier", monitored_barrier)
    for holder, name, what, why in (
        (distributed_c10d, "split_group", "dist.split_group()", NO_SUBGROUPS),
        (distributed_c10d, "shrink_group", "dist.shrink_group()", NO_SUBGROUPS),
        (RecoverableGroup, "split_group", "split_group()", NO_SUBGROUPS),
        (RecoverableGroup, "merge_remote_group", "merge_remote_group()", NO_SUBGROUPS),
        (distributed_c10d, "init_process_group", "dist.init_process_group()", _NO_INIT),
        (Join, "__init__", "Join()", _NO_JOIN),
        (DistributedDataParallel, "join", "join()", _NO_JOIN),
        *((holder, name, "rpc.init_rpc()", _NO_RPC) for holder, name in _of_rpc()),
    ):
        _replace(holder, name, _refusing(getattr(holder, name), here, what, why))
    for kind in ("ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupMPI", "ProcessGroupUCC"):
        if hasattr(distributed_c10d, kind):
            _not_by_hand(getattr(distributed_c10d, kind), here)
    _meshes(here)


def _check_stage(asking: FrameType) -> None:
    """`asking` makes a stage."""
    name = type(asking.f_locals.get("self")).__name__
    if not _making:
        _refuse(name, NO_PIPELINE)
    made = asking.f_back.f_locals if asking.f_back is not None else {}
    if "input_args" in made and (made["input_args"] is None or made["output_args"] is None):
        _refuse(name, _NO_SHAPES)


def _of_table(torchs: Any) -> Any:
    """What torch answers from a table of each group's ranks in the world, and asks no group."""

    @functools.wraps(torchs)
    def asking(group: Any = None, *arguments: Any, **named: Any) -> Any:
        if isinstance(asked := group or dist.group.WORLD, RecoverableGroup):
            asked.ask_ranks(f"dist.{torchs.__name__}()")
        return torchs(group, *arguments, **named)

    return asking


def _new_subgroups(torchs: Any, here: Callable[[], bool], most: int) -> Any:
    """torch's asks for this process's rank, to say which group is its own."""

    @functools.wraps(torchs)
    def new_subgroups(group_size: int | None = None, group: Any = None, *arguments: Any, **named: Any) -> Any:
        if not here():
            return torchs(group_size, group, *arguments, **named)
        if group_size is None or group is not None or most % group_size:
            _refuse(f"dist.new_subgroups({group_size})", NO_SUBGROUPS)
        found = [dist.new_group(list(range(i, i + group_size))) for i in range(0, most, group_size)]
        return _mine(found), found

    return new_subgroups


def _by_enumeration(torchs: Any, here: Callable[[], bool]) -> Any:
    @functools.wraps(torchs)
    def new_subgroups_by_enumeration(lists: Any, *arguments: Any, **named: Any) -> Any:
        if not here():
            return torchs(lists, *arguments, **named)
        found = [dist.new_group(list(ranks)) for ranks in lists]
        return _mine(found), found

    return new_subgroups_by_enumeration


def _mine(groups: Sequence[Any]) -> Any:
    return next((group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER), None)


def _meshes(here: Callable[[], bool]) -> None:
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  few scripts shard

    make = DeviceMesh.__init__

    def init(mesh: Any, *arguments: Any, **named: Any) -> None:
        if here() and named.get("_root_mesh") is None and (asked := script_call_site(sys._getframe(1))) is not None:
            raise LoopError(f"{asked.function or 'DeviceMesh'}{asked.at}: {_NO_MESH}")
        make(mesh, *arguments, **named)

    DeviceMesh.__init__ = init  # type: ignore[method-assign, assignment]


def _of_rpc() -> list[tuple[Any, str]]:
    """What a script calls, and what that calls, because a script may have imported the function before."""
    if not dist.rpc.is_available():
        return []
    return [(dist.rpc, "init_rpc"), (dist.rpc.backend_registry, "construct_rpc_backend_options"),
            (dist.rpc, "_init_rpc_backend")]  # fmt: skip


def _not_by_hand(kind: Any, here: Callable[[], bool]) -> None:
    """torch makes some, and so do we: whoever else does is refused."""
    make = kind.__init__

    @functools.wraps(make)
    def init(group: Any, *arguments: Any, **named: Any) -> None:
        by = f"{sys._getframe(1).f_globals.get('__name__')}."
        if here() and not by.startswith(("torch.", "everstep.")):
            _refuse(f"dist.{kind.__name__}()", _NO_HANDMADE)
        make(group, *arguments, **named)

    kind.__init__ = init


def _refusing(function: Any, here: Callable[[], bool], what: str, why: str) -> Any:
    @functools.wraps(function)
    def refusing(*arguments: Any, **named: Any) -> Any:
        if here():
            _refuse(what, why)
        return function(*arguments, **named)

    return refusing


def _refuse(what: str, why: str) -> NoReturn:
    asked = script_call_site(sys._getframe(1))
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
