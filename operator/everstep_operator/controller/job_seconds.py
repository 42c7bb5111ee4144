"""Where the time of a job went: each second of its active life is in exactly one state (ADR 0056).

It is driven by passes (`planned`) and reports (`restored`, `trained`). What the job did since the last of them may only
become clear with the next: while it starts or trains, that time is pending, and counts when a report or a loss shows
what it was. So no figure ever falls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

# A job that trains for this long without any report since it began will send none.
SILENT = timedelta(seconds=60)


class State(StrEnum):
    """What a job does at one moment."""

    PRODUCTIVE = "productive"  # steps that are new, with all that the script does between them
    REPLAY = "replay"  # steps that were taken before the loss
    DETECT = "detect"  # from a fault, or the last report, until it is noticed
    FORM = "form"  # enough workers run, and do not train
    RESTORE = "restore"  # the training state is read
    WAIT = "wait"  # too few workers run
    UNKNOWN = "unknown"  # the script reports nothing; or an operator that kept no seconds saw to the job


class Standing(StrEnum):
    """What a pass or a report shows that a job does from now on."""

    IDLE = "idle"  # suspended
    WAIT = "wait"
    FORM = "form"
    START = "start"  # the world is complete, and has not taken a step
    TRAIN = "train"
    SILENT = "silent"  # it trains, as far as can be known


@dataclass(frozen=True, slots=True)
class Noticed:
    """A loss that a pass has noticed. `fault_at` None: it is not known when the worker failed."""

    at: datetime
    fault_at: datetime | None


_CONTINUOUS = {Standing.WAIT: State.WAIT, Standing.FORM: State.FORM, Standing.SILENT: State.UNKNOWN}


class JobSeconds:
    def __init__(self, seconds: Mapping[State, float], active: float, now: datetime) -> None:
        """`seconds` are those that the status remembers, of the job's `active` ones. What is missing passed while
        nobody wrote, and belongs to what the job is found to do."""
        self._seconds = {state: seconds.get(state, 0.0) for state in State}
        self._until = now - timedelta(seconds=max(0.0, active - sum(self._seconds.values())))
        self._standing: Standing | None = None
        self._since = now  # of the standing
        self._left_training = self._until  # what was reported before does not belong to the present round
        self._reported = False
        self._replays = False

    def planned(
        self, now: datetime, standing: Standing, noticed: Noticed | None = None, *, changed: bool = False
    ) -> None:
        """A pass shows that the job is idle, waits, forms its world, or has it: START, or TRAIN if it trains already.
        `changed`: the pass changes which workers should exist."""
        before = self._standing
        if standing is Standing.TRAIN and before is not None:
            standing = Standing.START  # its reports say more
        has_world = before in (Standing.START, Standing.TRAIN, Standing.SILENT)
        if has_world and noticed is None:
            if standing in (Standing.START, Standing.TRAIN):
                return
            if standing is not Standing.IDLE and not changed:
                return  # why it has no quorum, a later pass will know
        if has_world and noticed is not None:
            if standing in (Standing.START, Standing.TRAIN):
                standing = Standing.FORM  # it goes on with fewer workers, in a round that is yet to form
            self._lost(noticed)
        self._close(now)
        if before is None and standing in _CONTINUOUS:
            self._attribute(_CONTINUOUS[standing], now)
        if before is None and standing is Standing.IDLE:
            self._until = now
        if has_world:
            self._left_training = now
        if before is not standing:
            self._standing, self._since = standing, now

    def started(self) -> None:
        """A process of the round has begun, and will report what it does."""
        self._reported = True
        if self._standing is Standing.SILENT:
            self._standing = Standing.START

    def restored(self, at: datetime, seconds: float) -> None:
        """All ranks of the round have read their state by `at`; the slowest needed `seconds`."""
        self._reported = True
        if self._standing in (None, Standing.IDLE, Standing.TRAIN) or at <= self._left_training:
            return
        self._attribute(_CONTINUOUS.get(self._standing, State.FORM), at - timedelta(seconds=min(seconds, 1e9)))
        self._attribute(State.RESTORE, at)
        self._standing, self._since = Standing.TRAIN, at

    def trained(self, now: datetime, steps: int, new: int) -> None:
        """Rank 0 has completed `steps` since its last report, of which the last `new` ones are new."""
        self._reported = True
        if self._standing in (Standing.START, Standing.SILENT):  # nobody has restored anything
            self._attribute(State.FORM, now)
            self._standing, self._since = Standing.TRAIN, now
        elif self._standing is Standing.TRAIN and steps > 0:
            elapsed = max(timedelta(0), now - self._until)
            self._attribute(State.REPLAY, self._until + elapsed * ((steps - new) / steps))
            self._attribute(State.PRODUCTIVE, now)
        if steps > 0:
            self._replays = new == 0

    def new_round(self) -> None:
        """The agents have formed a round that no pass has seen: it began after the last report of the one before."""
        self._reported = True
        if self._standing in (Standing.TRAIN, Standing.SILENT):
            self._left_training = self._until
            self._standing = Standing.START

    def seconds(self, now: datetime) -> dict[State, float]:
        """The seconds by state until `now`, without those that are pending."""
        if self._standing is Standing.START and not self._reported and now - self._since > SILENT:
            self._standing = Standing.SILENT
        if self._standing in _CONTINUOUS:
            self._attribute(_CONTINUOUS[self._standing], now)
        return dict(self._seconds)

    @property
    def productive(self) -> float:
        """Seconds in which steps were taken that are new."""
        return self._seconds[State.PRODUCTIVE]

    def pending(self, now: datetime) -> float:
        """Seconds of the active life that are in no state yet."""
        return 0.0 if self._standing is Standing.IDLE else max(0.0, (now - self._until).total_seconds())

    def _lost(self, noticed: Noticed) -> None:
        if self._standing is Standing.TRAIN:
            if noticed.fault_at is not None:
                self._attribute(self._training(), min(noticed.fault_at, noticed.at))
            self._attribute(State.DETECT, noticed.at)

    def _close(self, now: datetime) -> None:
        """All time until `now` belongs to the standing that ends."""
        match self._standing:
            case None:
                pass
            case Standing.IDLE:
                self._until = now
            case Standing.START:
                self._attribute(State.FORM, now)
            case Standing.TRAIN:
                self._attribute(self._training(), now)
            case Standing.WAIT | Standing.FORM | Standing.SILENT:
                self._attribute(_CONTINUOUS[self._standing], now)

    def _training(self) -> State:
        return State.REPLAY if self._replays else State.PRODUCTIVE

    def _attribute(self, state: State, until: datetime) -> None:
        if until > self._until:
            self._seconds[state] += (until - self._until).total_seconds()
            self._until = until
