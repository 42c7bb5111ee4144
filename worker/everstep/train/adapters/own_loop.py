"""Runs a script's own `for batch in loader:`, over a loader from `accelerator.prepare`, in a changing world.

A `for` loop cannot go back in its body, so nothing is raised there. If a peer is lost in a collective of the step (in
accelerator.backward, DDP's forward pass, or the body of `with accelerator.accumulate(model)`), the error is kept, and
the body runs to its end with `sync_gradients` False. Prepared optimizers and schedules then do nothing, as in a batch
that only accumulates. When the loop asks for its next batch, the step counts as lost, and its first batch is given
again. Changes that the body makes in a lost step without checking `sync_gradients` are put back (what is tracked) or
refused (parameters). What is not tracked, such as a sum in a plain variable, has the lost batch twice.

Invariants: no optimizer moves in a lost step. A collective whose error could not be kept in this way is refused before
it begins. After the run's end all classes and objects of torch and Accelerate do as they did before it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate.utils import send_to_device

from everstep.data import Batch
from everstep.recovery.errors import LoopError
from everstep.recovery.group.in_flight import is_of_lost_peer
from everstep.recovery.group.script_location import ScriptLocation, ScriptPhase
from everstep.torch_private import accelerate as prepared
from everstep.torch_private.patches import Replacements, around
from everstep.torch_private.reducers import replace_pre_forward
from everstep.torch_private.tensors import versions
from everstep.train.guards.script_objects import is_script
from everstep.train.session import Run

# Accelerate's own collectives that a body may call.
_COLLECTIVES = ("gather", "gather_for_metrics", "reduce", "pad_across_processes", "wait_for_everyone")
_SCOPE = "`with accelerator.accumulate(model):`"
_BY_HAND = (
    "gradients that the loop adds up by itself (`if step % k == 0:`) are lost with a lost process. Say Accelerator("
    "gradient_accumulation_steps=k), and for each batch, without dividing the loss, `with accelerator.accumulate(model"
    "):` around accelerator.backward(loss), optimizer.step(), optimizer.zero_grad()"
)


class OwnLoop:
    """Gives a script the batches of `loader`. `micros`: the number of batches of a step on each rank."""

    def __init__(self, accelerator: Any, session: Run, loader: Any, micros: int, scope: ScriptLocation) -> None:
        self._accelerator = accelerator
        self._session = session
        self._micros = micros
        self._scope = scope
        self.batch: Batch[Any] | None = None  # in hand
        self._error: BaseException | None = None  # the error by which the present step was lost
        self._as_lost: tuple[list[Any], list[Any]] = [], []  # what the body may change then: see `_note_state`
        self._spoilt: LoopError | None = None  # the lost step has changed parameters
        self._accumulates = False  # whether `with accelerator.accumulate(…)` is entered
        self._entered = self._weighted = self._stepped = 0
        self._left = False  # whether the script has left its loop early
        self._replaced = Replacements()
        self._replaced.put("backward", around(self._weighting), accelerator)
        self._replaced.put("accumulate", around(self._accumulating), accelerator)
        for name in _COLLECTIVES:
            self._replaced.put(name, partial(self._only_in_scope, name), accelerator)
        for optimizer in prepared.optimizers_of(accelerator):
            self._replaced.put("step", around(self._counting), optimizer)
        replace_pre_forward(self._replaced, around(self._guarding))
        self._give_back = _take_over(loader, self)

    def end(self) -> None:
        """End the run. A second call does nothing."""
        self._give_back()
        self._replaced.end()

    def check_epoch(self) -> None:
        """Check the script at the end of its outer loop's body. Raises `LoopError` if it left the inner loop early."""
        if self._left:
            raise LoopError(
                "the loop over the prepared loader was left before its end, by break or return: the rest of the epoch "
                "would not be trained. To stop early, decide it by a value that is the same on all ranks, keep the "
                "decision in a dictionary that run.track(…) was given, let the loop over the loader come to its end, "
                "and leave `for epoch in run.epochs(…)` by break behind it. docs/how-to-restructure.md has the form "
                'under "Early stopping with Accelerate". To train fewer batches, prepare a loader of fewer samples'
            )

    def batches(self) -> Iterator[Any]:
        """The batches for the script's loop: the rest of the epoch. Steps in which a peer was lost come again."""
        self._left = True
        for step in self._session.steps():
            with step as given:
                for batch in (given,) if isinstance(given, Batch) else given:
                    self._begin(batch)
                    try:
                        yield send_to_device(batch.data, self._accelerator.device)
                    finally:
                        self.batch = None
                        if self._scope.where is ScriptPhase.BODY:
                            self._scope.where = ScriptPhase.STEP
                    self._over(last=batch.last)
            if self._spoilt is not None:  # the step would treat this error as a consequence of the loss
                raise self._spoilt
        self._left = False

    def _begin(self, batch: Batch[Any]) -> None:
        accelerator = self._accelerator
        accelerator.step = self._micros - 1 if batch.last else 0  # `accumulate` counts from there
        prepared.set_sync(accelerator, on=True)
        self.batch, self._error = batch, None
        self._weighted = self._entered = self._stepped = 0
        self._scope.where = ScriptPhase.BODY

    def _over(self, *, last: bool) -> None:
        """Finish the batch, when the script asks for the next one. Raises the error that was kept from the body."""
        error, self._error = self._error, None
        if error is not None:
            prepared.set_sync(self._accelerator, on=True)
            self._spoilt = self._check_state()
            raise error
        if not self._weighted:
            raise LoopError(
                "a batch of the prepared loader was taken without accelerator.backward(loss), which weights it: write "
                "it in the place of loss.backward()"
            )
        if self._micros > 1 and not self._entered:
            raise LoopError(
                f"gradient_accumulation_steps={self._micros}, and the loop has not entered accelerator.accumulate("
                "model): write `with accelerator.accumulate(model):` around its work"
            )
        if last and not self._stepped:
            raise LoopError(f"a step's batches were taken and no prepared optimizer's step() was called: {_BY_HAND}")

    def _note_state(self) -> None:
        """Note the state that the rest of the body may change although the step is lost: registered objects and
        parameters."""
        targets = prepared.registered_of(self._accelerator)
        self._as_lost = [(target, copy.deepcopy(target.state_dict())) for target in targets], self._marks()

    def _check_state(self) -> LoopError | None:
        """At the end of a lost step's body: the error to raise if it has changed parameters."""
        (registered, marks), self._as_lost = self._as_lost, ([], [])
        for target, state in registered:
            target.load_state_dict(state)
        changed = [name for (name, *mark), now in zip(marks, self._marks(), strict=True) if mark != [*now[1:]]]
        if not changed:
            return None
        return LoopError(
            f"{changed[0]} was changed by hand in a batch in which a peer was lost, behind accelerator.backward("
            "loss): write `if accelerator.sync_gradients:` before what changes parameters, which is False then"
        )

    def _marks(self) -> list[tuple[str, int, str]]:
        """A mark for each parameter, which differs after any change, even one through `.data`."""
        named = [pair for model in prepared.models_of(self._accelerator) for pair in model.named_parameters()]
        with torch.no_grad():
            norms = [float(p.detach().norm()) for _, p in named]
        counts = versions(p for _, p in named)
        return [(name, count, repr(norm)) for (name, _), count, norm in zip(named, counts, norms, strict=True)]

    def _counting(self, step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._stepped += 1
        return step(*arguments, **named)

    def _keeps(self, error: BaseException) -> bool:
        """Whether a peer was lost in the present batch. Then the step is over."""
        if self.batch is None or not is_of_lost_peer(error):
            return False
        if self._error is None:
            self._error = error
            self._note_state()
        prepared.set_sync(self._accelerator, on=False)
        return True

    def _weighting(self, backward: Callable[..., Any], loss: Any, **named: Any) -> None:
        if self.batch is None:
            raise LoopError(
                "accelerator.backward(loss) outside of `for batch in loader:` over the prepared loader that is trained "
                "on: no step would repeat it when a peer is lost. Move it into that loop"
            )
        self._weighted += 1
        if self._error is not None:
            return
        where, self._scope.where = self._scope.where, ScriptPhase.STEP
        try:
            backward(self.batch.scale(loss) * self._micros, **named)  # Accelerate divides by it
        except Exception as e:
            if not self._keeps(e):
                raise
        finally:
            self._scope.where = where

    @contextmanager
    def _accumulating(self, accumulate: Callable[..., Any], *models: Any) -> Iterator[None]:
        self._entered += 1
        if self._error is not None:
            yield
            return
        self._accumulates = True
        where, self._scope.where = self._scope.where, ScriptPhase.STEP if self.batch is not None else self._scope.where
        try:
            with accumulate(*models):
                yield
        except Exception as e:
            if not self._keeps(e):
                raise
        finally:
            self._accumulates = False
            self._scope.where = where
            if self._error is not None:
                prepared.set_sync(self._accelerator, on=False)

    def _only_in_scope(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            if self.batch is not None and not self._accumulates:
                called_name, at = _script_call(sys._getframe(1), name)
                raise LoopError(
                    f"accelerator.{called_name}(…){at} is in the body of the loop over the prepared loader. If a peer "
                    f"is lost in it, the body ends with an error that Everstep cannot catch there. Write {_SCOPE} "
                    f"around the body of the loop"
                )
            return call(*arguments, **named)

        return called

    def _guarding(self, before: Callable[..., Any], model: Any, *inputs: Any, **named: Any) -> Any:
        """Let DDP's forward pass go on without its collectives (of buffers, for example) in a lost step."""
        if self._error is not None:
            return inputs, named
        try:
            return before(model, *inputs, **named)
        except Exception as e:
            if not self._keeps(e):
                raise
            return inputs, named


def _script_call(frame: FrameType | None, name: str) -> tuple[str, str]:
    """The function that the script has called, which may have called `name`, and the script's line."""
    while frame is not None and not is_script(frame.f_code.co_filename):
        if str(frame.f_globals.get("__name__")).startswith("accelerate."):
            name = frame.f_code.co_name
        frame = frame.f_back
    return name, f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})" if frame is not None else ""


