"""Takes the stores away from a run of a rehearsal, for a few of its steps, and brings them back.

In each training process each request to the store of commits fails, every second one after a while without an answer.
Meanwhile the agent, which keeps the rounds of one machine, is stopped (`rounds_loss`).
Invariant: the stores are away for a bounded time, whatever the script does in its steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from everstep.rehearse.record import AWAY, LATE, ROUNDS_AWAY, ROUNDS_BACK, ROUNDS_WANTED
from everstep.rehearse.saves import Saves
from everstep.storage.base import ObjectStore
from everstep.storage.errors import RetryableError
from everstep.storage.faults import FaultStore

T = TypeVar("T")

SECONDS = 3.0  # for which the store of commits is away, at most, from its first request on
SILENT_SECONDS = 0.5  # without an answer
WAIT_SECONDS = 20.0  # for the process of the rehearsal


class StoreLoss:
    """In one training process. `steps`: the first without the stores, and the first that has them again."""

    def __init__(self, folder: Path, steps: tuple[int, int], saves: Saves) -> None:
        self._folder, self._steps = folder, range(*steps)
        self._saves = saves
        self._step = -1
        self._asked: float | None = None  # when the first request came
        self._requests = 0

    def wrap(self, open_store: Callable[..., ObjectStore]) -> Callable[..., ObjectStore]:
        """Of `open_store`: what it opens is away when it is time."""

        def opened(*arguments: Any, **options: Any) -> ObjectStore:
            return _Store(open_store(*arguments, **options), self)

        return opened

    def enters(self, step: int, rank: int) -> None:
        """The step after so many begins."""
        if step == self._steps.stop:
            self._saves.wait()  # one that has begun may not have sent its requests yet
        self._step = step
        if rank == 0 and step == self._steps.start:
            (self._folder / ROUNDS_WANTED).touch()
            self._wait_for(ROUNDS_AWAY)
        elif rank == 0 and step == self._steps.stop:
            self._wait_for(ROUNDS_BACK)

    def _wait_for(self, marker: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (self._folder / marker).exists():
            if time.monotonic() > deadline:
                (self._folder / LATE).touch()
                return
            time.sleep(0.01)

    def request(self) -> None:
        """Raises `RetryableError` while the store is away."""
        now = time.monotonic()
        if self._step not in self._steps or (self._asked is not None and now > self._asked + SECONDS):
            return
        if self._asked is None:
            self._asked = now
            (self._folder / f"{AWAY}{os.getpid()}").touch()
        self._requests += 1
        if self._requests % 2 == 0:
            time.sleep(SILENT_SECONDS)
        raise RetryableError("the store is away for a while: this is a rehearsal")


class _Store(FaultStore):
    def __init__(self, inner: ObjectStore, loss: StoreLoss) -> None:
        super().__init__(inner)
        self._loss = loss

    def call(self, operation: str, name: str, act: Callable[[], T], tear: Callable[[], None] = lambda: None) -> T:
        self._loss.request()
        return act()
