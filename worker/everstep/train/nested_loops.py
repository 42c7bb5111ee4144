"""A run in two loops, as most scripts are written: `for epoch in run.epochs(loader, 10):`, and in it the epoch's steps.

The script has its own code in the outer loop before and after the steps: a line of the log, a snapshot by rank 0, a
schedule that moves once an epoch, an evaluation by `run.evaluate(fn)`. A process that comes later begins where the
others are: in the same epoch, after the same number of evaluations. On the way there, its outer loop may change
schedules and hyperparameters a second time, so these are restored to the values that it received. Commits are made
where the outer loop begins anew, or in the inner loop.

Invariant: if the state is at another place of the loops than the script's frames, the process ends, and a new one
begins at that place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.recovery.errors import LoopError
from everstep.recovery.group.members import Members
from everstep.recovery.rollback.tracked_objects import Tree, tracked_objects
from everstep.train.feeding.feed import Feed

# This bit of a position is set once the epoch's steps have begun. The bits below are 2n + 1 during evaluation n, and 2n
# after n evaluations.
STEPS = 2**20
_EPOCH = 2**22


@dataclass(frozen=True, slots=True)
class Spot:
    """An epoch, and a position in the outer loop's body. Both only grow."""

    epoch: int
    position: int = 0

    @property
    def evaluated(self) -> int:
        """How many evaluations of this epoch are over."""
        return self.position % STEPS // 2


class NestedLoops:
    """The two loops of one run. Does nothing in a run that calls only `steps`."""

    def __init__(self) -> None:
        self._feed: Feed | None = None
        self._state: Mapping[str, Any] = {}
        self._spot: Spot | None = None  # where the state is; None: there is none yet
        self._epoch: int | None = None  # the epoch of the script's outer loop
        self._evaluations = 0  # how many of the epoch's evaluations the script has reached
        self._target = 0  # the position of a received state, which the script has yet to reach
        self._given: list[Tree] = []  # small objects as they came with that state
        # Where this process is as one of the first; None if others were there before.
        self.arrives_at: str | None = None
        self.moved = False  # whether the state is at another place than the script's frames
        self.in_steps = False  # whether the script's inner loop runs
        self.has_begun_steps = False  # whether it has begun in this epoch of the script's outer loop

    @property
    def nested(self) -> bool:
        return self._feed is not None

    def begin(self, feed: Feed, state: Mapping[str, Any]) -> None:
        """Called before the first world is joined. `state`: the tracked state."""
        self._feed, self._state = feed, state

    def restored(self) -> None:
        """All ranks have restored a commit, or begin anew."""
        if self._feed is not None:
            self._come(self._as_restored(self._feed))

    def agree(self, members: Members) -> None:
        """A round has formed, and its members have one state. Collective."""
        if self._feed is None:
            return
        own = -1 if self._spot is None else self._spot.epoch * _EPOCH + self._spot.position
        spot = Spot(*divmod(max(number for (number,) in members.gather((own,))), _EPOCH))
        here = self._feed.epoch
        behind_steps = spot.epoch == here - 1 and self._feed.epoch_begins
        self._come(spot if spot.epoch == here or behind_steps else self._as_restored(self._feed))

    @staticmethod
    def _as_restored(feed: Feed) -> Spot:
        return Spot(feed.epoch, 0 if feed.epoch_begins else STEPS)

    def _come(self, spot: Spot) -> None:
        before, self._spot = self._spot, spot
        if self._epoch is not None and spot != before:
            self.moved = not (self.in_steps and spot.epoch == self._epoch and spot.position >= STEPS)

    def epoch(self) -> int:
        """The epoch that the outer loop begins, or goes on in, with the state that is there now."""
        assert self._spot is not None
        self._epoch, self._evaluations, self.moved, self.has_begun_steps = self._spot.epoch, 0, False, False
        self._keep()
        return self._spot.epoch

    @property
    def steps_left(self) -> bool:
        """Whether steps of this epoch are left."""
        assert self._feed is not None
        return self._feed.epoch == self._epoch

    @property
    def behind_steps(self) -> bool:
        """Whether the state is after the steps of an epoch that is not over."""
        assert self._feed is not None
        return self._spot is not None and self._spot.epoch < self._feed.epoch

    def steps_begin(self) -> None:
        assert self._spot is not None
        self.in_steps = self.has_begun_steps = True
        if self._target >= STEPS and self.steps_left:
            self._put_back()  # the code before the steps has changed these objects a second time
            self._target = 0
        begun = self._spot.position & STEPS
        self._spot = Spot(self._spot.epoch, self._spot.position | STEPS)
        self.arrives_at = None if begun else f"the steps of epoch {self._spot.epoch}"

    def steps_end(self, *, given: bool) -> None:
        """No step of this epoch is left. `given`: because this process received the state of a member behind them."""
        self.in_steps = False
        if given:
            self._keep()

    def evaluates(self) -> bool:
        """The script reaches an evaluation. Returns whether it must still be made."""
        assert self._spot is not None
        number, self._evaluations = self._evaluations, self._evaluations + 1
        if number < self._spot.evaluated:
            return False
        position = self._spot.position & STEPS | 2 * number + 1
        if position == self._target:
            self._put_back()
        begun = position == self._spot.position  # by others, before this process came
        self._spot = Spot(self._spot.epoch, position)
        self.arrives_at = None if begun else f"evaluation {number} of epoch {self._spot.epoch}"
        return True

    def evaluated(self) -> None:
        """The evaluation is over in this process."""
        assert self._spot is not None
        self._spot = Spot(self._spot.epoch, self._spot.position & STEPS | 2 * self._evaluations)

    def leave(self, step: int) -> None:
        """The script comes to the end of its outer loop's body. Raises LoopError if it has left out steps."""
        assert self._epoch is not None
        if self.steps_left:
            raise LoopError(
                f"run.epochs(): the script went on to the next epoch after step {step}, and epoch {self._epoch} has "
                "steps left. Take all of them, by run.train(fn) or `for step in run.steps():` in the loop over epochs. "
                "To end the run early leave both loops, on all ranks after the same step"
            )
        self.arrives_at = f"the end of epoch {self._epoch}"
        self._spot, self._epoch = Spot(self._epoch + 1), None

    def _keep(self) -> None:
        assert self._spot is not None
        self._target = self._spot.position
        self._given = [t for t in tracked_objects(self._state) if isinstance(t, Tree)] if self._target else []
        for target in self._given:
            target.begin()

    def _put_back(self) -> None:
        for target in self._given:
            target.put_back()
