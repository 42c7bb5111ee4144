"""Evaluations: functions that the session calls on all ranks between two steps (`run.evaluate(fn, every=500)`).

A function can be called again; a block of code cannot. A process that comes later registers the same functions, so all
members of a world can take part in an evaluation, even those that were not there when it began. Invariants: an
evaluation leaves parameters and buffers unchanged; when it is called again, the tracked state is as at the first call;
all members of a world call the same functions between the same two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from everstep.checkpoint import RngState
from everstep.checkpoint.state.modules import bare
from everstep.checkpoint.state.sharding import is_sharded
from everstep.contract import refusal
from everstep.data import DataError
from everstep.data.plan.assignment import World
from everstep.data.takeover import TakenOver
from everstep.recovery import digests
from everstep.recovery.ddp.reducers import BUCKETS, Reducers, buffer_syncs, restore_buffer_syncs
from everstep.recovery.errors import LoopError
from everstep.recovery.rollback.tracked_objects import Module, Optimizer, TrackedObject, tracked_objects
from everstep.recovery.state.shape import Shape
from everstep.torch_private.modules import buffers_of

MOST = 64
_UNKNOWN, _PENDING, _DONE = 2, 0, 1


@dataclass(frozen=True, slots=True)
class _Evaluation:
    call: Callable[[], Any]
    every: int


class Evaluations:
    """The evaluations of one run. `step`: completed steps. `total`: the number of the last step."""

    def __init__(self) -> None:
        self._all: list[_Evaluation] = []
        self._at = -1  # the newest boundary to which this process has come
        self._done = -1  # the newest one whose evaluations are over

    def __len__(self) -> int:
        return len(self._all)

    def add(self, call: Callable[[], Any], every: int) -> None:
        if every < 1 or not callable(call):
            raise LoopError(f"evaluate({call!r}, every={every}): a function and a number of steps, 1 or more")
        if len(self._all) >= MOST:
            raise LoopError(
                f"run.evaluate(fn, every=…) for the {MOST + 1}th time: write it once for each function, before the loop"
            )
        self._all.append(_Evaluation(call, every))

    def due(self, step: int, total: int) -> list[Callable[[], Any]]:
        """The functions that are due at this boundary and were not called yet."""
        if step in (0, self._done):
            return []
        return [evaluation.call for evaluation in self._all if step % evaluation.every == 0 or step == total]

    def come(self, step: int) -> None:
        """This process is at the boundary after `step` steps."""
        self._at = step

    def over(self, step: int) -> None:
        self._done = step

    def standing(self, step: int) -> int:
        """This member's standing in the evaluations at `step`, sent when a round forms."""
        return (_DONE if self._done == step else _PENDING) if self._at == step else _UNKNOWN

    def reopens(self, step: int, mine: int, standings: list[tuple[int, ...]]) -> bool:
        """Whether this member must call the evaluations again, because another member at the same step has not
        completed them. `standings`: all members' steps and standings."""
        if mine != _DONE or (step, _PENDING) not in standings:
            return False
        self._done = -1
        return True

    def agree(self, step: int, standings: list[int]) -> None:
        """All members call the evaluations again, unless members that know say that they are over."""
        self._done = step if _DONE in standings and _PENDING not in standings else -1


def figures(result: Any) -> dict[str, Any]:
    """The part of a function's result that goes to `run.log`."""
    return dict(result) if isinstance(result, Mapping) else {}


def over(fn: Callable[[Any], Any], loader: Any, ranks: int, cut: Callable[[], World]) -> Callable[[], None]:
    """A function that calls `fn` with each batch of this rank's share of a DataLoader. The share depends on the world
    at that time, and each sample comes once. `ranks`: the largest number of ranks."""

    def call() -> None:
        world = cut()
        try:
            taken = TakenOver(loader, ranks=ranks, world=world, sizes=frozenset({1, ranks, world.size}))
        except DataError as e:
            text = f"evaluate(fn, loader): {e}. Or iterate it in fn: `run.evaluate(fn)`"
            raise LoopError(text, certain=refusal.find(e) is not None) from e
        taken.agree(0)  # all ranks use one order, even if they were seeded differently
        try:
            for batch in taken:
                fn(batch)
        finally:
            taken.close()

    if not isinstance(loader, DataLoader):
        raise LoopError(f"evaluate(fn, loader): a torch.utils.data.DataLoader is expected, and not a "
                        f"{type(loader).__qualname__}. Iterate it in fn: `run.evaluate(fn)`")  # fmt: skip
    return call


