"""In a training process of `everstep rehearse`: records the commits of a function of `hvd.elastic.run`.

The library calls `install` by its name. A step is one call of the script's first optimizer, and each commit says how
many of them it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.recovery.announcements import AnnouncedRound
from everstep.rehearse.own_loop import OwnLoop
from everstep.rehearse.watch import replace_all
from everstep_horovod.state import TorchState
from everstep_horovod.training import Training
from everstep_horovod.world import current


class _Over(BaseException):
    """Ends the function: no `except Exception` of the script's catches it."""


class _Value:
    """One plain value of a state, whatever the script sets it to."""

    def __init__(self, state: TorchState, name: str) -> None:
        self._state, self._name = state, name

    def state_dict(self) -> dict[str, Any]:
        return {"value": getattr(self._state, self._name)}


def install(loop: OwnLoop) -> None:
    """Wrap what a function of `hvd.elastic.run` does with its state, in this process."""
    run, take, synchronize = Training.run, Training._take, Training._synchronize

    def ran(training: Training, call: Callable[[], Any]) -> Any:
        def until_over() -> Any:
            try:
                return call()
            except _Over:
                return None

        loop.by_commits(lambda: current().rank, _Over())
        if (schedule := training._coordinator.schedule) is not None:
            replace_all((schedule.checkpointer._policy, "by_steps", lambda _: loop.is_due))
        return run(training, until_over)

    def taken(training: Training) -> None:
        loop.commits(training._commits + 1)
        take(training)
        loop.committed()

    def synchronized(training: Training, round_: AnnouncedRound | None) -> str:
        how = synchronize(training, round_)
        loop.went_back(training._commits, _named(training._target))
        return how

    replace_all((Training, "run", ran), (Training, "_take", taken), (Training, "_synchronize", synchronized))


def _named(state: TorchState) -> dict[str, Any]:
    return {**state._objects, **{f"state.{name}": _Value(state, name) for name in state._values}}
