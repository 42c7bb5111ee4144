"""The progress of Lightning's fit loop in a commit, and the epoch with which the loop goes on from it.

Where `max_steps` ends an epoch in its middle, Lightning counts that epoch as done. If a later run has a greater
`max_steps`, the epoch goes on instead. Invariant: its data are those of a run that was never ended.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from everstep.torch_private.lightning import not_restarting
from everstep.torch_private.patches import Replacements

_CUT = "everstep cut"


def begin_with_a_batch(loop: Any) -> None:
    """Let the next epoch of Lightning's fit loop, which goes on between two batches, begin with its batch. Where a
    validation is due between these two, Lightning would first make a turn without a batch, to end the validation, and
    count it as a step for its loggers. Ours has ended: the progress is kept when the next batch is there."""
    epoch_loop, replaced = loop.epoch_loop, Replacements()

    def starting(on_run_start: Callable[[Any], None]) -> Callable[[Any], None]:
        def started(data_fetcher: Any) -> None:
            replaced.end()
            on_run_start(data_fetcher)
            # Not by the property, which would change the loops in them too. While the outer one restarts, Lightning
            # leaves out the epoch's step of ReduceLROnPlateau.
            not_restarting(epoch_loop, loop)

        return started

    replaced.put("on_run_start", starting, epoch_loop)


def mark_cut(trainer: Any, loops: dict[str, Any]) -> None:
    """Note in the fit loop's state that `max_steps` has ended an epoch in its middle. Lightning counts it as done."""
    limit, batches = trainer.max_steps, trainer.fit_loop.epoch_loop.batch_progress
    epoch = loops["epoch_progress"]["current"]
    loops[_CUT] = (
        0 < limit <= trainer.global_step
        and epoch["started"] == epoch["processed"]
        and not batches.is_last_batch
        and 0 < batches.current.completed < trainer.num_training_batches
    )


def reopen(trainer: Any, loops: dict[str, Any]) -> bool:
    """If `max_steps` has ended the newest epoch of this state in its middle, and is greater now, make it an epoch that
    is not done. Returns whether it did."""
    done = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    done = max(done, loops["epoch_loop.manual_optimization.optim_step_progress"]["total"]["completed"])
    if not loops.get(_CUT) or -1 < trainer.max_steps <= done:
        return False
    loops[_CUT] = False
    for part in loops["epoch_progress"].values():
        part["processed"] -= 1
        part["completed"] -= 1
    return True


def begin_an_epoch(loop: Any) -> None:
    """Let Lightning's fit loop, whose loaded progress is between two epochs, begin the next one with its first batch.
    With `max_steps` Lightning would go on in the ended one, and train on a batch of it."""
    loop.epoch_loop.restarting = False
    not_restarting(loop)


class LoopProgress:
    """The fit loop's counters between two batches."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loop = trainer.fit_loop
        self.cut = False  # the commit was made by a smaller max_steps, before its next batch was read
        self.batches: int | None = None  # batches trained on, of the epoch that had begun at the save

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loop.state_dict()
        state["state_dict"] = {}  # a loader's own position counts the present batch
        batches = state["epoch_loop.batch_progress"]
        for part in ("total", "current"):
            # The present batch is not trained on yet: it comes again.
            batches[part] = dict.fromkeys(batches[part], batches[part]["completed"])
        batches["is_last_batch"] = False
        mark_cut(self._trainer, state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self.cut = reopen(self._trainer, state)
        epoch = state["epoch_progress"]["current"]
        if epoch["started"] > epoch["processed"]:
            self.batches = state["epoch_loop.batch_progress"]["current"]["completed"]
        self._loop.load_state_dict(state)
