"""Rolls a failed step back, and judges the validity of the state.

The state is `WHOLE` if every tracked object that has changed since the step began was copied then, so that it can be
restored. Otherwise it is `TORN`. So a step is repeated only from a state that is known (ADR 0016).

The 1st, 2nd, 4th, 8th, … step of a world is watched: digests find tensors that change without torch's counting it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from everstep.recovery import digests
from everstep.recovery.errors import LoopError
from everstep.recovery.rollback.snapshots import TensorSnapshot, address
from everstep.recovery.rollback.tracked_objects import Optimizer, tracked_objects
from everstep.recovery.rollback.undo_copy import UndoCopy
from everstep.recovery.state.gradients import Gradients
from everstep.recovery.state.optimizers import before_step, has_closure
from everstep.recovery.state.randomness import generators_to_put_back
from everstep.recovery.state.scalers import hear_skips
from everstep.recovery.validity import Validity
from everstep.torch_private.tensors import version

EARLY = 4  # in the first steps of a world, the parts of tracked objects are found anew; later only in watched steps

# Identifies the state of a tensor: a digest of its bits, and torch's counts of changes.
Print = tuple[int, int, int]


class Listener(Protocol):
    """Receives the events of a step."""

    def collective(self, name: str) -> None:
        """A collective of the program begins."""
        ...

    def update(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """An optimizer step is about to begin; `closure`: whether it gets one. May raise `PeerLost`."""
        ...


class Rollback:
    """The tracked objects of a run. Call `begin` at a step's start, and then `ended`, or `roll_back` if it failed.

    `refuse` is called before each optimizer step, and raises if the round is over by then. With `hears_skips` it is
    also called when a gradient scaler skips one. `collective` must be called when a collective of the program begins.
    `agreed`: whether large objects may be copied. `never`: why no copy can help after an optimizer's step.
    """

    def __init__(
        self, state: Mapping[str, Any], refuse: Callable[[], None], agreed: Callable[[], bool] = lambda: True,
        *, hears_skips: bool = False, never: str = "",
    ) -> None:  # fmt: skip
        self._refuse = refuse
        self._tracked = tracked_objects(state)
        self.gradients = Gradients(state)
        self._agreed = agreed
        self._undo_copy = UndoCopy(never)
        self._random = generators_to_put_back(state)
        self._generators: list[dict[str, Any]] = []
        self._count = 0  # steps of this world
        self.refused = 0  # optimizer steps that `refuse` refused
        self.torn = ""  # why the state is torn
        self.step = 0  # the present step
        self._in_step = self._watched = False
        self._settled = True  # whether no collective can still write into restored tensors
        self._unmoved: dict[str, Print] = {}
        self._places: dict[int, str] = {}  # names of tensors that are not copied, by address
        self._untraced: str | None = None
        self._after_block: dict[str, Print] = {}  # at the end of a watched step's block
        self.listeners: Sequence[Listener] = ()
        self.asked = False  # whether the script has asked if the step counts
        self.undoes = False  # whether all members can undo this step
        self.kept = False  # whether everything was copied when the step began
        self._entered = ""  # the first optimizer that has begun its step
        self._written: str | None = None  # tensor written by a collective since the step began or an optimizer stepped
        self._hooks: list[Any] = []
        for name, target in state.items():
            if isinstance(target, torch.optim.Optimizer):
                self._hooks.append(before_step(target, self._before(name)))
        if hears_skips:
            hear_skips(state, self._skipped)
        self._hooks += [hook for t in self._tracked if isinstance(t, Optimizer) for hook in t.hooks]

    def moved(self) -> None:
        """The world has changed."""
        self._count = self.gradients.updates = 0
        self._after_block = {}
        self._undo_copy.decided = False

    def begin(self, step: int, *, keep: bool = False) -> None:
        """Step number `step` begins. Raises `LoopError` if code after the last block did something from which recovery
        is impossible. `keep`: copy everything that the step may change, if there is room."""
        self._check_gap()
        self.step, self._count = step, self._count + 1
        self._watched = not self._count & (self._count - 1)
        self._entered, self._written, self._settled = "", None, True
        undoes = self.undoes = self._undo_copy.wanted and self._agreed()
        for target in self._tracked:
            if self._watched or undoes or keep or self._count <= EARLY:
                target.look()
            target.begin()
        self.kept = self._keep_once() if keep else undoes and self._keep()
        if self._watched:
            self._unmoved = self._prints()
            self._places = {place: name for name, (_, place, _) in self._unmoved.items() if place}
        self.gradients.begin(watched=self._watched)
        self._generators = [generator.state_dict() for generator in self._random]
        self._in_step = True

    def _keep(self) -> bool:
        """Copy everything that a step may change; whether there is room for that."""
        if not self.can_keep():
            return False
        held = self._large()
        if self._opaque:
            return False  # for this step only
        self._undo_copy.keep(held)
        return True

    def _keep_once(self) -> bool:
        held = self._large()
        if self._opaque or not self._undo_copy.has_room(held):
            return False
        self._undo_copy.keep(held)
        return True

    def uncount(self) -> None:
        """The newest step, which was rolled back, does not count as a step of the run."""
        self._count -= 1
        self.gradients.uncount()
        if not self._undo_copy.wanted:
            self._undo_copy.let_go()

    def can_keep(self) -> bool:
        """Whether a copy is useful, and there is room for it in this world."""
        if self._undo_copy.wanted and not self._undo_copy.decided:
            self._undo_copy.decide(self._large(), self._opaque)
        return self._undo_copy.wanted and self._undo_copy.on

    def _large(self) -> list[TensorSnapshot]:
        return [held for target in self._tracked for held in target.large()]

    @property
    def _opaque(self) -> str:
        return next((target.opaque for target in self._tracked if target.opaque), "")

    def collective(self, name: str, written: Any) -> None:
        """A collective of the program begins; it writes into these tensors."""
        if not self._in_step:
            return
        for listener in self.listeners:
            listener.collective(name)
        tensors = list(_flat(written))
        if self._written is None:  # torch does not count these writes
            self._written = next((found for t in tensors if (found := self._places.get(address(t)))), None)
        if not self._undo_copy.wanted and (self._entered or (self._watched and self._moved() is not None)):
            self._undo_copy.late(self.step, name)

    def ended(self) -> None:
        """The step's block has ended without an error. Raises `LoopError` if the step did something from which recovery
        is impossible."""
        self._in_step = False
        if self._watched and not self._entered:
            self._compare()
        self.gradients.ended(self.step)
        if self._untraced is not None:
            raise LoopError(
                f"{self._untraced} was changed in step {self.step} before the optimizer's step, and torch has not "
                "counted it (`.data`, numpy): if a peer is lost there, the step would be repeated from the changed "
                "values. Write `with torch.no_grad(): tensor.add_(…)` in place of `tensor.data.add_(…)`, or change it "
                "after optimizer.step()"
            )
        if self._watched:
            self._after_block = self._prints()

    def roll_back(self) -> Validity:
        """Undo a step that does not count, after the code behind its block has run; returns the state's validity."""
        self._in_step = False
        if self._watched and not self._entered:
            self._compare()
        moved = self._moved() or (None if self.kept else self._untraced)
        for target in self._tracked:
            target.put_back()
        for generator, drawn in zip(self._random, self._generators, strict=True):
            generator.load_state_dict(drawn)  # each rank keeps its own, even one that receives another's state
        self.gradients.put_back()
        if moved is None and (self.kept or not (self._entered or self._written)):
            self._settled = False
            return Validity.WHOLE
        self.torn = f"{moved or self._written} has moved"
        if self._entered:
            why = self._undo_copy.why_not or "not every member could copy its state when the step began"
            self.torn = f"{self._entered} had begun its step, and {why}"
        return Validity.TORN

    def roll_back_again(self) -> None:
        """Restore again when all collectives of the failed step are over: one in flight may have written since
        `roll_back`."""
        for target in self._tracked if not self._settled else ():
            target.put_back()
        self._settled = True

    def _moved(self) -> str | None:
        return next((what for t in self._tracked if (what := t.moved()) is not None), None)

    def end(self) -> None:
        """The run is over."""
        self.gradients.end()
        for hook in self._hooks:
            hook.remove()

    def _before(self, name: str) -> Callable[..., None]:
        def hook(optimizer: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
            try:
                self._refuse()
                for listener in self.listeners:
                    listener.update(optimizer, has_closure(arguments, options))
            except BaseException:
                self.refused += 1
                raise
            if self._in_step and not self._entered and self._watched:
                self._compare()
            self._entered = self._entered or name

        return hook

    def _skipped(self) -> None:
        """A gradient scaler has skipped an optimizer step. Other members may wait for this one's vote now."""
        if self._in_step and not self.gradients.entered:
            try:
                self._refuse()
            except BaseException:
                self.refused += 1
                raise

    def _prints(self) -> dict[str, Print]:
        return {
            name: (digests.content(tensor), address(tensor), version(tensor))
            for target in self._tracked for name, tensor in target.contents()
        }  # fmt: skip

    def _compare(self) -> None:
        """Before the first optimizer step, find tensors that have changed without torch's counting it."""
        for name, (bits, place, changes) in self._prints().items():
            was = self._unmoved.get(name)
            if was is not None and was[1:] == (place, changes) and was[0] != bits:
                self._untraced = self._untraced or name

    def _check_gap(self) -> None:
        """Check, after a watched step, the changes by code between two steps. That code also runs after a lost step,
        unless the script asks whether the step counts."""
        before, asked = self._after_block, self.asked
        self._after_block, self.asked = {}, False
        if not before or asked:
            return
        for name, now in self._prints().items():
            if name in before and before[name][1:] == now[1:] and before[name] != now:
                raise LoopError(
                    f"{name} was changed after step {self.step}'s block, and torch has not counted it (`.data`, "
                    "numpy): what follows the block runs for a step that is lost, too, and would change it twice. "
                    "Write it behind `if step.completed:`, or into the block after optimizer.step()"
                )


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    elif isinstance(tensors, list | tuple):
        for tensor in tensors:
            yield from _flat(tensor)
