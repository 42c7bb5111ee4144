"""One optimizer step, as the training loop uses it: `with step as batch:`.

Invariant: a step counts exactly if its `with` block ended without an error, all its micro-batches were taken, and none
of its collectives failed, even if the script caught that error.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum, auto
from types import TracebackType
from typing import Any, NoReturn, Protocol

from everstep.contract import refusal
from everstep.data import Batch, BatchUnusable
from everstep.recovery.errors import LoopError
from everstep.train import refused_end

MAX_ERROR = 500  # characters of another error that our message quotes
_OF_BATCH = frozenset({field.name for field in fields(Batch)} | {"last", "to", "weight"})
_ENTER = "a step gives its batch when it is entered. Write `with step as batch:`, and in it"


class StepUnusable(LoopError, AttributeError, TypeError):
    """A step was used in place of its batch. It is an `AttributeError`, so that `hasattr` and the like work."""


class Phase(Enum):
    NEW = auto()
    ENTERED = auto()
    DONE = auto()
    FAILED = auto()
    LOST = auto()  # a peer was lost in it: it is repeated


class StepScope(Protocol):
    """The callbacks of a step when its block ends."""

    def step_over(self) -> None:
        """The block has ended, with or without an error."""

    def step_ended(self) -> bool:
        """The block has ended without an error. Returns whether the step is whole; it is not if a collective failed and
        the script caught the error. Raises `LoopError`."""

    def step_lost(self, error: BaseException) -> bool:
        """Whether the error means that a peer was lost, and the loop goes on."""

    def completion_read(self) -> None:
        """The script asks whether the step counts."""


class Step:
    """Step number `number`, which is also how many steps were completed before it.

    Entering it gives the batch; with `micro_batch=`, an iterator over the step's micro-batches; without a loader, None.
    """

    def __init__(
        self,
        number: int,
        batches: Iterator[Batch[Any]] | None,
        whole: bool,
        completed: Callable[[], None],
        scope: StepScope,
    ) -> None:
        self.number = number
        self.phase = Phase.NEW
        self._batches = batches
        self._whole = whole  # whether the step is one batch
        self._completed = completed
        self._scope = scope
        self._last: Batch[Any] | None = None
        self.error: BaseException | None = None  # the error that ended its block

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        instead = f"`batch.{name}`" if name in _OF_BATCH else "what the loader gives, `batch.data`"
        raise StepUnusable(f"step.{name}: {_ENTER} {instead}")

    def __getitem__(self, key: Any) -> NoReturn:
        raise StepUnusable(f"step[{key!r}]: {_ENTER} `batch.data[{key!r}]`")

    def __iter__(self) -> NoReturn:
        raise StepUnusable(f"a step is not unpacked: {_ENTER} `x, y = batch.data`")

    @property
    def completed(self) -> bool:
        """Whether the step counts. Code behind the block also runs if a peer was lost and the step will be repeated. So
        code that belongs to a step's end must check this."""
        self._scope.completion_read()
        return self.phase is Phase.DONE

    def scale(self, loss: Any) -> Any:
        """`scale` of the batch that was given last. Raises `LoopError` if that is not a single batch."""
        if self.phase is Phase.ENTERED and self._batches is None:
            raise LoopError(
                "run.scale(loss) in a step without a loader: there is no batch to weight the loss by. "
                "Use the loss as it is"
            )
        if self.phase is not Phase.ENTERED or not isinstance(self._last, Batch):
            what = "outside of a step" if self.phase is not Phase.ENTERED else "of several loaders, or before a batch"
            raise LoopError(f"run.scale(loss) {what}: there is not one batch in hand. Write `batch.scale(loss)`")
        return self._last.scale(loss)

    def __enter__(self) -> Any:
        if self.phase is not Phase.NEW:
            raise LoopError(
                f"step {self.number} was entered twice: a pass of the loop makes one step. Write one `with step as "
                "batch:` in it; for several batches in a step use run.loader(…, micro_batch=…)"
            )
        self.phase = Phase.ENTERED
        if self._batches is None:
            return None
        return self._take() if self._whole else self._micro_batches()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.phase, self.error = Phase.FAILED, error
        try:
            return self._leave(error, trace)
        except Exception as e:
            self.error = e
            refused_end.stands(e)
            raise

    def _leave(self, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._scope.step_over()
        if isinstance(error, BatchUnusable):  # `with step as (x, y)`
            raise LoopError(str(error)) from error
        if error is not None and not self._scope.step_lost(error):
            refused_end.stands(error)
            return False
        if error is not None or not self._scope.step_ended():
            self.phase, self.error = Phase.LOST, None
            traceback.clear_frames(trace)  # frees the step's results, which are large and no longer needed
            return True
        if self._batches is not None and (self._last is None or not _is_last(self._last)):
            taken = 0 if self._last is None else self._last.micro + 1
            raise LoopError(
                f"step {self.number} ended after {taken} of its micro-batches: its gradient lacks the others. Take "
                "them all: `with step as batches: for batch in batches: …`"
            )
        self.phase = Phase.DONE
        refusal.count_step()
        self._completed()
        return False

    def _micro_batches(self) -> Iterator[Batch[Any]]:
        while self._last is None or not _is_last(self._last):
            yield self._take()

    def _take(self) -> Batch[Any]:
        assert self._batches is not None
        self._last = next(self._batches)
        return self._last


def failed(step: Step) -> str:
    """The step's result for a block that ended with an error."""
    error = step.error
    return f"step {step.number} was ended by {type(error).__name__}: {str(error)[:MAX_ERROR]}"


def _is_last(taken: Any) -> bool:
    """Refuses `scale` in a step with several loaders, which takes one batch of each."""
    return taken.last if isinstance(taken, Batch) else True
