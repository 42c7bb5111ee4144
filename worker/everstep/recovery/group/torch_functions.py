"""Replaces the functions of torch.distributed by which a script would make its own groups and meshes.

Before its first round a process is alone, so torch's own functions would silently give it groups and meshes of one
rank. Each such function is refused here, or replaced by one that follows the world. A replacement first checks that
the default group is ours, so it changes nothing in other programs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from everstep.contract.refusal import OWN_MODULES
from everstep.recovery.errors import LoopError
from everstep.recovery.group.recoverable import RecoverableGroup
from everstep.recovery.group.script_location import NO_PIPELINE, NO_SUBGROUPS, script_call_site
from everstep.torch_private import groups
from everstep.torch_private.meshes import is_slice
from everstep.torch_private.patches import replace

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
    "a group that the script builds itself is not built again when a peer is lost, and its collectives would wait for "
    "that peer. Write dist.new_group(), a group of all ranks, after everstep.start(); for a group of some ranks "
    "`run.mesh(model=N)` before it"
)
_NO_INIT = "everstep.start() has made the process group: delete this line"


@dataclass(frozen=True)
class MadeStage:
    """A stage of torch's pipelines, and its output_args=."""

    stage: Any
    outputs: Any


_making: list[list[MadeStage]] = []  # a schedule that lasts as long as its round: its stages


@contextmanager
def making_schedule() -> Iterator[Sequence[MadeStage]]:
    """A context in which stages of torch's pipelines may be made, because they are made anew in each round. Gives those
    that were made."""
    stages: list[MadeStage] = []
    _making.append(stages)
    try:
        yield stages
    finally:
        _making.pop()


def check_first() -> None:
    """Check that the script has not made the default group before `everstep.start` does. Raises `LoopError`."""
    if dist.is_initialized():
        raise LoopError(
            f"dist.init_process_group(){_line_of('init_process_group')} came before everstep.start(), which makes the "
            "process group, one that peers can leave and join. Delete that line (and destroy_process_group()), and "
            "call everstep.start() first; groups, meshes and DDP come after it"
        )


def install(most: int, ours: Callable[[], bool], make: Callable[[Sequence[int] | None, str | None], Any]) -> None:
    """Put the replacements in place; called once, when our default group exists. `most`: the largest number of
    processes. `ours`: whether our own code asks c10d for a group now. `make`: makes a group of these ranks (None: all),
    with a description."""
    world = dist.group.WORLD

    def here() -> bool:
        return world is not None and dist.group.WORLD is world

    def new_group_with_tag(original: Any) -> Any:
        @functools.wraps(original)
        def making(ranks: Any = None, *arguments: Any, **named: Any) -> Any:
            if here() and not ours():
                return make(None if ranks is None else list(ranks), named.get("group_desc"))
            return original(ranks, *arguments, **named)

        return making

    both = distributed_c10d, dist
    groups.replace_new_group(new_group_with_tag)
    replace("get_rank", partial(_get_rank, here), *both)
    replace("new_subgroups", partial(_new_subgroups, here, most), *both)
    replace("new_subgroups_by_enumeration", partial(_by_enumeration, here), *both)
    for name in ("get_process_group_ranks", "get_global_rank", "get_group_rank"):
        replace(name, _of_table, *both)
    replace("monitored_barrier", _monitored_barrier, *both)
    for holder, name, what, why in (
        (distributed_c10d, "split_group", "dist.split_group()", NO_SUBGROUPS),
        (distributed_c10d, "shrink_group", "dist.shrink_group()", NO_SUBGROUPS),
        (RecoverableGroup, "split_group", "split_group()", NO_SUBGROUPS),
        (RecoverableGroup, "merge_remote_group", "merge_remote_group()", NO_SUBGROUPS),
        (distributed_c10d, "init_process_group", "dist.init_process_group()", _NO_INIT),
        *((holder, name, "rpc.init_rpc()", _NO_RPC) for holder, name in groups.rpc_entries()),
    ):
        replace(name, partial(_refusing, here, what, why), *(both if holder is distributed_c10d else (holder,)))
    for kind in ("ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupMPI", "ProcessGroupUCC"):
        if hasattr(distributed_c10d, kind):
            replace("__init__", partial(_not_by_hand, kind, here), getattr(distributed_c10d, kind))
    _meshes(here)


def _get_rank(here: Callable[[], bool], original: Any) -> Any:
    """Let it ask the default group: torch would read its rank from a table that is not valid before the first round."""

    @functools.wraps(original)
    def get_rank(group: Any = None) -> int:
        asking = sys._getframe(1)
        if here() and str(asking.f_globals.get("__name__")).startswith(_PIPELINING):
            _check_stage(asking)
        if isinstance(group, RecoverableGroup) and group.knows_place:
            return group.rank()
        return int(original(group))

    return get_rank


