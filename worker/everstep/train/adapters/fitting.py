"""Runs Lightning's fit loop in a changing world: the loop begins again in each round, with the trainer's objects.

    setup   a world of one: Lightning wraps the module and makes its optimizers
    enter   the members of the round come to one state
    pass    trainer.fit_loop.run(), from the progress of that state; until its end, or until a peer is lost

A step lasts from the start of its first batch to the end of its last, when the optimizer has stepped. Validation and
the hooks at an epoch's end belong to no step, and it is unknown what state they have changed. So a member that loses a
peer in them is torn: it takes the state of a member that is not, or of the last commit.

Invariant: the tracked progress is that of the newest boundary between steps, before a batch is trained on.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from everstep.checkpoint import StateMismatch
from everstep.recovery.announcements import Announcements
from everstep.recovery.engine import Recovery
from everstep.recovery.errors import LoopError
from everstep.recovery.group.script_location import ScriptPhase
from everstep.recovery.state.randomness import STATE
from everstep.torch_private import lightning
from everstep.torch_private.patches import Replacements, replace
from everstep.train.adapters.epochs import begin_an_epoch, begin_with_a_batch, reopen
from everstep.train.adapters.passes import Again, Passes, nothing_between
from everstep.train.adapters.script_state import ScriptAttributes
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.process_place import most_processes

INSTEAD = "or say EverstepCallback(in_process=False): then all processes end with a lost peer, and go on from a commit"


def recovery() -> Recovery | None:
    """The object that keeps this process in the newest round; None if the world does not change here. Call it once,
    before `Trainer.fit`."""
    if dist.is_initialized() or (rounds := Announcements.find()) is None or (most := most_processes()) == 1:
        return None
    engine = Recovery(rounds)
    engine.start(most)
    os.environ["WORLD_SIZE"] = str(most)  # Lightning compares it with its devices
    engine.program.scope.enter(ScriptPhase.STEP)  # while it sets up, Lightning waits for others, which come later

    def alone(*_: object) -> None:
        if engine.round is None:
            raise LoopError(
                "optimizer.step(): this process has not joined the others, so each rank would train a model of its "
                "own: pass the EverstepCallback to the Trainer, callbacks=[…]"
            )

    register_optimizer_step_pre_hook(alone)
    _means_as_sums()
    return engine


def _means_as_sums() -> None:
    """Make Lightning divide sums itself for our group's tensors of the CPU. Gloo has no means of integers, so Lightning
    does that for gloo, but it does not know that our group uses gloo for them."""

    def means(sync: Callable[..., Any]) -> Callable[..., Any]:
        def synced(result: Any, group: Any = None, reduce_op: Any = None) -> Any:
            if not isinstance(reduce_op, str) or reduce_op.lower() not in ("mean", "avg"):
                return sync(result, group, reduce_op)
            sync(result, group, "sum")
            return result.copy_(result / dist.get_world_size(group))

        return synced

    lightning.replace_sync(means)


def attributes_of(trainer: Any) -> ScriptAttributes:
    """Of callbacks without a `state_dict` of their own, of the data module, and of the module with its parts."""
    callbacks = (c for c in trainer.callbacks if type(c).state_dict is Callback.state_dict)
    return ScriptAttributes([*callbacks, trainer.datamodule, *trainer.lightning_module.modules()])


def total_steps(trainer: Any) -> int | None:
    """The optimizer steps of a whole `fit` that has begun; None where Lightning does not know them. It is computed here
    because `trainer.estimated_stepping_batches` may load the data anew."""
    limits = [trainer.max_steps] if trainer.max_steps > 0 else []
    batches, epochs = trainer.num_training_batches, trainer.max_epochs or 0
    counted = trainer.lightning_module.automatic_optimization and not any(
        isinstance(c, GradientAccumulationScheduler) and len(c.scheduling) > 1 for c in trainer.callbacks
    )
    if counted and epochs > 0 and math.isfinite(batches):
        limits.append(epochs * math.ceil(batches / trainer.accumulate_grad_batches))
    return min(limits, default=None)


class Progress:
    """The loops' progress at the newest boundary between steps. `read` gives the present progress. `trainer.fit_loop`
    takes the kept one when a pass begins."""

    everstep_settles = True

    def __init__(self, trainer: Any, read: Callable[[], dict[str, Any]]) -> None:
        self._trainer = trainer
        self._read = read
        self.first = copy.deepcopy(trainer.fit_loop.state_dict())
        self.kept: dict[str, Any] | None = None
        self._attributes: ScriptAttributes | None = None

    def keep(self) -> None:
        loops = copy.deepcopy(self._read())
        self.kept = {"loops": loops, "size": self._trainer.world_size, "stop": self._trainer.should_stop}
        if self._attributes is not None:
            self.kept["attributes"] = self._attributes.now()

    def pass_begins(self) -> None:
        """Each pass begins with on_train_start, where hooks set attributes to those of a first step. So the values
        before are restored after all of them were called, when the first batch is there."""
        self._attributes = self._attributes or attributes_of(self._trainer)
        if self.kept is not None:
            self._attributes.put_back(self.kept.get("attributes", {}))

    def look(self) -> None:
        """See which attributes a pass that has ended, in a step or behind one, has changed."""
        if self._attributes is not None:
            self._attributes.now()

    def put_back(self) -> int:
        """Set the loops to this progress. Return how many batches of its epoch are trained on."""
        trainer, loop = self._trainer, self._trainer.fit_loop
        lightning.restore_modes(loop, trainer.lightning_module)  # a validation may be half done
        lightning.forget_hook(trainer.lightning_module)
        lightning.reset_results(trainer)
        lightning.forget_loaders(loop)
        trainer.training = True
        trainer.should_stop = bool(self.kept and self.kept["stop"])
        loops = copy.deepcopy(self.kept["loops"] if self.kept else self.first)
        if self.kept is not None:
            reopen(trainer, loops)
        loop.load_state_dict(loops)
        for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop, loop.epoch_loop.automatic_optimization):
            part.restarting = self.kept is not None
        if self.kept is None:
            return 0
        epoch = loops["epoch_progress"]["current"]
        if epoch["started"] == epoch["processed"]:
            begin_an_epoch(loop)
            return 0
        begin_with_a_batch(loop)
        batches: int = loops["epoch_loop.batch_progress"]["current"]["completed"]
        return batches

    def state_dict(self) -> dict[str, Any]:
        return self.kept or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state and state["size"] != self._trainer.world_size:
            raise StateMismatch(
                f"the commit counts batches of {state['size']} processes, this run has {self._trainer.world_size}: "
                f"give the job one size, {INSTEAD}"
            )
        self.kept = dict(state) or None


class Fitting(Passes):
    """One call of `trainer.fit`. `drop` reads and drops so many batches that are trained on."""

    def __init__(self, trainer: Any, recovery: Recovery, coordinator: StepCoordinator, progress: Progress) -> None:
        _check(trainer)
        super().__init__(recovery, coordinator, trainer.strategy.root_device)
        self._trainer = trainer
        self._progress = progress
        self._logged = Logged()
        self._size = 0
        self._fresh = False  # this pass has seen no batch
        self._replaced = Replacements()
        self.skip = 0  # batches of this pass's epoch that are trained on

    def begin(self, state: dict[str, Any]) -> None:
        """Begin, when all objects are made. The world is entered only when the fit loop is about to run: until then
        Lightning waits at barriers, where a process that comes later would be alone."""
        trainer = self._trainer
        state[STATE] = self._random
        self._join(state, nothing_between(), self._set_world)
        lightning.ignore_sigterm(self._replaced, trainer.fit_loop)
        if type(trainer.precision_plugin).optimizer_step is Precision.optimizer_step:
            self._replaced.put("optimizer_step", lambda _: self._optimizer_step, trainer.precision_plugin)
        lightning.replace_stage(self._replaced, self._passes, trainer)

    # The fit loop's events, in order.

    def batch_begins(self) -> None:
        """Handle the arrival of the next batch."""
        if self._in_step:
            return  # a later micro-batch of the step
        if self._fresh:
            self._fresh = False
            self._progress.pass_begins()
        self._progress.keep()
        if self._behind:
            self._behind = False
            self._coordinator.log(self._logged.new(self._trainer))  # the results of the step's validation
            self._world.between()
        if self._number != self._round:
            raise Again
        self._step_begins(self._coordinator.step)

    def batch_ends(self) -> None:
        trainer = self._trainer
        if trainer.global_step == self._coordinator.step:
            return
        self._step_ends()
        self._behind = True
        self._coordinator.log(self._logged.new(trainer))
        self._coordinator.count(trainer.global_step, total=total_steps(trainer), epoch=trainer.current_epoch)

    # The passes.

    def _passes(self) -> None:
        """Run the passes, in place of Lightning's stage. Its check of the validation before the training is left
        out."""
        self._coordinator.watch()  # in place of Lightning's own handler
        try:
            self._world.begin()
            self._repeat(self._pass)
        finally:
            self._coordinator.leave()
            self._replaced.end()

    def _pass(self) -> None:
        trainer = self._trainer
        self._behind, self._fresh = False, True
        self._progress.look()
        self._recovery.program.scope.enter(ScriptPhase.STEP)
        trainer.lightning_module.zero_grad()
        self.skip = self._progress.put_back()
        with torch.autograd.set_detect_anomaly(lightning.detects_anomalies(trainer)):
            trainer.fit_loop.run()
        self._behind = False
        self._progress.keep()
        self._coordinator.log(self._logged.new(trainer))
        if not self._world.finish():
            raise Again

    def _set_world(self, rank: int, world_size: int) -> None:
        trainer = self._trainer
        environment = trainer.strategy.cluster_environment
        replace("global_rank", lambda _: lambda: rank, environment)
        replace("world_size", lambda _: lambda: world_size, environment)
        lightning.set_rank(rank)
        self._size = self._size or world_size
        if world_size != trainer.num_nodes * trainer.num_devices:
            raise StateMismatch(
                f"Trainer(devices={trainer.num_devices}, num_nodes={trainer.num_nodes}), and the present world has "
                f"{world_size} processes: give the job one size (--nnodes=N), so that a lost process is replaced "
                f"before the others go on, {INSTEAD}"
            )

    def _optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **named: Any) -> Any:
        """Run forward and backward before the optimizer's step and not in it, so that the loss of a peer in them costs
        only the step."""
        plugin = self._trainer.precision_plugin
        if isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS):
            return Precision.optimizer_step(plugin, optimizer, model, closure, **named)
        result = lightning.run_closure(plugin, model, optimizer, closure)
        return optimizer.step(closure=lambda: result, **named)


def _check(trainer: Any) -> None:
    """Refuse settings whose state could not be restored as it was."""
    module, most = trainer.lightning_module, most_processes()
    processes = trainer.num_nodes * trainer.num_devices
    wrong = {
        f"strategy {type(trainer.strategy).__name__}": (
            type(trainer.strategy) is not DDPStrategy,
            'say Trainer(strategy="ddp")',
        ),
        f"Trainer(devices={trainer.num_devices}, num_nodes={trainer.num_nodes})": (
            processes != most,
            f"the job has {most} processes: say so",
        ),
        "manual optimization": (
            not module.automatic_optimization,
            "the end of a step is not known: let Lightning step the optimizer",
        ),
    }
    for name, (used, fix) in wrong.items():
        if used:
            raise LoopError(f"EverstepCallback under everstep-run cannot be used with {name}: {fix}, {INSTEAD}")


class Logged:
    """Finds what one trainer of Lightning's has logged since the last call. Its `callback_metrics` keep the results of
    earlier validations. Invariant: a number is returned once, so it is in the commit of the step after which it was
    measured, and in no later one."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def new(self, trainer: Any) -> dict[str, Any]:
        now = dict(trainer.callback_metrics)
        changed = {name: value for name, value in now.items() if self._before.get(name) is not value}
        self._before = now  # kept, so that no new value gets the identity of an old one
        return changed
