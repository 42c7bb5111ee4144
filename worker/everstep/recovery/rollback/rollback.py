"""Rolls a failed step back, and judges the validity of the state.

The state is `WHOLE` if every tracked object that has changed since the step began was copied then, so that it can be
restored. Otherwise it is `TORN`. So a step is repeated only from a state that is known (ADR 0016).

The 1st, 2nd, 4th, 8th, … step of a world is watched: digests find tensors that change without torch's counting it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from everstep.checkpoint.save.snapshot import free_host_memory
from everstep.recovery import digests
from everstep.recovery.errors import LoopError
from everstep.recovery.group.script_location import script_call_site
from everstep.recovery.rollback.snapshots import TensorSnapshot, address
from everstep.recovery.rollback.tracked_objects import Optimizer, tracked_objects
from everstep.recovery.state.gradients import Gradients
from everstep.recovery.state.optimizers import before_step, has_closure
from everstep.recovery.state.randomness import generators_to_put_back
from everstep.recovery.state.scalers import hear_skips
from everstep.recovery.validity import Validity
from everstep.torch_private.tensors import copy_each, raw, version

# --- undo copy
# The undo copy: a copy of all that a step changes, for scripts that run collectives after an optimizer step. Such a
# step (a GAN's, PPO's, or one that sums its loss over the ranks at its end) can lose a peer after parameters have
# changed. Then the copy, made when the step began, undoes the change. It costs memory and time. So it is made for no
# other script, and only if it fits into a part of the free memory.

log = logging.getLogger("everstep.train")

SHARE = 0.5  # of a device's free memory that the copy may take


class UndoCopy:
    """`wanted`: a collective was seen after an optimizer step. `on`: there is also room for the copy. `never`: why a
    copy can help nobody; then none is wanted."""

    def __init__(self, never: str = "") -> None:
        self._never = never
        self.wanted = self.on = False
        self.decided = False  # whether the room was checked in this world
        self._logged: bool | None = None
        self.why_not = never or "no step of this process had shown before that collectives follow its optimizer's step"
        self._line = ""
        self._kept: list[torch.Tensor] = []

    def late(self, step: int, name: str) -> None:
        """A collective of step number `step` begins after an optimizer step, or after another change of parameters."""
        if self._never:
            return
        self.wanted = True
        site = script_call_site(sys._getframe(2))
        self._line = f"step {step} runs a collective ({name}{site.at if site else ''}) behind an optimizer's step"

    def has_room(self, captured: Iterable[TensorSnapshot]) -> bool:
        """Whether a copy of these has room now."""
        return self._full(_need(captured)) is None

    def let_go(self) -> None:
        """The newest copy is not needed any more."""
        self._kept = []

    def _full(self, need: Mapping[torch.device, int]) -> torch.device | None:
        """A device without enough free memory; None if all have enough."""
        have = {device: _size(self._kept, device) for device in need}
        return next((d for d, size in need.items() if size > (free_memory(d) + have[d]) * SHARE), None)

    def decide(self, captured: Iterable[TensorSnapshot], opaque: str = "") -> None:
        """Decide whether these are copied at the beginning of each step from now on. `opaque`: an object that cannot be
        copied."""
        need = _need(captured)
        full = self._full(need)
        can = full is None and not opaque
        is_logged, self.decided = self._logged is can, True
        self.on = self._logged = can
        line = "To do without, run it before optimizer.step(), or behind the block `with step:`"
        self.why_not = "" if full is None else f"a copy of {_words(need[full])} of tracked state has no room on {full}"
        if opaque:
            self.why_not = f"{opaque} cannot be copied: it holds more than tensors, arrays, numbers and texts"
        if is_logged:
            return
        if can:
            log.info("%s: %s of tracked state are copied when a step begins, from which it is repeated if a peer is "
                     "lost. %s", self._line, _words(sum(need.values())), line)  # fmt: skip
            return
        self._kept = []
        log.warning("%s, and %s: if a peer is lost behind that step, all go back to the last commit. %s",
                    self._line, self.why_not, line)  # fmt: skip

    def keep(self, captured: list[TensorSnapshot]) -> None:
        """Copy them."""
        tensors = _distinct(captured)
        kept = self._kept
        for i, tensor in enumerate(tensors):
            if i < len(kept) and _alike(kept[i], tensor):
                continue
            kept[i : i + 1] = [torch.empty_like(tensor)]
        del kept[len(tensors) :]
        if tensors:
            with torch.no_grad():
                copy_each(kept, tensors)
        copies = {id(tensor): copy for tensor, copy in zip(tensors, kept, strict=True)}
        for h in captured:
            h.copy, h.origin = copies[id(raw(h.tensor))], raw(h.tensor).detach()


def free_memory(device: torch.device) -> int:
    """Bytes that a process may still allocate on the device, as far as is known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return 0
    return free_host_memory()


