"""Handles a loop that is left before its last step (`break`, `return`, `sys.exit()`), and a skipped optimizer step.

If all ranks leave the loop after the same step, the run is complete there, and is saved. If all skip an optimizer step,
their replicas stay equal. If only some do, no rank can go on: the others wait in a collective for a rank that will not
come. Invariants: that is found within a bounded time, and the error names the ranks; ranks that did not come in time
may only be slow, so that error is not `certain`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from everstep.contract import refusal
from everstep.recovery.errors import LoopError
from everstep.train.step import Phase, Step, failed

LEAST_SECONDS = 20.0  # to wait for the others to come to the end of the same step, at least
SLOWEST_STEPS = 10.0  # the same, as a multiple of the slowest step; the longer one holds
LOOK_SECONDS = 0.02


def is_done(error: BaseException | None) -> bool:
    """Whether this exception means that the script has ended successfully."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))


def check_error(error: BaseException | None, step: int, goal: int) -> None:
    """The script ends as if it were done. Raises if its loop was ended by an error that the script has caught."""
    if isinstance(error, SystemExit):
        raise error
    if error is not None and step < goal:
        raise LoopError(
            f"the run did not come to step {goal}: its loop was ended after step {step} by an error that the script "
            f"has caught: {type(error).__name__}: {error}",
            certain=refusal.find(error) is not None,
        ) from error


def check_step(step: Step | None) -> None:
    """Raises `LoopError` if the loop was left in the middle of a step, because the state then belongs to no step."""
    if step is not None and step.error is not None and not isinstance(step.error, SystemExit):
        raise LoopError(
            f"{failed(step)}, which the script caught outside of the loop: what the step has changed is not whole, and "
            "the run cannot end there as if it were complete. Take that `try` away, and mend what raises",
            certain=refusal.find(step.error) is not None,
        ) from step.error
    if step is not None and step.phase in (Phase.ENTERED, Phase.FAILED):
        raise LoopError(
            f"the program was ended inside step {step.number}, by sys.exit() or the like: what the step has moved is "
            "not whole. Leave the `with step:` block first, then `break`, on all ranks after the same step"
        )


def all_leave(
    store: Any, rank: int, size: int, step: int, slowest: float, check: Callable[[], None] = lambda: None
) -> None:
    """Meet the other ranks, which must leave the loop too. `store`: this world's store. `check` raises if the world is
    over. Raises `LoopError` if they do not come, or have left after another step."""
    keys = [f"everstep/left/{other}" for other in range(size)]
    store.set(keys[rank], str(step))
    limit = max(LEAST_SECONDS, SLOWEST_STEPS * slowest)
    until = time.monotonic() + limit
    while missing := [other for other, key in enumerate(keys) if not store.check([key])]:
        check()
        if time.monotonic() > until:
            raise LoopError(
                f"rank {rank} left the loop after step {step}, and ranks {missing} did not within {limit:.0f} s. "
                f"{_ADVICE}",
                certain=False,
            )
        time.sleep(LOOK_SECONDS)
    steps = [int(store.get(key)) for key in keys]
    if len(set(steps)) > 1:
        raise LoopError(f"the ranks left the loop after other steps each, by rank {steps}. {_ADVICE}")


def all_left_out(
    store: Any, rank: int, size: int, step: int, slowest: float, check: Callable[[], None] = lambda: None
) -> None:
    """Meet the other ranks, which must also have made fewer optimizer steps than usual in their step number `step - 1`.
    Arguments as above. Raises `LoopError` if they do not come: then they have made the steps, and replicas differ."""
    key = f"everstep/left-out/{step}"
    store.add(key, 1)
    limit = max(LEAST_SECONDS, SLOWEST_STEPS * slowest)
    until = time.monotonic() + limit
    while (came := int(store.add(key, 0))) < size:
        check()
        if time.monotonic() > until:
            raise LoopError(
                f"rank {rank} left a step out that others made: step {step - 1} ended without an optimizer's step "
                f"(or with fewer than before) on {came} of {size} ranks, and not on the others within {limit:.0f} s. "
                "An error was caught or a batch was skipped there, and the replicas are not equal any more. Decide on "
                "all ranks alike: reduce a flag in the step, and skip it everywhere or nowhere",
                certain=False,
            )
        time.sleep(LOOK_SECONDS)


_ADVICE = (
    "Decide on all ranks alike: inside `with step:` one broadcasts its decision, `dist.broadcast(stop, src=0)`, and "
    "after the block all ask it, `if step.completed and stop.item(): break`"
)
