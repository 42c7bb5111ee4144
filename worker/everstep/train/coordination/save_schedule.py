"""Decides when a run saves, and holds its `Checkpointer`.

Saves by step number happen at exactly those steps, which every rank knows. For saves by time, rank 0 decides, and the
session tells the other ranks without a wait. A save that was due, or in flight, when a rank was lost is made in one of
the next steps: whoever knows that it is owed asks for it. Invariant: `durable` is true only for a step whose shard this
rank has written, or that was restored.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from everstep.checkpoint import Checkpointer, CheckpointError, SaveHandle, SettingUnusable
from everstep.checkpoint.handle import Committed, Outcome, Written
from everstep.checkpoint.in_session import InSession
from everstep.checkpoint.log.opening import Settings
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.save.policy import SavePolicy, Verdict
from everstep.storage.errors import StorageError

log = logging.getLogger("everstep.train")
T = TypeVar("T")

NEVER = 999_999_999  # steps between saves, for a Checkpointer whose saves the session times
LOOK_SECONDS = 0.02  # between checks of the peers during the wait for a save
ASK_SECONDS = 3.0  # for the store to answer requests whose answer a run does not need


class SaveSchedule:
    """`every_seconds`: seconds between saves by time. The checkpointer's own policy is asked at each step."""

    def __init__(self, checkpointer: Checkpointer, *, every_seconds: float | None) -> None:
        self.checkpointer = checkpointer
        # The session knows whether the other ranks are there to complete a save.
        self.in_session = InSession(checkpointer)
        self._by_time = SavePolicy(every_seconds, None, time.monotonic())
        self._restored: int | None = None
        self.failure: Exception | None = None  # of the newest save that was waited for
        self._handle: SaveHandle | None = None
        self._wanted = -1  # the newest step that was to be saved
        self._committed = -1  # the newest step that is known to be committed
        self.missed = False  # whether a save that a world of the past owes is still to be made

    @classmethod
    def find(
        cls,
        checkpoint: str | os.PathLike[str] | Checkpointer | None,
        every_steps: int | None,
        every_seconds: float | None,
        options: Mapping[str, Any],
        environ: Mapping[str, str] = os.environ,
    ) -> SaveSchedule | None:
        """The schedule from the arguments, or else from the environment; None if neither names a place. Raises
        `CheckpointError`, `StoreUnusable`."""
        if isinstance(checkpoint, Checkpointer):
            if every_steps is not None or every_seconds is not None or options:
                raise SettingUnusable(
                    "a Checkpointer was passed: give it every_steps, every_seconds and options itself"
                )
            return cls(checkpoint, every_seconds=None)
        settings = Settings.resolve(environ, checkpoint, None, every_seconds, every_steps, None, None, None)
        if not settings.url:
            inspect.signature(Checkpointer).bind(None, **options)  # raises for one that there is not
            return None
        made = Checkpointer(settings.url, every_steps=settings.every_steps or NEVER, **options)
        return cls(made, every_seconds=settings.every_seconds)

    def restore(self, state: Mapping[str, Any]) -> int:
        """Completed steps of the state that was loaded; 0 if there was none. Collective."""
        self._restored = self.checkpointer.restore(state)
        self._by_time.saved(time.monotonic())
        return self._restored or 0

    @property
    def restored(self) -> bool:
        """Whether the last `restore` found a commit, and the world is still that one."""
        return self._restored is not None

    @property
    def restored_step(self) -> int | None:
        """The id of the commit that `restore` has loaded, while the world has not changed since."""
        return self._restored

    @property
    def saved_step(self) -> int | None:
        """The id of the newest save of this world."""
        return self._handle.step if self._handle is not None else None

    def attach(self, name: str, data: bytes) -> None:
        """Put `data` beside the newest save, once it is a commit. By rank 0."""
        if self._handle is not None:
            self.in_session.attach(self._handle, name, data)

    def attach_now(self, name: str, data: bytes) -> None:
        """The same for a save that is over, if the store answers soon."""
        if (handle := self._handle) is not None:
            _within(ASK_SECONDS, lambda: self.in_session.attach(handle, name, data, now=True))

    def attached(self, names: Sequence[str]) -> dict[str, bytes]:
        """The data beside the restored commit, as far as the store answers soon."""
        read: dict[str, bytes] = {}

        def ask() -> None:
            for name in names:
                if (data := self.in_session.attached(name)) is not None:
                    read[name] = data

        if not _within(ASK_SECONDS, ask):
            log.warning("the store has not answered in %g s what is noted beside the restored commit", ASK_SECONDS)
        return dict(read)

    def attach_to_restored(self, name: str, data: bytes) -> None:
        """Put `data` beside the restored commit, if the store answers soon."""
        _within(ASK_SECONDS, lambda: self.in_session.attach_to_restored(name, data))

    def beside(self, name: str, most: int) -> bytes | None:
        """The first `most` bytes of an object below the checkpoint URL; None if there is none, or if the store does not
        answer soon. Not collective."""
        return self._answer("an object beside the commits", lambda: self.in_session.get(name, most))

    def put_beside(self, name: str, data: bytes) -> None:
        """Write an object `name` below the checkpoint URL, if the store answers soon. Not collective."""
        self._answer(name, lambda: self.in_session.put(name, data))

    def newest(self) -> int | None:
        """The step of the newest commit; None if there is none, or if the store does not answer soon: it may be
        unavailable, and a recovery does not need it. Not collective."""
        return self._answer("the newest commit", self.in_session.newest)

    def _answer(self, what: str, ask: Callable[[], T | None]) -> T | None:
        answers: list[T | None] = []

        def asking() -> None:
            try:
                answers.append(ask())
            except (CheckpointError, StorageError) as e:
                log.warning("%s is not known: %s", what, e)

        _within(ASK_SECONDS, asking)
        return answers[0] if answers else None

    def move(self, ranks: Ranks, round_: int, rendezvous: str) -> None:
        """Go on in another world; see `InSession.move`."""
        self.missed = self._wanted > self.committed
        self.in_session.move(ranks, round_, rendezvous)
        self._handle = self._restored = None

    def counted(self, step: int) -> None:
        """`step` steps are complete. If a save is due by their number, it is owed even if this world is left before it
        begins."""
        if self.in_session.due_by_steps(step):
            self._wanted = step

    @property
    def committed(self) -> int:
        """The newest step that this rank knows to be committed, by its own save or from another rank; -1: none."""
        if self._handle is not None and isinstance(outcome := self._handle.outcome, Committed):
            self._committed = max(self._committed, outcome.step)
        return self._committed

    @committed.setter
    def committed(self, step: int) -> None:
        self._committed = max(self._committed, step)

    def due(self) -> bool:
        """Whether this rank's clock asks for a save."""
        busy = self._handle is not None and not self._handle.done()
        return self._by_time.decide(0, time.monotonic(), busy=busy) is Verdict.SAVE

    def due_at(self, step: int) -> bool:
        """Whether all ranks save after `step`. Collective if the answer may be yes."""
        return self.checkpointer.should_save(step)

    def save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Begin to save. Every rank calls it at the same step; only rank 0's `metrics` are used."""
        self._by_time.saved(time.monotonic())
        self._wanted, self.missed = step, False
        self._handle = self.checkpointer.save(step, state, metrics=metrics)

    def measures(self, step: int, *, again: bool) -> bool:
        """Whether numbers of the state after `step` belong to a commit that is there or begun. `again`: also to one of
        another world, in which the evaluation lost a peer, or of the run before this one."""
        if self._handle is not None and self._handle.step == step:
            return bool(self._handle.save_id)
        return again and self.in_session.has_save(step)

    def durable(self, step: int, seconds: float | None, check: Callable[[], None]) -> bool:
        """Wait for the save in flight, at most `seconds`; whether this rank's part of `step` is durable then. `check`
        is called meanwhile, and raises if the peers that the save needs are gone."""
        if self._handle is None:
            return self._restored == step
        self.failure = None
        try:
            outcome = _wait(self._handle, seconds, check)
        except (CheckpointError, TimeoutError) as e:
            log.warning("step %d is not saved: %s", self._handle.step, e)
            self.failure = e
            return False
        return isinstance(outcome, Committed | Written) and outcome.step == step


def _within(seconds: float, ask: Callable[[], None]) -> bool:
    """Call the function, and wait for its end no longer than the limit. Whether it has ended."""
    asking = threading.Thread(target=ask, name="everstep-ask", daemon=True)
    asking.start()
    asking.join(seconds)
    return not asking.is_alive()


def _wait(handle: SaveHandle, seconds: float | None, check: Callable[[], None]) -> Outcome:
    until = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        check()
        left = until - time.monotonic()
        try:
            return handle.wait(max(0.0, min(left, LOOK_SECONDS)))
        except TimeoutError:
            if left <= LOOK_SECONDS:
                raise TimeoutError(f"the save of step {handle.step} is still in flight after {seconds} s") from None
