"""One optimizer step as the training loop holds it: `with step as batch:`.

Invariant: a step counts exactly if its `with` block ended without an error and all its micro-batches were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from types import TracebackType
from typing import Any

from everstep.data import Batch


class LoopError(RuntimeError):
    """The training loop uses the session in a way that cannot be right; the text says what to write instead."""


class Phase(Enum):
    NEW = auto()
    ENTERED = auto()
    DONE = auto()
    FAILED = auto()


class Step:
    """Step number `number`: so many are complete before it.

    Entering gives the batch; with `micro_batch=` an iterator over the step's micro-batches; without a loader None.
    """

    def __init__(
        self, number: int, batches: Iterator[Batch[Any]] | None, whole: bool, completed: Callable[[], None]
    ) -> None:
        self.number = number
        self.phase = Phase.NEW
        self._batches = batches
        self._whole = whole  # the step is one batch
        self._completed = completed
        self._last: Batch[Any] | None = None

    def __enter__(self) -> Any:
        if self.phase is not Phase.NEW:
            raise LoopError(f"step {self.number} was entered twice; take the next one from run.steps()")
        self.phase = Phase.ENTERED
        if self._batches is None:
            return None
        return self._take() if self._whole else self._micro_batches()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.phase = Phase.FAILED
        if error is not None:
            return
        if self._batches is not None and (self._last is None or not self._last.last):
            taken = 0 if self._last is None else self._last.micro + 1
            raise LoopError(
                f"step {self.number} ended after {taken} of its micro-batches: its gradient lacks the others. Take "
                "them all: `with step as batches: for batch in batches: …`"
            )
        self.phase = Phase.DONE
        self._completed()

    def _micro_batches(self) -> Iterator[Batch[Any]]:
        while self._last is None or not self._last.last:
            yield self._take()

    def _take(self) -> Batch[Any]:
        assert self._batches is not None
        self._last = next(self._batches)
        return self._last
