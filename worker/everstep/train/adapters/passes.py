"""What the loops of Trainer and of Lightning have in common in a changing world: a pass begins at a step, and ends with
the training or the loss of a peer.

Invariant: a loss in a step costs that step alone; one behind a step costs no step.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from everstep.contract import refusal
from everstep.recovery.ddp.reducers import BUCKETS, Reducers
from everstep.recovery.engine import Recovery
from everstep.recovery.group.script_location import ScriptPhase
from everstep.recovery.state.randomness import Randomness
from everstep.recovery.validity import Validity
from everstep.train.between_steps import BetweenSteps
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.evaluation import Evaluations
from everstep.train.feeding.resharding import Resharding
from everstep.train.guards.untracked.untracked_state import UntrackedStateCheck
from everstep.train.nested_loops import NestedLoops
from everstep.train.once import Onces
from everstep.train.recovering_world import RecoveringWorld
from everstep.train.step import Phase


class Again(Exception):
    """Raised when the world has changed, to begin the next pass."""


class Uncounted(UntrackedStateCheck):
    """Finds nothing: all that training changes belongs to the framework, and is tracked; `script_state` looks at the
    script's own objects. It says when a step is made, which others ask."""

    takes_names = False

    def __init__(self) -> None:
        super().__init__({})

    def start(self) -> None: ...

    def begins(self) -> None:
        self.in_step = True

    def over(self) -> None:
        self.in_step = False

    def moved(self) -> None: ...
    def completed(self, world_size: int, same: Callable[[int], bool]) -> None: ...


def nothing_between() -> BetweenSteps:
    """The framework runs what is due between two steps."""
    return BetweenSteps(Onces(), Evaluations(), lambda: 0, NestedLoops())


class PassWorld(RecoveringWorld):
    """Calls `set_world` with this process's rank and the size of each world."""

    set_world: Callable[[int, int], None]

    def _moved(self) -> None:
        members = self._recovery.members
        self.set_world(members.rank, members.world_size)
        super()._moved()

    def torn(self) -> None:
        self._enter(Validity.TORN)


class Passes:
    """The passes of one training. `device`: of its random numbers."""

    def __init__(self, recovery: Recovery, coordinator: StepCoordinator, device: Any) -> None:
        self._recovery = recovery
        self._coordinator = coordinator
        self._random = Randomness(True, device)
        self._world: PassWorld
        self._round = -1  # of this pass
        self._in_step = False
        self._behind = False  # the step is complete, but work after it is not, which may have changed any state

    def _join(self, state: dict[str, Any], between: BetweenSteps, set_world: Callable[[int, int], None]) -> None:
        """All objects of `state` are made."""
        state[BUCKETS] = reducers = Reducers(state)
        self._random.start()
        self._coordinator.join()
        self._world = PassWorld(
            self._recovery, self._coordinator, state, reducers, None, Resharding(None), between, Uncounted()
        )
        self._world.set_world = set_world

    @property
    def _number(self) -> int:
        round_ = self._recovery.round.announced
        return -1 if round_ is None else round_.number

    def _repeat(self, attempt: Callable[[], Any]) -> Any:
        """Call `attempt`, a pass, until it returns. It raises `Again` where the world has changed."""
        while True:
            self._round = self._number
            self._in_step = False
            try:
                return attempt()
            except Again:
                continue
            except BaseException as e:
                if not self._lost(e):
                    raise
                traceback.clear_frames(e.__traceback__)

    def _step_begins(self, step: int) -> None:
        self._world.step_begins()
        self._random.begin(step, self._recovery.members.rank)
        self._in_step = True

    def _step_ends(self) -> None:
        self._world.step_over()
        if not self._world.step_ended():
            self._recovery.check()  # raises
        refusal.count_step()
        self._in_step = False
        self._recovery.program.scope.enter(ScriptPhase.STEP)

    def _lost(self, error: BaseException) -> bool:
        """Whether the error means that a peer was lost. Then the world has changed."""
        if self._in_step:
            self._in_step = False
            self._world.step_over()
            if not self._world.step_lost(error):
                return False
            self._world.go_on(Phase.LOST)
        elif not self._world.lost(error):
            return False
        elif self._behind:
            self._world.torn()
        else:
            self._world.go_on(Phase.DONE)
        return True
