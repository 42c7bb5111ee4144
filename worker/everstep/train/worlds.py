"""The world in which a session's loop runs: the interface, and the kind of world that does not change.

There, a lost peer ends the process, and its launcher starts a new one. `recovering_world` has the other kind.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from everstep.checkpoint.ranks import Alone, Ranks, join
from everstep.recovery.ddp import checks, uneven_inputs
from everstep.recovery.ddp.reducers import BUCKETS, Reducers
from everstep.recovery.forming import same_calls
from everstep.recovery.state.gradients import Gradients
from everstep.recovery.state.optimizers import before_step, has_closure
from everstep.recovery.state.randomness import STATE, agree_on_seeds
from everstep.recovery.state.scalers import Scales
from everstep.recovery.state.shape import Shape
from everstep.recovery.state.switches import SWITCHES
from everstep.recovery.transfer import replicated
from everstep.torch_private import groups
from everstep.torch_private.patches import Replacements, around
from everstep.train import early_exit, once
from everstep.train.between_steps import BetweenSteps
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.feeding.feed import Feed
from everstep.train.guards.common_samples import SAMPLES
from everstep.train.guards.comparison.restart_check import RestartCheck
from everstep.train.guards.gradient_reduction import GradientReduction
from everstep.train.guards.replicas import Replicas
from everstep.train.guards.untracked.covered import OWN_NAMES
from everstep.train.guards.untracked.hooks import Hooks
from everstep.train.guards.untracked.untracked_state import UntrackedStateCheck
from everstep.train.step import Phase, StepScope

_MESSAGES = (
    "send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list", "monitored_barrier",
)  # fmt: skip

# The names under which the session tracks objects of its own.
RESERVED = (*OWN_NAMES, BUCKETS, STATE, SWITCHES, SAMPLES, once.KEY)


class World(StepScope, Protocol):
    """The interface by which the loop uses its world."""

    def begin(self) -> None:
        """Provide the state from which training goes on."""

    def ready(self) -> bool:
        """Do the work that is due between two steps. Called before each step and after the last one. False if a peer
        was lost in it."""

    def attempt(self, work: Callable[[Callable[[], None]], None]) -> bool:
        """Run a function between two steps. Its argument raises if a peer was lost and the script has suppressed that
        error. False if a peer was lost in it."""

    def step_begins(self) -> int | None:
        """A step begins. Returns the rank whose samples and random numbers it uses, if it is a shadow step."""

    def go_on(self, phase: Phase) -> None:
        """A peer was lost, in a step (LOST) or between two steps (DONE)."""

    def between(self) -> None:
        """Save, stop or change the world as due. Called after each step but the last."""

    def all_leave(self) -> None:
        """The script has left its loop. Raises `LoopError` unless all ranks have, after this step."""

    def finish(self) -> bool:
        """End the training after the last step. False if there are steps left after all."""


class Checked:
    """What both kinds of world compare between two steps."""

    _replicas: Replicas
    _scales: Scales
    _hooks: Hooks | None

    def __init__(
        self, coordinator: StepCoordinator, state: Mapping[str, Any], reducers: Reducers, feed: Feed | None,
        between: BetweenSteps, untracked_check: UntrackedStateCheck, check: RestartCheck | None,
    ) -> None:  # fmt: skip
        self._coordinator, self._state, self._reducers, self._feed = coordinator, state, reducers, feed
        self._between_steps, self._untracked_check, self._check = between, untracked_check, check

    def _profile_step(self, rank: int) -> None:
        """A step begins, which somebody may have asked a profile of."""
        if (live := self._coordinator.live_profile).request_id is not None:
            live.step_begins(self._coordinator.step, rank)
            if self._feed is not None:
                self._feed.fetched_by = live.batch if live.goes_on else None

    def _all_left_out(self) -> None:
        self._scales.check(self._coordinator.step, self._coordinator.gather)
        if (gradients := self._present_gradients()) is not None and gradients.take_left_out():
            self._check_all(early_exit.all_left_out)

    def all_leave(self) -> None:
        self._check_all(early_exit.all_leave)

    def _compare_ranks(self, size: int, *, last: bool) -> None:
        """A step is complete on all `size` ranks. Collective. Raises `LoopError`."""
        self._all_left_out()
        self._reducers.learn()
        coordinator = self._coordinator
        if (samples := self._state.get(SAMPLES)) is not None:
            samples.completed(coordinator.gather)
        self._replicas.completed(size, coordinator.same, coordinator.gather, last=last)
        if self._hooks is not None:
            self._hooks.check()
        if self._feed is not None:
            self._feed.completed(size, coordinator.same, coordinator.gather)
        self._untracked_check.completed(size, coordinator.same)

    def _compare_before_save(self, size: Callable[[], int]) -> None:
        """Let the ranks of this world, of which there are `size`, compare before each save."""
        coordinator = self._coordinator
        coordinator.compare_by(lambda: self._replicas.before_save(size(), coordinator.same, coordinator.gather))

    def _weighted(self) -> None:
        """A step has ended well on this rank: see that its losses were weighted."""
        if self._feed is not None and (gradients := self._present_gradients()) is not None and gradients.entered:
            self._feed.check_weights(self._coordinator.step)
        self._scales.ended()

    def _present_gradients(self) -> Gradients | None:
        raise NotImplementedError

    def _check_all(self, check: Callable[..., None]) -> None:
        raise NotImplementedError


class FixedWorld(Checked):
    """The world of a process group that was made once."""

    def __init__(
        self, coordinator: StepCoordinator, state: Mapping[str, Any], reducers: Reducers, feed: Feed | None,
        world_size: int, between: BetweenSteps, untracked_check: UntrackedStateCheck, shape: Shape,
        asks: Sequence[str], check: RestartCheck | None = None,
    ) -> None:  # fmt: skip
        super().__init__(coordinator, state, reducers, feed, between, untracked_check, check)
        self._shape, self._asks, self._size = shape, asks, world_size
        self._began, self._slowest = 0.0, 0.0  # seconds

    def begin(self) -> None:
        self._coordinator.listen()
        self._rank = dist.get_rank() if self._size > 1 else 0
        if self._size > 1:
            same_calls.check_gathered("\n".join(self._asks), self._coordinator.gather)
        self._hooks = None
        if kept := self._coordinator.saves:
            self._untracked_check.start()
            self._hooks = Hooks(self._state, self._untracked_check.is_untracked)
            checks.check_hooks(self._reducers.alive(), self._untracked_check.is_untracked, self._state.values())
        model_size = self._shape.model_size
        checks.check_replicas(self._reducers.alive(), model_size, lambda group: _is_across(group, model_size))
        alive, is_free = self._reducers.alive(), self._untracked_check.is_untracked
        self._replicas = Replicas(self._state, alive, is_free, kept=kept, shape=self._shape)
        self._compare_before_save(lambda: self._size)
        self._scales = Scales(self._state, model_size if self._size > 1 else 1)
        if self._size > 1:
            GradientReduction(self._state, self._reducers, self._untracked_check, lasts=True)
        self._reducers.learn()  # from a backward pass that the script made before
        self._coordinator.restore(self._state)
        self._between_steps.nesting.restored()
        self._reducers.resume()
        agree_on_seeds(self._state, self._coordinator.gather)
        if self._feed is not None:
            self._feed.agree(None if self._coordinator.restored else self._coordinator.first, self._coordinator.same)
        self._gradients = Gradients(self._state)
        ranks = functools.cache(self._ranks)  # a group is made for them where the default one has no CPU tensors
        uneven_inputs.gives(lambda source: take_from(self._state, source, ranks(), self._gradients))
        for target in self._state.values() if self._check is not None else ():
            if isinstance(target, torch.optim.Optimizer):
                before_step(target, self._before_update)
        self._taken = 0
        self._messages = Messages(self._numbered)

    def _before_update(self, optimizer: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        assert self._check is not None
        self._check.update(optimizer, has_closure(arguments, options))

    def ready(self) -> bool:
        self._all_left_out()
        return self.attempt(lambda check: self._between_steps.run(self._coordinator, self._state, self._ranks, check))

    def attempt(self, work: Callable[[Callable[[], None]], None]) -> bool:
        work(lambda: None)
        return True

    def _present_gradients(self) -> Gradients:
        return self._gradients

    def _ranks(self) -> Ranks:
        return join(None, None, None) if self._size > 1 else Alone()

    def step_begins(self) -> None:
        """A step of this process itself begins: this kind of world has no shadow steps."""
        self._began = time.monotonic()
        self._profile_step(self._rank)
        uneven_inputs.step_begins()
        self._untracked_check.begins()
        self._replicas.begins()
        self._taken += 1
        self._gradients.begin(watched=not self._taken & (self._taken - 1))
        if self._check is not None:
            self._check.begin(self._rank, self._size)

    def step_over(self) -> None:
        self._untracked_check.over()
        if self._check is not None:
            self._check.over()
        self._slowest = max(self._slowest, time.monotonic() - self._began)

    def step_ended(self) -> bool:
        self._gradients.ended(self._coordinator.step)
        self._weighted()
        return True

    def step_lost(self, error: BaseException) -> bool:
        return False

    def completion_read(self) -> None: ...

    def go_on(self, phase: Phase) -> None:
        raise AssertionError("this world is never lost")

    def between(self) -> None:
        self._completed()
        self._coordinator.agree(updates=self._gradients.updates, calls=self._begun())

    def _begun(self) -> int:
        """How many collectives the program has begun; 0 if the backend does not count them."""
        return self._numbered() - self._messages.count

    def _numbered(self) -> int:
        group: Any = dist.group.WORLD if self._size > 1 and self._shape.model_size == 1 else None
        with contextlib.suppress(RuntimeError):
            return groups.collectives_begun(group) if group is not None else 0
        return 0

    def _check_all(self, check: Callable[..., None]) -> None:
        if self._size > 1:
            store = groups.default_store()
            check(store, self._rank, self._size, self._coordinator.step, self._slowest)

    def _completed(self, *, last: bool = False) -> None:
        self._compare_ranks(self._size, last=last)
        if self._check is not None:
            self._check.completed()

    def finish(self) -> bool:
        self._completed(last=True)
        self._messages.end()
        self._coordinator.finish(self._coordinator.step)
        return True


class Messages:
    """Counts the point-to-point messages that the script sends and receives, until `end`, because gloo numbers them
    together with collectives: all ranks have begun the same number of these, but each its own number of messages.
    `monitored_barrier` is made of messages too. Invariant: each message counted here is in gloo's number, and none is
    part of a collective. `number`: gloo's number of the default group."""

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number
        self._inside = False
        self.count = 0
        self._replaced = Replacements()
        for name in _MESSAGES:
            self._replaced.put(name, around(self._counting), distributed_c10d, dist)

    def end(self) -> None:
        self._replaced.end()

    def _counting(self, function: Any, *arguments: Any, **named: Any) -> Any:
        if self._inside:
            return function(*arguments, **named)
        before, self._inside = self._number(), True
        try:
            return function(*arguments, **named)
        finally:
            self._inside = False
            self.count += self._number() - before


def take_from(state: Mapping[str, Any], source: int, ranks: Any, gradients: Gradients) -> None:
    """Bring all ranks to the script's state of one of them, in a step: see `uneven_inputs`. Collective."""
    own = {name: value for name, value in state.items() if name not in RESERVED}
    replicated.take_from(own, source, ranks, gradients)


def _is_across(group: Any, model_size: int) -> bool:
    """Whether the group has the ranks with one number in all replicas."""
    ranks = dist.get_process_group_ranks(group)
    return sorted(ranks) == list(range(min(ranks) % model_size, dist.get_world_size(), model_size))