@contextmanager
def unchanged(state: Mapping[str, Any], seed: Callable[[], None]) -> Iterator[None]:
    """Restore what an evaluation changes: modes, buffers, generators, and whether DDP's next forward pass broadcasts
    the buffers. `seed` sets the generators for the evaluation."""
    modules = {id(m): m for t in state.values() if isinstance(t, torch.nn.Module) for m in t.modules()}.values()
    modes = [(module, module.training) for module in modules]
    buffers = [(own, name, b, b.detach().clone()) for own in map(buffers_of, modules)
               for name, b in own.items() if b is not None]  # fmt: skip
    generators = RngState().state_dict()
    # This holds for an evaluation through DDP too: on each rank the next step begins as it would without it, also on a
    # rank that comes later and has not evaluated.
    reducers = state.get(BUCKETS)
    syncs = buffer_syncs(reducers.alive()) if isinstance(reducers, Reducers) else []
    seed()
    try:
        yield
    finally:
        restore_buffer_syncs(syncs)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for holder, name, buffer, before in buffers:
                holder[name] = buffer
                buffer.copy_(before)
        RngState().load_state_dict(generators)


class Before:
    """The tracked state before the evaluations between two steps. It is read completely, because an evaluation that
    fails half-way may leave other weights in the model, also through `.data`."""

    def __init__(self, state: Mapping[str, Any], step: int) -> None:
        self.step = step
        self._tracked = tracked_objects(state)
        for target in self._tracked:
            for hook in target.hooks if isinstance(target, Optimizer) else ():
                hook.remove()
            target.begin()
        self._bits = self._read(self._tracked)

    def check(self) -> None:
        """The evaluations have ended. Raises `LoopError` if they have changed a parameter for good."""
        for name in self._moved([t for t in self._tracked if isinstance(t, Module)]):
            raise LoopError(
                f"the function of run.evaluate() has changed {name}: an evaluation is no step, and after a loss it "
                "is called again. Move what trains into `with step:`; a function that evaluates calls model.eval() and "
                "no optimizer.step()"
            )

    def put_back(self) -> str | None:
        """Restore the state, so that the evaluations can be called again. Returns the name of an object that they have
        changed and that has no copy; None if there is none."""
        moved = next(self._moved(self._tracked), None)
        for target in self._tracked:
            target.put_back()
        return moved

    def _moved(self, looked_at: list[TrackedObject]) -> Iterator[str]:
        return (name for name, bits in self._read(looked_at).items() if self._bits.get(name) != bits)

    @staticmethod
    def _read(looked_at: list[TrackedObject]) -> dict[str, int]:
        return {name: digests.content(tensor) for target in looked_at for name, tensor in target.contents()}


class SyncCheck:
    """Compares all parameters and gradients of what is tracked in `state`, for `run.check_sync`. `guards.replicas`
    reads the first bytes of each parameter in a few steps; this reads all bytes, as often as the script asks. Each rank
    is compared with the first one that holds the same part of a replica. `shape`: of the run's mesh, which may be made
    later."""

    def __init__(self, state: Mapping[str, Any], shape: Callable[[], Shape]) -> None:
        self._state, self._shape = state, shape

    def __call__(self) -> None:
        """Collective. Raises `LoopError` on all ranks, with the first tensor that differs, and its rank."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        mine = dict(self._digests())
        by_rank: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, mine)
        for rank, theirs in enumerate(by_rank):
            first = rank % self._shape().shards
            differing = [name for name in sorted(by_rank[first].keys() | theirs.keys())
                         if by_rank[first].get(name) != theirs.get(name)]  # fmt: skip
            if differing:
                raise LoopError(
                    f"run.check_sync(): rank {rank} has another {differing[0]} than rank {first}, of "
                    f"{len(differing)} of {len(theirs)} tensors that differ. Look at what is done to it by rank: an "
                    "update that only some ranks make, gradients that nobody averages, random numbers or data that "
                    "decide differently on each rank"
                )

    def _digests(self) -> Iterator[tuple[str, int]]:
        """Of each parameter, and of each gradient that is there; of what is cut over the ranks this rank's part."""
        for key, value in self._state.items():
            if not isinstance(value, torch.nn.Module):
                continue
            for name, p in bare(value).named_parameters():
                if is_sharded(p) and self._shape().shards == 1:
                    continue  # over a mesh that is not the run's: nobody says which ranks hold the same
                yield f"{key}.{name}", digests.content(p)
                if p.grad is not None:
                    yield f"the gradient of {key}.{name}", digests.content(p.grad)
