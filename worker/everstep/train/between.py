"""What a script has asked for between two steps: functions of `run.once`, then those of `run.evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from everstep.checkpoint.ranks import Ranks
from everstep.train.boundary import Boundary
from everstep.train.evaluation import Evaluations, figures, unchanged
from everstep.train.once import Onces
from everstep.train.recovery.members import Members


class Between:
    """Of one run; `goal` tells of how many steps."""

    def __init__(self, onces: Onces, evaluations: Evaluations, goal: Callable[[], int]) -> None:
        self._onces, self._evaluations, self._goal = onces, evaluations, goal

    def run(self, boundary: Boundary, state: Mapping[str, Any], ranks: Callable[[], Ranks]) -> bool:
        """Do what is due after `boundary.step` steps; whether anything was. Collective."""
        if some := not self._onces.done:
            self._onces.run(ranks())
        step, evaluations = boundary.step, self._evaluations
        evaluations.come(step)
        if not (due := evaluations.due(step, self._goal())):
            return some
        for call in due:
            with unchanged(state):
                found = call()
            boundary.log(figures(found))
        evaluations.over(step)
        return True

    def agree(self, step: int, members: Members) -> None:
        """A round has formed. Collective."""
        if len(self._evaluations):
            told = members.gather((self._evaluations.standing(step),))
            self._evaluations.agree(step, [one for (one,) in told])
