"""Schedules of `torch.distributed.pipelining` that follow the world: one is made anew in each round.

A schedule and its stages remember what their peers told them in their first step, so a process that comes later would
ask when nobody answers. Where all members of a round make theirs anew, all ask in that round's first step.

Invariant: a schedule that runs was made in the present round, of stages whose shapes are given. Stages that find shapes
out run their layers once more to do so, on random numbers and buffers of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.recovery.errors import LoopError
from everstep.recovery.group.torch_functions import making_schedule


class PipelineSchedule:
    """What `run.pipeline` returns: `step` and `eval` are those of the schedule that `make` has made for this round."""

    def __init__(self, make: Callable[[], Any], round_number: Callable[[], int | None]) -> None:
        self._make, self._round_number = make, round_number
        self._made: tuple[int | None, Any] | None = None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """As the schedule's own: all micro-batches of this rank's stages, forward and backward. In a step."""
        return self.schedule.step(*args, **kwargs)

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """As the schedule's own: all micro-batches forward. In a step, or in a function of `run.evaluate`."""
        return self.schedule.eval(*args, **kwargs)

    @property
    def schedule(self) -> Any:
        """torch's schedule, of the present round."""
        number = self._round_number()
        if self._made is None or self._made[0] != number:
            with making_schedule():
                made = self._make()
            if not hasattr(made, "step"):
                raise LoopError(
                    f"run.pipeline(make): make() returned a {type(made).__name__}, and a schedule is expected: `return "
                    "Schedule1F1B(PipelineStage(…), n_microbatches, loss_fn=…)`"
                )
            self._made = (number, made)
        return self._made[1]
