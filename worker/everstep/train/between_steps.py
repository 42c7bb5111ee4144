"""Runs the functions that a script has registered between two steps: those of `run.once`, then of `run.evaluate`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from everstep.checkpoint.ranks import Ranks
from everstep.recovery.errors import LoopError
from everstep.recovery.forming.same_calls import Gather, gather_texts
from everstep.recovery.group.members import Members
from everstep.recovery.state.randomness import STATE, Randomness
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.evaluation import Before, Evaluations, figures, unchanged
from everstep.train.nested_loops import NestedLoops
from everstep.train.once import Onces

# Added to the step for the random numbers of its evaluations: half of the numbers that the seeds tell apart.
EVALUATION = 2**31
Attempt = Callable[[Callable[[Callable[[], None]], None]], bool]  # `World.attempt`


class BetweenSteps:
    """The functions of one run; `goal` gives its number of steps."""

    def __init__(self, onces: Onces, evaluations: Evaluations, goal: Callable[[], int], nesting: NestedLoops) -> None:
        self.nesting = nesting
        self._onces, self._evaluations, self._goal = onces, evaluations, goal
        self.asks: list[str] = []  # the script's calls on the run so far, as text
        self._before: Before | None = None  # the newest evaluations, while they may have to be called again
        self.torn: str | None = None  # what the newest evaluations have changed and cannot be restored

    def run(
        self,
        coordinator: StepCoordinator,
        state: Mapping[str, Any],
        ranks: Callable[[], Ranks],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the functions that are due after `coordinator.step` steps. `check` raises if a peer was lost, in case the
        script has suppressed that error. Collective."""
        if not self._onces.done:
            self._onces.run(ranks())
            check()
        step, evaluations = coordinator.step, self._evaluations
        evaluations.come(step)
        if self._before is not None and self._before.step != step:
            self._before = None
        if not (due := evaluations.due(step, self._goal())):
            return
        self.call(due, coordinator, state, check)
        evaluations.over(step)

    def call(
        self,
        functions: Iterable[Callable[[], Any]],
        coordinator: StepCoordinator,
        state: Mapping[str, Any],
        check: Callable[[], None],
    ) -> None:
        """Evaluate after `coordinator.step` steps. If a peer is lost, changes are undone. Collective."""
        step = coordinator.step
        before = Before(state, step)
        self.torn = None
        try:
            for function in functions:
                with coordinator.evaluating():
                    with unchanged(state, lambda: _seed(state, step)):
                        result = function()
                    before.check()
                    coordinator.log(figures(result))
            check()
        except BaseException:
            self.torn = before.put_back()
            raise
        self._before = before

    def call_now(
        self,
        call: Callable[[], Any],
        words: str,
        coordinator: StepCoordinator,
        state: Mapping[str, Any],
        attempt: Attempt | None,
        lost: Callable[[], None],
    ) -> None:
        """Evaluate now, in a loop over epochs, by `World.attempt`. If a peer is lost in it, call `lost` and evaluate
        again. `words`: the script's call, with its line. Raises `LoopError` in another place, or without a world."""
        nesting = self.nesting
        if attempt is None or not nesting.nested or nesting.in_steps:
            raise LoopError(
                "evaluate(fn) is called in the loop over epochs, `for epoch in run.epochs(loader, 10):`, before or "
                "behind the steps of the epoch, where a process that comes later can join it. Elsewhere say before the "
                "loop `run.evaluate(fn, every=500)`"
            )
        if nesting.evaluates():
            if not self.all_are_at(words, coordinator, attempt):
                lost()
            while not attempt(lambda check: self.call([call], coordinator, state, check)):
                lost()
            nesting.evaluated()

    def all_are_at(self, words: str, coordinator: StepCoordinator, attempt: Attempt) -> bool:
        """Check that all ranks are at the same location in the loop over epochs. `words`: what the script calls there.
        False if a peer was lost meanwhile: some members may have compared already, so it is not repeated there."""
        location = self.nesting.arrives_at
        if location is None:
            return True

        def compare(check: Callable[[], None]) -> None:
            check_location(location, words, coordinator.gather)
            check()

        return attempt(compare)

    def round_formed(self, step: int, members: Members) -> None:
        """A round has formed, and its members do not have one state yet. If some members have completed evaluations
        that others have not, all call them again from the same state. Collective."""
        if not len(self._evaluations):
            return
        mine = self._evaluations.standing(step)
        standings = members.gather((step, mine))
        if self._before is not None and self._evaluations.reopens(step, mine, standings):
            self._before.put_back()
            self._before = None

    def agree(self, step: int, members: Members) -> None:
        """The members have one state now. Collective."""
        if len(self._evaluations):
            standings = members.gather((self._evaluations.standing(step),))
            self._evaluations.agree(step, [standing for (standing,) in standings])
        self.nesting.agree(members)


def check_location(location: str, call: str, gather: Gather) -> None:
    """Check that all ranks are at the same location of the loop over epochs. A rank that evaluates while the others
    begin to train would wait for them in a collective of its own, and they for it: the hang watch finds that only after
    a minute, and cannot name the line that is wrong. `location`: where this rank is in the loop, as a text. `call`: the
    script's call, with its line. Raises `LoopError` on all ranks if their locations differ. Collective."""
    hashes = gather((zlib.crc32(location.encode()),))
    odd = next((rank for rank, (left, right) in enumerate(pairwise(hashes), 1) if left != right), None)
    if odd is None:
        return
    calls = gather_texts(call, gather)
    raise LoopError(
        f"rank {odd - 1} is at {calls[odd - 1]}, and rank {odd} at {calls[odd]}: each would wait for the other. All "
        "ranks make the same calls of run.evaluate(fn), run.train(fn) and run.steps() in each epoch: take away the "
        "condition that only some ranks meet, or let fn itself ask for run.rank"
    )


def _seed(state: Mapping[str, Any], step: int) -> None:
    """Seed the generators, so that an evaluation draws the same numbers as in a process that came later."""
    randomness = state.get(STATE)
    if isinstance(randomness, Randomness) and randomness.each_step:
        randomness.begin(EVALUATION + step, dist.get_rank() if dist.is_initialized() else 0)