def _take_over(loader: Any, loop: OwnLoop) -> Callable[[], None]:
    """Let the script's object `loader` yield the batches of `loop`, until the returned function is called."""
    kind: Any = type(loader)
    taken = True
    iterate = {"__iter__": lambda instance: loop.batches() if taken else kind.__iter__(instance)}
    ours = type(kind.__name__, (kind,), {**iterate, "__module__": kind.__module__})
    # Accelerate's loaders claim to be of torch's class: `__class__` is a property of theirs.
    become = object.__dict__["__class__"].__set__
    become(loader, ours)

    def give_back() -> None:
        nonlocal taken
        taken = False
        if type(loader) is ours:  # another library may have derived its own class from it
            become(loader, kind)

    return give_back


def trained_loader(accelerator: Any) -> Any:
    """The prepared loader that a script trains on: the only one, or the only one that shuffles. Raises `LoopError`."""
    candidates = every = list(prepared.loaders_of(accelerator))
    if len(candidates) > 1:
        candidates = [loader for loader in candidates if "Random" in type(loader.get_sampler()).__name__]
    if len(candidates) != 1:
        raise LoopError(
            f"start(accelerator, …): {len(every)} loaders are prepared, and {len(candidates)} of them "
            "shuffle, so which one is trained on is not known: say start(accelerator, …, loader=train_dataloader)"
        )
    return candidates[0]


def prepared_objects(accelerator: Any) -> dict[str, Any]:
    """The objects that the accelerator has prepared, by names for a commit."""
    kinds = {
        "model": prepared.models_of(accelerator),
        "optimizer": prepared.optimizers_of(accelerator),
        "scheduler": prepared.schedules_of(accelerator),
        "registered": prepared.registered_of(accelerator),
    }
    return {f"{name}{number or ''}": value for name, values in kinds.items() for number, value in enumerate(values)}