def _monitored_barrier(original: Any) -> Any:
    """torch has this function for gloo's own groups only. Here the agent names a rank that does not arrive."""

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, *arguments: Any, **named: Any) -> Any:
        if isinstance(group or dist.group.WORLD, RecoverableGroup):
            return dist.barrier(group)
        return original(group, *arguments, **named)

    return monitored_barrier


def _check_stage(asking: FrameType) -> None:
    """Check the frame `asking`, which makes a pipeline stage."""
    stage = asking.f_locals.get("self")
    name = type(stage).__name__
    if not _making:
        _refuse(name, NO_PIPELINE)
    made = asking.f_back.f_locals if asking.f_back is not None else {}
    if "input_args" in made and (made["input_args"] is None or made["output_args"] is None):
        _refuse(name, _NO_SHAPES)
    _making[-1].append(MadeStage(stage, made.get("output_args")))


def _of_table(original: Any) -> Any:
    """Wrap a torch function that reads a table of each group's ranks and asks no group."""

    @functools.wraps(original)
    def asking(group: Any = None, *arguments: Any, **named: Any) -> Any:
        if isinstance(chosen := group or dist.group.WORLD, RecoverableGroup):
            chosen.ask_ranks(f"dist.{original.__name__}()")
        return original(group, *arguments, **named)

    return asking


def _new_subgroups(here: Callable[[], bool], most: int, original: Any) -> Any:
    """Replace torch's function, which reads this process's rank to find its own group."""

    @functools.wraps(original)
    def new_subgroups(group_size: int | None = None, group: Any = None, *arguments: Any, **named: Any) -> Any:
        if not here():
            return original(group_size, group, *arguments, **named)
        if group_size is None or group is not None or most % group_size:
            _refuse(f"dist.new_subgroups({group_size})", NO_SUBGROUPS)
        subgroups = [dist.new_group(list(range(i, i + group_size))) for i in range(0, most, group_size)]
        return _mine(subgroups), subgroups

    return new_subgroups


def _by_enumeration(here: Callable[[], bool], original: Any) -> Any:
    @functools.wraps(original)
    def new_subgroups_by_enumeration(lists: Any, *arguments: Any, **named: Any) -> Any:
        if not here():
            return original(lists, *arguments, **named)
        subgroups = [dist.new_group(list(ranks)) for ranks in lists]
        return _mine(subgroups), subgroups

    return new_subgroups_by_enumeration


def _mine(groups: Sequence[Any]) -> Any:
    return next((group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER), None)


def _meshes(here: Callable[[], bool]) -> None:
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415  few scripts shard

    def making(make: Any) -> Any:
        @functools.wraps(make)
        def init(mesh: Any, *arguments: Any, **named: Any) -> None:
            if here() and not is_slice(named) and (site := script_call_site(sys._getframe(1))) is not None:
                raise LoopError(f"{site.function or 'DeviceMesh'}{site.at}: {_NO_MESH}")
            make(mesh, *arguments, **named)

        return init

    replace("__init__", making, DeviceMesh)


def _not_by_hand(kind: str, here: Callable[[], bool], make: Any) -> Any:
    """Refuse a script that makes objects of this class of torch itself; torch and our own code may."""

    @functools.wraps(make)
    def init(group: Any, *arguments: Any, **named: Any) -> None:
        by = f"{sys._getframe(1).f_globals.get('__name__')}."
        if here() and not by.startswith(("torch.", *OWN_MODULES)):
            _refuse(f"dist.{kind}()", _NO_HANDMADE)
        make(group, *arguments, **named)

    return init


def _refusing(here: Callable[[], bool], what: str, why: str, function: Any) -> Any:
    @functools.wraps(function)
    def refusing(*arguments: Any, **named: Any) -> Any:
        if here():
            _refuse(what, why)
        return function(*arguments, **named)

    return refusing


def _refuse(what: str, why: str) -> NoReturn:
    site = script_call_site(sys._getframe(1))
    raise LoopError(f"{what}{site.at if site is not None else ''}: {why}")


def _line_of(function: str) -> str:
    """` (train.py:31)`: the line where the script calls the function, if its text shows it."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        lines = Path(script).read_text().splitlines() if script else []
    except (OSError, UnicodeDecodeError):
        lines = []
    number = next((i for i, line in enumerate(lines, 1) if f"{function}(" in line.partition("#")[0]), None)
    return f" ({Path(str(script)).name}:{number})" if number is not None else ""
