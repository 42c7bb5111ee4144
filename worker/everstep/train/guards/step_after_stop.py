"""The step behind the last commit of a run that was asked to stop: begun to be compared later, and never made.

A run that is suspended commits its state and leaves, so no step follows that commit, of which a restart could be told
apart (`restart_check`). So all ranks begin one more, with its collectives, and leave it before an optimizer moves
anything. Only where nothing stands behind the step's block that would notice, and where there is time.

Invariant: whatever happens in it, the process leaves as it would have without it.
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
    """The gradients are there. The step's block is left as if a peer were lost."""


class StepAfterStop:
    """What such a step asks in place of its world (`step.StepScope`)."""

    def __init__(self, state: Mapping[str, Any], world: Any) -> None:
        self._world = world
        self.seen = False  # its gradients are there
        optimizers = [target for target in state.values() if isinstance(target, torch.optim.Optimizer)]
        self._hooks = [before_step(optimizer, self._leave) for optimizer in optimizers]

    def _leave(self, optimizer: Any, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if not has_closure(given, options):  # which has yet to compute the gradients
            raise Seen("the step is not made: the run was asked to stop")

    def step_over(self) -> None:
        """The block has ended, however it did."""
        for hook in self._hooks:
            hook.remove()
        self._world.step_over()

    def step_ended(self) -> bool:
        """It is not made."""
        self.seen = True
        return False

    def step_lost(self, error: BaseException) -> bool:
        """The script goes on behind it, to where it is told to stop."""
        self.seen = isinstance(error, Seen)
        if not self.seen:
            log.info("the step behind the last commit ended with %r", error)
        return isinstance(error, Exception | SystemExit)

    def asked(self) -> None:
        """The script wants to know whether the step counts."""
