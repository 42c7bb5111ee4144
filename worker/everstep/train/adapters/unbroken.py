"""Runs Trainer's loop in a changing world: the loop is entered again in each round, with the objects that Trainer has.

    build   a world of one: Trainer makes its optimizer and wraps the model, and is interrupted
    enter   the members of the round come to one state
    pass    trainer.train(), which goes on at the step of that state; until its end, or until a peer is lost

Trainer's loop cannot be stopped in the middle, but it can begin at any step. So a lost peer ends the pass, and the next
one begins at the step on which the members agree. Model, optimizer and schedule stay in memory.

A step lasts from `on_step_begin` until Trainer logs, evaluates and saves. That work belongs to no step. If a peer is
lost in it, all members do it again, from the `TrainerState` and the callbacks' states at its beginning.

Invariant: a step is repeated from a whole state or not at all (`rollback`). A step that failed after its optimizer
moved does not count here, because on_step_end has not run.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from everstep.checkpoint import StateMismatch
from everstep.recovery.engine import Recovery
from everstep.recovery.group.members import Members
from everstep.recovery.group.script_location import ScriptPhase
from everstep.recovery.state.randomness import STATE
from everstep.recovery.state.switches import SWITCHES, Switches
from everstep.torch_private import transformers as private
from everstep.torch_private.patches import Replacements, around
from everstep.train.adapters import accelerated
from everstep.train.adapters.passes import Again, Passes
from everstep.train.between_steps import BetweenSteps
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.evaluation import Evaluations
from everstep.train.guards.common_samples import SAMPLES, CommonSamples
from everstep.train.nested_loops import NestedLoops
from everstep.train.once import Onces


class AtEnd(Exception):
    """Raised when no step is left."""


class _Built(Exception):
    """Raised when Trainer has made its objects."""


class _Agreement(BetweenSteps):
    """The members' agreement on how much of the work after the step all of them have done. They have the same state
    then."""

    def __init__(self, work: Any) -> None:
        super().__init__(Onces(), Evaluations(), lambda: 0, NestedLoops())
        self._work = work

    def agree(self, step: int, members: Members) -> None:
        self._work.back_to(min(done for (done,) in members.gather((self._work.done,))))


class Unbroken(Passes):
    """One training of `trainer`. `kept`: its `TrainerState` in the run's state. It also says how much of the work after
    the step is done. `samples`: those that the ranks compare."""

    def __init__(
        self, trainer: Any, recovery: Recovery, coordinator: StepCoordinator, kept: Any, samples: CommonSamples
    ) -> None:
        super().__init__(recovery, coordinator, trainer.args.device)
        self._samples = samples
        self._trainer = trainer
        self._kept = kept
        self._ready = False  # whether the world works, and the pass has come to a step
        self._max_steps = 0  # steps for which the schedule was made
        self._own_schedule = False
        self._seed = 0
        self._batch = 0

    def run(self, arguments: Mapping[str, Any]) -> Any:
        trainer, given = self._trainer, dict(arguments)
        eval_on_start, model_init = trainer.args.eval_on_start, trainer.model_init
        replaced = Replacements()
        try:
            self._build(given)
            trainer.model_init = None  # there is a model
            private.replace_preparation(replaced, around(self._prepare), trainer)
            private.replace_work(replaced, around(self._work), trainer)
            replaced.put("on_train_begin", around(self._train_begins), trainer.callback_handler)
            replaced.put("on_epoch_begin", around(self._epoch_begins), trainer.callback_handler)
            self._begin()
            return self._repeat(lambda: self._pass(given, eval_on_start=eval_on_start))
        finally:
            trainer.args.eval_on_start, trainer.model_init = eval_on_start, model_init
            replaced.end()

    # The trainer's events, in order.

    def step_begins(self, step: int) -> None:
        """Begin a step: the work after the step before is done, and its batches have arrived."""
        self._kept.complete()
        if self._ready:
            self._world.between()
            self._same_world()
        self._ready = True
        self._step_begins(step)

    def finish(self, save: bool) -> None:
        if not self._world.finish(save=save):
            raise Again
        self._random.begin(self._coordinator.step, self._recovery.members.rank)  # what follows draws the same numbers

    def _train_begins(self, begins: Callable[..., Any], *arguments: Any) -> Any:
        """Each pass begins with on_train_begin, where callbacks set their attributes to those of a first step. So the
        values before are restored after all of them were called."""
        self._trainer.control = begins(*arguments)
        self._redo()
        return self._trainer.control

    def _epoch_begins(self, begins: Callable[..., Any], *arguments: Any) -> Any:
        control = begins(*arguments)
        if not self._ready:  # the first epoch of this pass
            self._kept.epoch_begins()
        return control

    def _redo(self) -> None:
        """At the beginning of a pass, do the rest of the work after the step. Raises `AtEnd`."""
        trainer = self._trainer
        self._kept.begins()
        self._recovery.program.scope.enter(ScriptPhase.STEP)
        self._kept.put_back()
        trainer.current_flos = 0.0  # it is an int until the first step, and ranks must add up values of one type
        state, control = trainer.state, trainer.control
        if self._coordinator.step and self._kept.done == 0:
            private.do_work(trainer)
        ends = control.should_training_stop or 0 < state.max_steps <= state.global_step
        if self._coordinator.step and self._kept.done == 1 and (ends or self._kept.at_epoch_end()):
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, state, trainer.control)
            private.do_work(trainer)
        if ends or trainer.control.should_training_stop:
            raise AtEnd

    # The passes.

    def _build(self, given: dict[str, Any]) -> None:
        trainer = self._trainer
        self._seed = torch.initial_seed()

        def build(prepare: Callable[..., Any], max_steps: int, *rest: Any) -> NoReturn:
            prepare(max_steps, *rest)
            self._max_steps, self._own_schedule = max_steps, private.makes_schedule(trainer)
            raise _Built

        replaced = Replacements()
        private.replace_preparation(replaced, around(build), trainer)
        try:
            with accelerated.building(), contextlib.suppress(_Built):
                trainer.train(**given)
        finally:
            replaced.end()
        self._tidy()

    def _begin(self) -> None:
        trainer = self._trainer
        state: dict[str, Any] = {
            "model": trainer.model,
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            "trainer": self._kept,
            STATE: self._random,
            SAMPLES: self._samples,
        }
        if trainer.accelerator.scaler is not None:
            state["scaler"] = trainer.accelerator.scaler
        state[SWITCHES] = switches = Switches(state)
        switches.start()
        self._kept.seed = self._seed
        self._join(state, _Agreement(self._kept), accelerated.move)
        self._world.begin()

    def _pass(self, given: dict[str, Any], *, eval_on_start: bool) -> Any:
        trainer = self._trainer
        self._kept.look()
        trainer.args.eval_on_start = eval_on_start and self._coordinator.step == 0
        size = self._kept.global_batch_now()
        self._batch = self._batch or size
        if size != self._batch:
            raise StateMismatch(
                f"the run was trained with {self._batch} samples a step, and in the present world it has {size}: let "
                "the job have one size (--nnodes=N), so that a lost process is replaced before the others go on"
            )
        self._ready = False
        accelerated.forget_loaders()
        self._recovery.program.scope.enter(ScriptPhase.STEP)
        private.forget_evaluation_loaders(trainer)
        torch.manual_seed(self._kept.seed)  # Accelerate shuffles by it
        try:
            if self._coordinator.step == 0:
                return trainer.train(**given)
            with tempfile.TemporaryDirectory(prefix="everstep-trainer-") as folder:
                Path(folder, "trainer_state.json").write_text(json.dumps(self._kept.fields()))
                with private.loading_weights_by(lambda *_, **__: None, trainer):  # they are in the model
                    return trainer.train(resume_from_checkpoint=folder, **given)
        except AtEnd:
            return private.finalize(trainer)
        finally:
            self._tidy()

    def _tidy(self) -> None:
        """Remove what `train` sets up at its beginning."""
        trainer = self._trainer
        if trainer.neftune_noise_alpha is not None and getattr(trainer, "neftune_hook_handle", None) is not None:
            trainer.neftune_hook_handle.remove()

    def _same_world(self) -> None:
        self._recovery.program.scope.enter(ScriptPhase.STEP)
        if self._number != self._round:
            raise Again

    def _prepare(self, prepare: Callable[..., Any], max_steps: int, *rest: Any) -> Any:
        private.keep_schedule(self._trainer)
        if self._own_schedule and max_steps != self._max_steps:
            self._make_schedule(max_steps)
        return prepare(max_steps, *rest)

    def _make_schedule(self, max_steps: int) -> None:
        """Make the schedule for so many steps, in the same object, because that is tracked. Before the first round the
        number of steps is not known."""
        trainer, schedule = self._trainer, self._trainer.lr_scheduler
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        state = schedule.state_dict()
        rates = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        trainer.lr_scheduler = None
        made = trainer.create_scheduler(num_training_steps=max_steps, optimizer=optimizer)
        private.keep_schedule(trainer)
        if self._coordinator.step:
            made.load_state_dict(state)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group.update(rate)
        schedule.__dict__.clear()
        schedule.__dict__.update(made.__dict__)
        trainer.lr_scheduler, self._max_steps = schedule, max_steps

    def _work(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._in_step:
            self._step_ended()
        result = work(*arguments, **named)
        self._kept.did()
        return result

    def _step_ended(self) -> None:
        self._step_ends()
        state = self._trainer.state
        self._coordinator.count(state.global_step, total=state.max_steps, epoch=int(state.epoch or 0))
        self._kept.step_ended()
