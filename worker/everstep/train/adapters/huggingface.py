"""An adapter for Hugging Face Trainer: a callback that saves and stops, whose `train` resumes from the newest commit:
docs/reference/adapters.md.

Trainer's loop takes its first epoch and the batches to skip from its resume path, before the first callback runs. So
`train` restores the commit, writes Trainer's own `trainer_state.json`, and calls
`trainer.train(resume_from_checkpoint=…)` with that folder. Of the folder's other files Trainer needs the weights, whose
loading is switched off, because they are loaded already.

A step is committed when the next one begins: then its logging and evaluation are done, and the random generators are as
the next step will find them. To stop, `Preempted` is raised there; `control.should_training_stop` is not set, because
Trainer would then evaluate, load its best model, and return to a script that takes the training for complete.

If an agent announces rounds, a lost peer ends no other process: `unbroken` begins Trainer's loop again in the next
world. Invariants: the parameters, the position and the generators of a commit are of the same moment. A commit made
with another global batch is refused, because the position is counted in steps.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from everstep.checkpoint import Checkpointer, SettingUnusable
from everstep.contract import refusal
from everstep.recovery.state.switches import SWITCHES, Switches
from everstep.torch_private.patches import Replacements, around
from everstep.train import refused_end
from everstep.train.adapters import missing
from everstep.train.adapters.late import Late, LateRng
from everstep.train.adapters.rank_checks import RankChecks
from everstep.train.coordination.step_coordinator import StepCoordinator

try:
    from accelerate.data_loader import DataLoaderShard
    from transformers import TrainerCallback, TrainingArguments
    from transformers.trainer_utils import TrainOutput
except ImportError as e:
    raise missing("huggingface", "transformers", "'transformers[torch]'") from e

from everstep.torch_private import names
from everstep.torch_private.transformers import loading_weights_by
from everstep.train.adapters import accelerated
from everstep.train.adapters.order import known_order
from everstep.train.adapters.script_state import CallbackWeights
from everstep.train.adapters.trainer_state import KeptState
from everstep.train.adapters.unbroken import AtEnd, Unbroken
from everstep.train.guards.common_samples import SAMPLES

STATE_FILE = "trainer_state.json"  # Trainer's own name

accelerated.follow()
accelerated.count_whole_job(TrainingArguments, "world_size")


class EverstepCallback(TrainerCallback):  # type: ignore[misc]  # the package has no types
    """Saves while Trainer trains. Its `train` restores first. Make one object for each run.

    `checkpoint`: a URL or folder (default: `EVERSTEP_CHECKPOINT_URL`), or a `Checkpointer`; without one, `options` are
    passed to the new Checkpointer. Set `save_strategy="no"` in Trainer's arguments, unless you want its checkpoints
    too. `compare_samples`: compare a few samples with those of the other ranks and of the saved run.
    """

    def __init__(
        self,
        checkpoint: str | Checkpointer | None = None,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        compare_samples: bool = True,
        **options: Any,
    ) -> None:
        accelerated.recovery()  # before the world changes
        self._coordinator = StepCoordinator.find(checkpoint, every_steps, every_seconds, options)
        self._optimizer, self._scheduler, self._rng = Late(), Late(), LateRng()
        self._checks = RankChecks(self._coordinator, "EverstepCallback", compares=compare_samples)
        self._state: dict[str, Any] = {}
        self._switched: dict[str, str] = {}
        self._trainer: Any = None
        self._begun = self._watching = False
        self._unbroken: Unbroken | None = None
        self._weights: CallbackWeights | None = None

    def train(self, trainer: Any, **arguments: Any) -> Any:
        """Resume from the newest commit, or begin. Returns the result of `trainer.train(**arguments)`. Collective.

        Raises `SettingUnusable` for a Trainer that cannot be resumed, and `StateMismatch` for a commit of another
        global batch or model. If asked to stop, it commits and ends the process with exit code 86.
        """
        replaced = Replacements()
        replaced.put("on_step_begin", around(self._before_step_begins), trainer.callback_handler)
        try:
            with refused_end.remembered():
                result = self._train(trainer, arguments)
        finally:
            replaced.end()
        refused_end.completed()
        return result

    def _train(self, trainer: Any, arguments: dict[str, Any]) -> Any:
        names.check("transformers")
        _check(trainer, arguments)
        arguments.pop("resume_from_checkpoint", None)  # scripts pass None, and a folder of ours takes its place
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._trainer = trainer
        kept = KeptState(trainer)
        if (recovery := accelerated.recovery()) is not None:
            self._unbroken = Unbroken(trainer, recovery, self._coordinator, kept, self._checks.samples)
            try:
                return self._unbroken.run(arguments)
            finally:
                self._coordinator.leave()
        self._state = {
            "model": trainer.model, "optimizer": self._optimizer, "scheduler": self._scheduler, "trainer": kept,
            "rng": self._rng, SAMPLES: self._checks.samples,
        }  # fmt: skip
        self._state[SWITCHES] = switches = Switches(self._state)
        switches.start()
        if trainer.accelerator.scaler is not None:
            self._state["scaler"] = trainer.accelerator.scaler
        try:
            if self._coordinator.begin(self._state) == 0:
                return trainer.train(**arguments)
            self._switched = switches.hold()
            with tempfile.TemporaryDirectory(prefix="everstep-trainer-") as folder:
                Path(folder, STATE_FILE).write_text(json.dumps(kept.loaded))
                with _weights_kept(trainer):
                    return trainer.train(resume_from_checkpoint=folder, **arguments)
        except AtEnd:
            trainer.is_in_train = False
            return TrainOutput(self._coordinator.step, 0.0, {})
        finally:
            self._coordinator.leave()

    # Trainer's events.

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer is None:
            raise SettingUnusable(
                "Trainer has to know before it begins which batches were trained already: call callback.train(trainer) "
                "instead of trainer.train()"
            )
        _check_stream(loader := kwargs["train_dataloader"])
        known_order(loader)
        if isinstance(loader, DataLoaderShard):  # otherwise rank 0 alone reads
            self._checks.reads([loader.base_dataloader])
        if self._unbroken is not None:
            if not self._watching:
                self._coordinator.watch()
            self._watching = True
            return
        self._state["trainer"].taken()
        self._state["model"] = kwargs["model"]
        self._optimizer.bind(kwargs["optimizer"])
        self._scheduler.bind(kwargs["lr_scheduler"])
        if self._switched:
            self._state[SWITCHES].load_state_dict(self._switched)
        self._checks.begin(self._state)
        self._coordinator.watch()
        if 0 < state.max_steps <= state.global_step:
            # If the last step was in the middle of an epoch, Trainer's loop would make one more.
            self._rng.apply()
            self._coordinator.finish(state.global_step)
            raise AtEnd

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._unbroken is None and not self._begun and self._state["trainer"].before_epoch:
            self._rng.apply()  # the run that goes on with a greater max_steps draws the epoch's numbers

    def _before_step_begins(self, begins: Callable[..., Any], args: Any, state: Any, control: Any) -> Any:
        """Begin the step before the first callback is called: what a callback counts there belongs to the step,
        whatever the order of the callbacks is."""
        self._step_begins(state)
        return begins(args, state, control)

    def _step_begins(self, state: Any) -> None:
        self._weights = self._weights or CallbackWeights(self._trainer.callback_handler.callbacks, self._trainer.model)
        self._weights.check()
        if self._unbroken is not None:
            self._unbroken.step_begins(state.global_step)
        elif not self._begun:
            # The first batch has arrived: making the iterator and fetching drew random numbers that the run had drawn
            # before.
            self._begun = True
            self._state["trainer"].begins()
            self._rng.apply()
        elif state.global_step > self._coordinator.step:
            self._state["trainer"].look()
            self._checks.completed()
            self._coordinator.completed(state.global_step, total=state.max_steps, epoch=int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._unbroken is None:
            refusal.count_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._coordinator.log(logs or {})

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best = self._unbroken is None or args.load_best_model_at_end
        if best and (state.global_step >= state.max_steps or control.should_training_stop):
            self._ends()
            self._coordinator.save(state.global_step)  # before Trainer loads its best model

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        self._ends()
        # The parameters are now those of the best model. A resumed run repeats the steps that are not committed yet.
        if self._unbroken is not None:
            self._unbroken.finish(save=not best)
        else:
            self._checks.completed(last=True)
            self._coordinator.finish(state.global_step, save=not best)

    def _ends(self) -> None:
        if self._unbroken is None:
            self._state["trainer"].at_end = True


def _check(trainer: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse settings whose state would not be restored as it was."""
    wrong = {
        "resume_from_checkpoint": (arguments.get("resume_from_checkpoint"), "leave it out: the commit is what goes on"),
        "auto_find_batch_size": (
            trainer.args.auto_find_batch_size,
            "set the batch size, which the count of steps needs",
        ),
        "ignore_data_skip": (trainer.args.ignore_data_skip, "leave it out, or samples come twice"),
        "DeepSpeed": (trainer.is_deepspeed_enabled, "its engine keeps state that no commit would hold; use DDP"),
        "FSDP": (trainer.is_fsdp_enabled, "Trainer shards after the restore; use everstep.Checkpointer in a loop"),
    }
    for name, (used, fix) in wrong.items():
        if used:
            raise SettingUnusable(f"EverstepCallback cannot be used with {name}: {fix}")


def _check_stream(loader: Any) -> None:
    """Refuse a stream. Trainer keeps no position in it: after a loss in process it ended with other parameters than the
    undisturbed run, and nothing compares what a stream gives when it is read again."""
    if isinstance(data := getattr(loader, "dataset", None), IterableDataset):
        data = getattr(data, "dataset", data)  # Accelerate's own divides it among the ranks
        raise SettingUnusable(
            f"train_dataset={type(data).__name__}: an IterableDataset has no position from which Trainer could go on "
            "after a loss. Pass a dataset with __len__ and __getitem__ (of Hugging Face's datasets: without "
            "streaming=True, or Dataset.from_generator). A stream can be trained on in a loop of your own: "
            "run.steps(run.loader(everstep.data.Stream(dataset, length), global_batch=…), …)"
        )


@contextmanager
def _weights_kept(trainer: Any) -> Iterator[None]:
    """A context in which Trainer does not load the weights of its resume folder, because they are loaded already."""
    restored = trainer.model

    def load(folder: str, model: Any = None) -> None:
        if trainer.model is not restored:  # model_init has made another
            trainer.model.load_state_dict(restored.state_dict())

    with loading_weights_by(load, trainer):
        yield
