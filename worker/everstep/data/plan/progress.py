"""The state of one rank's reading: what is consumed, what is handed out, what is only prefetched.

Pure; the loader and the simulations drive the same object. Three places, and only the first is ever saved:

- The cursor: steps whose optimizer step is done. It moves when a step is acknowledged, by `acknowledge` or by asking
  for the next one.
- In hand: the step handed out last. Nobody but the training loop knows whether its optimizer step has happened, so a
  position is not given out while a step is in hand: a guess would lose its samples or use them twice.
- In flight: planned, perhaps prefetched. Dropping it loses nothing; it is planned again from the cursor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from everstep.data.errors import Unacknowledged
from everstep.data.plan.assignment import Epoch, Share, World, check_batch
from everstep.data.plan.cursor import Cursor, parse, resume
from everstep.data.plan.order import Shuffle, order_of
from everstep.data.plan.reading import Read, reads


class Progress:
    """One rank's way through the epochs. All ranks' cursors are equal, because all take the same steps."""

    def __init__(
        self,
        cursor: Cursor,
        epoch: Epoch,
        shuffle: Shuffle,
        world: World,
        *,
        micro_batch: int | None = None,
        shards: Sequence[int] | None = None,
    ) -> None:
        check_batch(epoch.global_batch, world.size, micro_batch)
        self.cursor = cursor
        self.epoch = epoch
        self.world = world
        self._shuffle = shuffle
        self.micro_batch = micro_batch
        self._shards = shards
        self._hand: Share | None = None
        self._flight: deque[Read] = deque()

    def __iter__(self) -> Iterator[Read]:
        """Plan from the cursor to the end of its epoch. What was in flight is dropped; one plan is live at a time."""
        # A generator: it begins when its first item is asked for, so a plan that nobody reads drops nothing.
        self._flight.clear()
        order = order_of(self._shuffle, self.epoch.n, self.cursor.seed, self.cursor.epoch, self._shards)
        for read in reads(self.epoch, order, self.cursor.index, self.world, self.micro_batch):
            self._flight.append(read)
            yield read

    def hand_out(self) -> Read:
        """The oldest read in flight: it is in hand now."""
        read = self._flight.popleft()
        self._hand = read.share
        return read

    def ask(self) -> None:
        """The next micro-batch is asked for: a step whose last one is in hand is thereby acknowledged."""
        if self._hand is not None and self._hand.micro == self._hand.micros - 1:
            self.acknowledge()

    def acknowledge(self) -> None:
        """The optimizer step of the step in hand is done. Does nothing if no step is in hand."""
        hand = self._hand
        if hand is None:
            return
        if hand.micro < hand.micros - 1:
            raise Unacknowledged(
                f"{self._named(hand)} cannot be acknowledged: {hand.micro + 1} of its {hand.micros} micro-batches were"
                " handed out. Take the others, or call rewind() to give the step up"
            )
        over = hand.step.end >= self.epoch.length
        at = (self.cursor.epoch + 1, 0) if over else (self.cursor.epoch, hand.step.end)
        self.cursor = self.cursor.moved(*at)
        self._hand = None

    def rewind(self) -> None:
        """Give up the step in hand, and what is in flight: the next plan begins with that step."""
        self._hand = None
        self._flight.clear()

    def reshard(self, world: World) -> None:
        """Go on as another rank of another world. A step in hand is given up, to be taken again whole.

        Raises BatchUnusable, and changes nothing, if the world is too large for the batch.
        """
        check_batch(self.epoch.global_batch, world.size, self.micro_batch)
        self.world = world
        self.rewind()

    def rebatch(self, global_batch: int) -> None:
        """Take steps of another size from here on, whole. Raises BatchUnusable, and changes nothing."""
        check_batch(global_batch, self.world.size, self.micro_batch)
        self.epoch = replace(self.epoch, global_batch=global_batch)
        self.cursor = replace(self.cursor, global_batch=global_batch)
        self.rewind()

    def reseed(self, seed: int) -> None:
        """Take the order of another seed. Only where nothing of it is consumed."""
        self.cursor = replace(self.cursor, seed=seed)
        self.rewind()

    def check_acknowledged(self, what: str) -> None:
        """Raises Unacknowledged if a step is in hand, because `what` has to know whether it is consumed."""
        if self._hand is not None:
            raise Unacknowledged(
                f"{what} while {self._named(self._hand)} is in hand: call acknowledge() after optimizer.step() if the"
                " step is done, or rewind() if it is not"
            )

    def load(self, state: Mapping[str, Any], allowed: frozenset[str]) -> None:
        """Go on from a saved position. Raises as `resume` does, and changes nothing then."""
        self.cursor = resume(parse(state), self.cursor, allowed)
        self.rewind()

    def _named(self, share: Share) -> str:
        return f"step {share.step.number} of epoch {self.cursor.epoch}"