def _need(captured: Iterable[TensorSnapshot]) -> dict[torch.device, int]:
    """Bytes of a copy of these."""
    need: dict[torch.device, int] = {}
    for tensor in _distinct(captured):
        need[tensor.device] = need.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
    return need


def _distinct(captured: Iterable[TensorSnapshot]) -> list[torch.Tensor]:
    return list({id(raw(h.tensor)): raw(h.tensor) for h in captured}.values())


def _alike(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (kept.shape, kept.dtype, kept.device, kept.stride()) == (
        tensor.shape, tensor.dtype, tensor.device, tensor.stride(),
    )  # fmt: skip


def _size(tensors: list[torch.Tensor], device: torch.device) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t.device == device)


def _words(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


# --- rollback

EARLY = 4  # in the first steps of a world, the parts of tracked objects are found anew; later only in watched steps

# Identifies the state of a tensor: a digest of its bits, and torch's counts of changes.
Print = tuple[int, int, int]


class Listener(Protocol):
    """Receives the events of a step."""

    def collective(self, name: str) -> None:
        """A collective of the program begins."""

    def update(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """An optimizer step is about to begin; `closure`: whether it gets one. May raise `PeerLost`."""


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
        self._quiescent = True  # whether no collective can still write into restored tensors
        self._unmoved: dict[str, Print] = {}
        self._names_by_address: dict[int, str] = {}  # names of tensors that are not copied, by address
        self._untraced: str | None = None
        self._after_block: dict[str, Print] = {}  # at the end of a watched step's block
        self.listeners: Sequence[Listener] = ()
        self.completion_read = False  # whether the script has asked if the step counts
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
        self._entered, self._written, self._quiescent = "", None, True
        undoes = self.undoes = self._undo_copy.wanted and self._agreed()
        for target in self._tracked:
            if self._watched or undoes or keep or self._count <= EARLY:
                target.look()
            target.begin()
        self.kept = self._keep_once() if keep else undoes and self._keep()
        if self._watched:
            self._unmoved = self._prints()
            self._names_by_address = {address_: name for name, (_, address_, _) in self._unmoved.items() if address_}
        self.gradients.begin(watched=self._watched)
        self._generators = [generator.state_dict() for generator in self._random]
        self._in_step = True

    def _keep(self) -> bool:
        """Copy everything that a step may change; whether there is room for that."""
        if not self.can_keep():
            return False
        captured = self._large()
        if self._opaque:
            return False  # for this step only
        self._undo_copy.keep(captured)
        return True

    def _keep_once(self) -> bool:
        captured = self._large()
        if self._opaque or not self._undo_copy.has_room(captured):
            return False
        self._undo_copy.keep(captured)
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
        return [captured for target in self._tracked for captured in target.large()]

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
            self._written = next((name_ for t in tensors if (name_ := self._names_by_address.get(address(t)))), None)
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
            steps = bool(self.gradients.optimizers)
            raise LoopError(
                f"{self._untraced} was changed in step {self.step}{' before the optimizer steps' * steps}, and torch "
                "has not counted it (`.data`, numpy): if a peer is lost there, the step would be repeated from the "
                "changed values. Write `with torch.no_grad(): tensor.add_(…)` in place of `tensor.data.add_(…)`"
                + ", or change it after optimizer.step()"
                * steps
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
            self._quiescent = False
            return Validity.WHOLE
        self.torn = f"{moved or self._written} has moved"
        if self._entered:
            why = self._undo_copy.why_not or "not every member could copy its state when the step began"
            self.torn = f"{self._entered} had begun its step, and {why}"
        return Validity.TORN

    def roll_back_again(self) -> None:
        """Restore again when all collectives of the failed step are over: one in flight may have written since
        `roll_back`."""
        for target in self._tracked if not self._quiescent else ():
            target.put_back()
        self._quiescent = True

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
        for name, (bits, at, changes) in self._prints().items():
            was = self._unmoved.get(name)
            if was is not None and was[1:] == (at, changes) and was[0] != bits:
                self._untraced = self._untraced or name

    def _check_gap(self) -> None:
        """Check, after a watched step, the changes by code between two steps. That code also runs after a lost step,
        unless the script asks whether the step counts."""
        before, read = self._after_block, self.completion_read
        self._after_block, self.completion_read = {}, False
        if not before or read:
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
