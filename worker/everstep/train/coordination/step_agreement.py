"""What the ranks do at the same step, agreed on without stopping for it: stop, save, go to the next round.

A rank's wish travels in a tiny asynchronous MAX all-reduce that is begun at one boundary between steps and read at the
next, while the step between them hides it. The next one is begun a stride later, so that it costs little. Every rank
reads the same answer at the same step. The group is one of its own, so that these collectives never mix with the
program's.

Invariant: the boundaries at which ranks communicate depend on agreed numbers alone, never on a rank's own clock.
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

COST = 0.005  # of a step's time that agreeing may take: half of what the session may
MAX_STRIDE = 64  # boundaries from one agreement to the next
NONE_TOLD = -(2**62)  # less than any number that a rank tells
MAX_SECONDS = 0.25  # from one agreement to the next, unless a single step takes longer
SMOOTHING = 0.2  # weight of the newest measurement


@dataclass(frozen=True, slots=True)
class StepRequest:
    """What a rank asks for, or what all have agreed on."""

    stop: bool = False
    save: bool = False
    move: bool = False  # leave the round: the next one has more members
    updates: int = 0  # optimizer steps that this rank has made in this world; the same number on each of its place
    calls: int = 0  # collectives of the program that it has begun in this world; likewise


class StepAgreement:
    """`at_boundary(wish)` after every step, on every rank; the answer is the same on each, and mostly no wish. Raises
    `LoopError`, on all of them, once their `updates` or `calls` differ: then one has skipped an optimizer step or a
    collective that others made.

    `group` is a gloo process group, or None for a world of one, where a wish is granted at once. `place`, of `places`:
    of this rank in its replica, where each place may have optimizers of its own.
    """

    def __init__(
        self, group: Any, clock: Callable[[], float] = time.perf_counter, *, place: int = 0, places: int = 1
    ) -> None:
        self._group = group
        self._place, self._places = place, places
        self._clock = clock
        self._boundary = 0
        self._next = 0  # the boundary at which the next collective begins or is read
        self._begun = 0  # the boundary at which the newest was begun
        self._spent = 0.0  # seconds, on the agreement in hand
        self._stride = 1
        self._flight: tuple[Any, torch.Tensor] | None = None
        self._cost = self._step = 0.0  # seconds, smoothed
        self._left: float | None = None

    @property
    def stride(self) -> int:
        """Boundaries from one agreement to the next; the same on every rank."""
        return self._stride

    def at_boundary(self, wish: StepRequest) -> StepRequest:
        """Say what this rank wants, and hear what all do now. Raises what the collective raises if a peer is gone."""
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
                # A save that all begin now is what this rank still wishes for: told again, it would come twice.
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

    def settle(self) -> None:
        """Let the collective in flight end: nobody is left waiting for this rank."""
        if self._flight is not None:
            self._flight[0].wait()
            self._flight = None

    def _begin(self, wish: StepRequest) -> None:
        told = [wish.stop, wish.save, wish.move, self._wanted_stride(), wish.calls, -wish.calls]
        for place in range(self._places):
            told += [wish.updates, -wish.updates] if place == self._place else [NONE_TOLD, NONE_TOLD]
        values = torch.tensor(told, dtype=torch.int64)
        self._flight = (reduce_into(values, dist.ReduceOp.MAX, self._group), values)

    def _read(self) -> StepRequest:
        if self._flight is None:
            return StepRequest()
        work, values = self._flight
        work.wait()
        self._flight = None
        stop, save, move, self._stride, begun, fewest, *updates = values.tolist()
        odd = ((most, least) for most, least in zip(updates[::2], updates[1::2], strict=True) if most != -least)
        if (found := next(odd, None)) is not None:
            most, least = found
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
        return StepRequest(bool(stop), bool(save), bool(move))

    def _wanted_stride(self) -> int:
        """As many boundaries as make the cost small, and no more than answer within `MAX_SECONDS`."""
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
