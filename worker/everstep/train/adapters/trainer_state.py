"""`TrainerState` as JSON values. Beside it are the states of callbacks, the global batch in which steps are counted,
and how much of the work after the newest step is done.

After a step Trainer logs, evaluates and saves, and does so again at the end of an epoch. `_behind` keeps the state
before the first of these, before the second, and after both. If a peer is lost among them, it is unknown how far it had
come. So all members go back to the state of the slowest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers.trainer_callback import ExportableState

from everstep.checkpoint import StateMismatch
from everstep.train.adapters.script_state import ScriptAttributes

MAX_LOGS = 2000  # newest entries of Trainer's log history that a commit keeps
BY_METRIC = ("ReduceLROnPlateau", "GreedyLR")  # schedules that an evaluation moves
DONE = 2  # pieces of work after a step


class KeptState:
    """The kept state of one `trainer`, a part of the run's state."""

    everstep_settles = True  # times differ, and members may be in different pieces of the work

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._behind: list[dict[str, Any]] = []
        self.seed: int | None = None  # the seed by which the loader shuffles, if each step sets the generators
        self.loaded: dict[str, Any] = {}
        self.at_end = False  # the training ends here: the next step's batches are not read
        self.before_epoch = False  # the loaded state is of such an end, at an epoch's end
        self._pending = False  # whether the trainer has yet to take the loaded state
        self._first_pass = True
        self._attributes = ScriptAttributes(())
        self._saved_attributes: dict[str, Any] = {}  # of attributes, by a commit

    def begins(self) -> None:
        """Trainer and all callbacks were called for the beginning of the training."""
        if self._first_pass:
            self._first_pass = False
            stateful = [id(c) for c in self._stateful()]
            callbacks = [c for c in self._trainer.callback_handler.callbacks if id(c) not in stateful]
            self._attributes = ScriptAttributes([*callbacks, self._trainer, *self._trainer.model.modules()])
            self._attributes.put_back(self._saved_attributes)

    def look(self) -> None:
        """See which attributes a step, or a pass that has ended, has changed."""
        self._attributes.now()

    @property
    def done(self) -> int:
        """How many pieces of the work after the newest step are done; `DONE` before the first step."""
        return len(self._behind) - 1 if self._behind else DONE

    def step_ended(self) -> None:
        """Tell that a step is complete, and the work after it begins."""
        self._behind = [self._now()]

    def did(self) -> None:
        """Tell that a piece of the work is done."""
        if self._behind and self.done < DONE:
            self._behind.append(self._now())

    def complete(self) -> None:
        """Tell that all of the work is done, because the next step begins."""
        self._behind = self._behind or [self._now()]
        while self.done < DONE:
            self._behind.append(self._now())

    def back_to(self, done: int) -> None:
        """Go back to after `done` pieces: the rest of the work is done again."""
        self._behind = self._behind[: done + 1]

    def put_back(self) -> None:
        """Put back the callbacks, and what they had asked Trainer for."""
        self._pending = False
        if not self._behind:
            self._attributes.put_back({})
            return
        for callback, state in zip(self._stateful(), self._behind[-1]["callbacks"], strict=True):
            flags = state["args"] if callback is self._trainer.control else {}
            for name, value in {**flags, **state["attributes"]}.items():
                setattr(callback, name, value)
        if (attributes := self._behind[-1].get("attributes")) is not None:
            self._attributes.put_back(attributes)
        if (schedule := self._behind[-1].get("schedule")) is not None:
            self._trainer.lr_scheduler.load_state_dict(schedule["state"])
            for group, rate in zip(self._trainer.optimizer.param_groups, schedule["rates"], strict=True):
                group["lr"] = rate

    def epoch_begins(self) -> None:
        """All callbacks were called for the beginning of an epoch. If a pass goes on in the middle of an epoch, they
        were called a second time."""
        if self._behind and not self.at_epoch_end() and (attributes := self._behind[-1].get("attributes")) is not None:
            self._attributes.put_back(attributes)

    def taken(self) -> None:
        """Tell that Trainer has the loaded state, in a world that does not change: there no work after a step is done
        again."""
        self._pending, self._behind = False, []

    def fields(self) -> dict[str, Any]:
        """The state from which Trainer goes on, in Trainer's own form."""
        if not self._behind:
            return dict(self.loaded)
        newest = self._behind[-1]
        logs, callbacks = self._logs()[: newest["logs"]], self._by_name(newest["callbacks"])
        return {**newest["state"], "log_history": logs, "stateful_callbacks": callbacks}

    def at_epoch_end(self) -> bool:
        return float(self._trainer.state.epoch or 0).is_integer()

    def global_batch_now(self) -> int:
        """The number of samples of a step in the present world."""
        args = self._trainer.args
        return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def state_dict(self) -> dict[str, Any]:
        fields = self._plain()
        fields["log_history"] = self._logs()[-MAX_LOGS:]
        fields["stateful_callbacks"] = self._by_name([c.state() for c in self._stateful()])
        saved: dict[str, Any] = {"state": fields, "global_batch": self.global_batch_now()}
        if self._behind:
            cut = len(self._logs()) - len(fields["log_history"])
            saved["behind"] = [{**b, "logs": max(0, b["logs"] - cut)} for b in self._behind]
        if self.seed is not None:
            saved["seed"] = self.seed
        saved["attributes"] = self._attributes.now()
        saved["at_end"] = self.at_end
        return saved

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        size = self.global_batch_now()
        if saved["global_batch"] != size:
            raise StateMismatch(
                f"the commit was trained with {saved['global_batch']} samples a step, this run has {size}: choose "
                "per_device_train_batch_size x gradient_accumulation_steps x processes so that it stays the same"
            )
        self.loaded = dict(saved["state"])
        self._pending = True
        self._behind = [dict(b) for b in saved.get("behind", ())]
        self._saved_attributes = saved.get("attributes", {})
        self.before_epoch = bool(saved.get("at_end")) and float(self.loaded.get("epoch") or 0).is_integer()
        if self.seed is not None:
            self.seed = saved.get("seed", self.seed)

    def _logs(self) -> list[Any]:
        logs: list[Any] = self.loaded["log_history"] if self._pending else self._trainer.state.log_history
        return logs

    def _now(self) -> dict[str, Any]:
        callbacks = [c.state() for c in self._stateful()]
        now = {"state": self._plain(), "callbacks": callbacks, "logs": len(self._trainer.state.log_history)}
        now["attributes"] = self._attributes.now()
        schedule = self._trainer.lr_scheduler
        if type(schedule).__name__ in BY_METRIC:
            rates = [group["lr"] for group in self._trainer.optimizer.param_groups]
            now["schedule"] = {"state": schedule.state_dict(), "rates": rates}
        return now

    def _plain(self) -> dict[str, Any]:
        state, left_out = self._trainer.state, ("stateful_callbacks", "log_history")
        if self._pending:
            return {name: value for name, value in self.loaded.items() if name not in left_out}
        return {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in left_out}

    def _by_name(self, states: list[Any]) -> dict[str, Any]:
        """The callbacks' states in Trainer's own form: several of one class are a list."""
        by_class: dict[str, list[Any]] = {}
        for callback, state in zip(self._stateful(), states, strict=True):
            by_class.setdefault(type(callback).__name__, []).append(state)
        return {name: several if len(several) > 1 else several[0] for name, several in by_class.items()}

    def _stateful(self) -> list[Any]:
        trainer = self._trainer
        return [c for c in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(c, ExportableState)]
