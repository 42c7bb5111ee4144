"""Schedules of `torch.distributed.pipelining` that follow the world: each round makes them anew.

A schedule and its stages exchange data with their peers in their first step and remember it. A process that comes later
would ask peers that no longer answer. So all members of a round make their schedules anew, and all ask in that round's
first step.

Invariant: a schedule that runs was made in the present round, of stages with given shapes. Stages that infer their
shapes would run their layers once more, which uses random numbers and buffers of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.recovery.errors import LoopError
from everstep.recovery.group.torch_functions import making_schedule


class PipelineSchedule:
    """The result of `run.pipeline`: its `step` and `eval` are those of the schedule that `make` made for this round."""

    def __init__(self, make: Callable[[], Any], round_number: Callable[[], int | None]) -> None:
        self._make, self._round_number = make, round_number
        self._made: tuple[int | None, Any] | None = None

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The schedule's `step`: all micro-batches of this rank's stages, forward and backward. Call it in a step."""
        return self.schedule.step(*args, **kwargs)

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """The schedule's `eval`: all micro-batches forward. Call it in a step, or in a function of `run.evaluate`."""
        return self.schedule.eval(*args, **kwargs)

    @property
    def schedule(self) -> Any:
        """torch's schedule, of the present round."""
        number = self._round_number()
        if self._made is None or self._made[0] != number:
            with making_schedule() as stages:
                made = self._make()
            if not hasattr(made, "step"):
                raise LoopError(
                    f"run.pipeline(make): make() returned a {type(made).__name__}, and a schedule is expected: `return "
                    "Schedule1F1B(PipelineStage(…), n_microbatches, loss_fn=…)`"
                )
            if number is not None and not stages:
                raise LoopError(
                    "run.pipeline(make): make() made no stage, and is called once in each round. A stage that was kept "
                    "from an earlier round has other peers, and those that are new would wait for it for ever. Make "
                    "all stages in make(), each time: `return Schedule1F1B(PipelineStage(module, …), …)`. The modules "
                    "are made once, outside of it"
                )
            self._made = (number, made)
        return self._made[1]
