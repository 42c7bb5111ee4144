"""Lets ranks agree, without a pause, at which step all of them stop, save or go to the next round.

A rank's wish travels in a tiny asynchronous MAX all-reduce. It begins at one boundary between steps and is read at the
next, so the step between them hides it. The next one begins a stride later, so that it costs little. Every rank reads
the same answer at the same step. The group is separate, so these collectives never mix with the program's.

Invariant: the boundaries at which ranks communicate depend only on agreed numbers, never on a rank's own clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from everstep.recovery.errors import LoopError
from everstep.recovery.group.collectives import reduce_into

COST = 0.005  # share of a step's time that agreements may take: half of the session's share
MAX_STRIDE = 64  # boundaries from one agreement to the next
NOT_SENT = -(2**62)  # less than any number that a rank sends
MAX_SECONDS = 0.25  # from one agreement to the next, unless a single step takes longer
SMOOTHING = 0.2  # weight of the newest measurement


@dataclass(frozen=True, slots=True)
class StepRequest:
    """What one rank wishes, or what all have agreed on."""

    stop: bool = False
    save: bool = False
    move: bool = False  # leave the round: the next one has more members
    updates: int = 0  # this rank's optimizer steps in this world; the same in all replicas
    calls: int = 0  # the program's collectives that it has begun in this world; the same in all replicas
    committed: int = -1  # the newest step that a rank knows to be committed


class StepAgreement:
    """Every rank calls `at_boundary(wish)` after every step; all get the same answer, which is mostly no wish. Raises
    `LoopError` on all ranks once their `updates` or `calls` differ: then one of them has skipped an optimizer step or a
    collective that others made.

    `group` is a gloo process group, or None for a world of one, where a wish is granted at once. `model_rank`: this
    rank's number in a replica of `model_size` ranks, each of which may have its own optimizers.
    """

    def __init__(
        self, group: Any, clock: Callable[[], float] = time.perf_counter, *, model_rank: int = 0, model_size: int = 1
    ) -> None:
        self._group = group
        self._model_rank, self._model_size = model_rank, model_size
        self._clock = clock
        self._boundary = 0
        self._next = 0  # the boundary at which the next collective begins or is read
        self._begun = 0  # the boundary at which the newest collective began
        self._spent = 0.0  # seconds spent on the present agreement
        self._stride = 1
        self._flight: tuple[Any, torch.Tensor] | None = None
        self._cost = self._step = 0.0  # seconds, smoothed
        self._left: float | None = None

    @property
    def stride(self) -> int:
        """Boundaries from one agreement to the next; the same on every rank."""
        return self._stride

    def at_boundary(self, wish: StepRequest) -> StepRequest:
        """Give this rank's wish, and return what all ranks do now. Raises the collective's error if a peer is gone."""
        if self._group is None:
            return wish
        began = self._clock()
        if self._left is not None:
            self._step = _smooth(self._step, began - self._left)
        agreed = StepRequest()
        if self._boundary == self._next:
            read = self._flight is not None
            agreed = self._read()
            if not read or self._stride == 1:
                # If all begin a save now, this rank's wish for it is fulfilled; repeated, it would cause a second save.
                self._begin(replace(wish, save=wish.save and not agreed.save))
                self._begun, self._next = self._boundary, self._boundary + 1
            else:
                self._next = self._begun + self._stride
            self._spent += self._clock() - began
            if read:
                self._cost, self._spent = _smooth(self._cost, self._spent), 0.0
        self._boundary += 1
        self._left = self._clock()
        return agreed

    def finish(self) -> None:
        """Let the collective in flight end, so that no rank waits for this one."""
        if self._flight is not None:
            self._flight[0].wait()
            self._flight = None

    def _begin(self, wish: StepRequest) -> None:
        numbers = [wish.stop, wish.save, wish.move, self._wanted_stride(), wish.calls, -wish.calls, wish.committed]
        for rank in range(self._model_size):
            numbers += [wish.updates, -wish.updates] if rank == self._model_rank else [NOT_SENT, NOT_SENT]
        values = torch.tensor(numbers, dtype=torch.int64)
        self._flight = (reduce_into(values, dist.ReduceOp.MAX, self._group), values)

    def _read(self) -> StepRequest:
        if self._flight is None:
            return StepRequest()
        work, values = self._flight
        work.wait()
        self._flight = None
        stop, save, move, self._stride, begun, fewest, committed, *updates = values.tolist()
        odd = ((most, least) for most, least in zip(updates[::2], updates[1::2], strict=True) if most != -least)
        if (differing := next(odd, None)) is not None:
            most, least = differing
            raise LoopError(
                f"after the same number of steps some ranks have made {most} optimizer steps in this world, and others "
                f"{-least}: a rank has left a step out (an error that was caught, a batch that was skipped), and its "
                "replica is another now. Decide on all ranks alike: reduce a flag in the step, and skip it everywhere "
                "or nowhere"
            )
        if begun != -fewest:
            raise LoopError(
                f"after the same number of steps some ranks have begun {begun} collectives in this world, and others "
                f"{-fewest}: a rank has left one out that the others ran (a branch that only some ranks take), and "
                "each later one of it was combined with another of theirs. Call every collective on all ranks, in the "
                "same order"
            )
        return StepRequest(bool(stop), bool(save), bool(move), committed=committed)

    def _wanted_stride(self) -> int:
        """The stride: enough boundaries to make the cost small, but few enough for an answer within `MAX_SECONDS`."""
        if self._step <= 0:
            return 1
        cheap = math.ceil(self._cost / (COST * self._step))
        soon = max(1, int(MAX_SECONDS / self._step))
        return max(1, min(cheap, soon, MAX_STRIDE))


def _smooth(old: float, new: float) -> float:
    return new if old == 0 else old + SMOOTHING * (new - old)


def group_of_its_own(seconds: float) -> Any:
    """A gloo group of all ranks whose collectives fail after `seconds`; None in a world of one. Collective."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
