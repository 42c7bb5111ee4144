"""The step after the last commit of a run that was asked to stop. It is begun, to be compared after a restart, but
never made.

A suspended run commits its state and leaves. So no step follows that commit, with which a restart could be compared
(`restart_check`). Therefore all ranks begin one more step, with its collectives, and leave it before an optimizer moves
anything. They do so only if no code after the step's block would notice, and if there is time. Invariant: whatever
happens in it, the process leaves as it would have without it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from everstep.recovery.group.in_flight import PeerLost
from everstep.recovery.state.optimizers import before_step, has_closure

log = logging.getLogger("everstep.train")


class Seen(PeerLost):
    """Raised when the gradients are computed, to leave the step's block as if a peer were lost."""


class StepAfterStop:
    """Takes the place of the world for such a step (`step.StepScope`)."""

    def __init__(self, state: Mapping[str, Any], world: Any) -> None:
        self._world = world
        self.seen = False  # whether its gradients are computed
        optimizers = [target for target in state.values() if isinstance(target, torch.optim.Optimizer)]
        self._hooks = [before_step(optimizer, self._leave) for optimizer in optimizers]

    def _leave(self, optimizer: Any, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if not has_closure(given, options):  # the step has yet to compute the gradients
            raise Seen("the step is not made: the run was asked to stop")

    def step_over(self) -> None:
        """End the block, in whatever way it ended."""
        for hook in self._hooks:
            hook.remove()
        self._world.step_over()

    def step_ended(self) -> bool:
        """The step is not made."""
        self.seen = True
        return False

    def step_lost(self, error: BaseException) -> bool:
        """Let the script go on after the block, until it is told to stop."""
        self.seen = isinstance(error, Seen)
        if not self.seen:
            log.info("the step behind the last commit ended with %r", error)
        return isinstance(error, Exception | SystemExit)

    def completion_read(self) -> None:
        """Answer the script's question whether the step counts."""
