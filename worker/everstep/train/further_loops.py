"""A run has one loop. A script that asks for its steps again would train nothing there, and end as if it had.

Invariant: the iterators that a run makes end once. Asked again behind their end they raise, where a plain generator
would be an empty loop. So does a second `for` statement over the steps that a first one has left: a process that begins
in the middle of the run takes them in the first.
"""

from __future__ import annotations

import dis
import logging
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Generic, NoReturn, TypeVar

from everstep.contract import error_file, refusal, refusal_output, termination
from everstep.recovery.errors import LoopError
from everstep.train import refused_end

T = TypeVar("T")

log = logging.getLogger("everstep.train")

MOST = 3  # that are refused by an error, which a script may catch; then the process ends
_GET_ITER = dis.opmap["GET_ITER"]
_INSTEAD = (
    "A run has one loop over all its steps, which is what can be resumed. For a loop over epochs with a loop over "
    "steps in it: `for epoch in run.epochs(loader, 10):`, and in it `for step in run.steps():`. For phases: one loop "
    "that decides by `step.number` or `epoch`"
)


class TakenOnce(Iterator[T], Generic[T]):
    """Over `steps`. Calls `again` when it is asked for more behind its end or behind an error, with how many iterators,
    as of `islice`, have taken a part of the steps; and with None when a second `for` statement begins."""

    def __init__(self, steps: Iterator[T], again: Callable[[int | None], None]) -> None:
        self._steps, self._again = steps, again
        self._statement: tuple[CodeType, int] | None = None  # the `for` statement that takes from it
        self._is_over, self._is_part_begun = False, False
        self._parts = 0

    def __iter__(self) -> Iterator[T]:
        statement = _for_statement(sys._getframe(1))
        if statement is not None:
            if self._statement is not None and (self._is_over or statement != self._statement):
                self._again(None)
            self._statement = statement
        self._is_part_begun = False
        return self

    def __next__(self) -> T:
        if self._is_over:
            self._again(self._parts)
        try:
            given = next(self._steps)
        except BaseException:  # its end, too
            self._is_over = True
            raise
        if not self._is_part_begun:
            self._is_part_begun = True
            self._parts += 1
        return given


def _for_statement(frame: FrameType) -> tuple[CodeType, int] | None:
    """The `for` statement that asks for an iterator in this frame; None if a call does, as `islice(steps, 4)`."""
    code, at = frame.f_code, frame.f_lasti
    return (code, at) if at >= 0 and code.co_code[at] == _GET_ITER else None


class FurtherLoops:
    """The loops of one run that a script asks for behind the first."""

    def __init__(self) -> None:
        self.first_step: int | None = None  # that this process has taken or would take
        self._refused, self._has_warned = 0, False

    def asked_again(self, step: int, error: BaseException | None, parts: int | None, *, is_over: bool) -> None:
        """An iterator of this run is asked again: see `TakenOnce`. A script that takes the steps in parts rightly asks
        behind their end, where it has more parts than are left: in a process that began in the middle of the run."""
        if error is not None or parts is None or not (parts > 1 or self.first_step):
            self.refuse(step, error, is_over=is_over)
        if not self._has_warned:
            log.warning("the loop of this run is over, and this process asks for its steps again: no step is left for "
                        "a second loop. %s", _INSTEAD)  # fmt: skip
        self._has_warned = True

    def refuse(
        self, step: int, error: BaseException | None, *, in_epoch: bool = False, is_over: bool = True
    ) -> NoReturn:
        """The script asks for a loop again, behind `error` if that has ended the first. One that catches that too, in a
        loop of its own, would ask for ever."""
        self._refused += 1
        if error is not None:
            refused = LoopError(
                f"steps() is called again, after the loop was ended in step {step} by an error that the script "
                f"has caught: {type(error).__name__}: {error}. A run has one loop, and what a step that raises has "
                "changed is not whole. Take the `try` around the loop away: the launcher starts the process again, "
                "from the last commit. To leave a bad batch out, test for it inside the block, and decide on all ranks "
                "alike",
                certain=refusal.find(error) is not None,
            )
            refused.__cause__ = error
        elif in_epoch:
            refused = LoopError(
                f"a second loop over the steps of one epoch, behind step {step}: the first takes all of them, and this "
                "one would train nothing. Write it once in the body of the loop over epochs, with all of a step's work "
                "in it: `for step in run.steps():`, or `run.train(fn)`; with Accelerate, `for batch in loader:`"
            )
        elif is_over:
            refused = LoopError(
                f"a second loop over the steps of this run, behind step {step}: it would train nothing. {_INSTEAD}"
            )
        else:
            refused = LoopError(
                f"a second loop over the steps of this run, behind step {step}: a process that takes a lost one's "
                f"place would run the first one for all steps that are left. {_INSTEAD}"
            )
        refused_end.stands(refused)
        if self._refused == MOST:
            error_file.write(refused)
            termination.write_error(refused)
            refusal_output.show(refused)
            raise SystemExit(1) from refused
        raise refused
