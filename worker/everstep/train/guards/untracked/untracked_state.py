"""Refuses untracked state that training changes, with its name: such state is lost with its process.

Some of it is found before the first step: a parameter of a tracked optimizer that nothing tracked holds, a schedule of
such an optimizer, a gradient scaler, an average of weights, a module in DDP or FSDP. An optimizer is judged when it
steps. All other state is watched in the 1st, 2nd, 4th, 8th, … step of a world (`verdicts`).

This module knows no process group: its caller says how ranks compare a number. Invariants: looking at an object does
not change it, and no object of the script is kept alive. All ranks raise after the same step. A step that is not
watched costs one look-up for each optimizer that steps.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from everstep.recovery.errors import LoopError
from everstep.train.guards.script_objects import Generator, Held, children, variables, walk
from everstep.train.guards.untracked.change_marks import state_of_generator
from everstep.train.guards.untracked.covered import Covered, tensors_of
from everstep.train.guards.untracked.tensor_flow import TensorFlow, is_safe
from everstep.train.guards.untracked.verdicts import Finding, Looks, Seen, judge, look, subject_of, track

log = logging.getLogger("everstep.train")

NAMED = 8  # names in one text
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
# For these modules torch chooses another kernel, with other last bits, in evaluation while functions are watched.
_FUSED = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder)
_live: weakref.WeakSet[UntrackedStateCheck] = weakref.WeakSet()  # of this process, whose threads may be several runs


class UntrackedStateCheck:
    """The check for the tracked `state`. `untracked`: the names of what may be lost; the set may grow."""

    takes_names = True  # whether a script can say what may be lost

    def __init__(self, state: Mapping[str, Any], untracked: Collection[str] = ()) -> None:
        self._state = state
        self._untracked = untracked
        self._covered = Covered({})
        self._thread = threading.get_ident()
        self._steps = 0
        self.in_step = False
        self._sizes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # of good ones
        self._groups: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # at the beginning
        self._early: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # untracked optimizers that are older than the loop
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # when they stepped
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # untracked modules, perhaps without a name
        self._first: dict[str, Seen] = {}
        self._begin: dict[str, Seen] = {}
        self._slots = set[tuple[str, int]]()  # when the step began
        self._generators: list[tuple[str, Any, int]] = []
        self._drawn: list[str] = []
        self._flow: TensorFlow | None = None
        self._told = set[str]()
        self._hook: Any = None

    def start(self) -> None:
        """Check when the script has built its objects. Raises `LoopError` for what is wrong already."""
        self._thread = threading.get_ident()
        self._covered = Covered(self._state)
        found = list[Finding]()
        for name, optimizer in self._covered.optimizers.items():
            found += self._judge_parameters(optimizer, name)
            self._groups[optimizer] = len(optimizer.param_groups)
        _refuse([*found, *self._find()])
        _live.add(self)
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Stop, because no more steps are taken."""
        _live.discard(self)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._end_flow()

    def moved(self) -> None:
        """Tell of a new world."""
        self._steps = 0

    def uncount(self) -> None:
        """Take back the newest step, which was not one of the run."""
        self._steps -= 1

    def begins(self) -> None:
        """Begin a step."""
        self._end_flow()
        self._steps += 1
        self.in_step = True
        if self._hook is None or not self._is_watched():
            return
        self._covered = Covered(self._state)
        held = self._held()
        free = [h for h in held.values() if self._is_free(h)]
        self._begin = look(free, self._first)
        self._slots = _slots(held.values())
        self._generators = [(h.name, h.value, state_of_generator(h.value)) for h in _generators(free)]
        if self._steps > 1 and is_safe() and not any(_is_fused(h.value) for h in held.values()):
            tensors = {h.name: h.value for h in free if h.name in self._begin and isinstance(h.value, torch.Tensor)}
            self._flow = TensorFlow(tensors)
            self._flow.begin()

    def over(self) -> None:
        """End a step's block, whether it ended well or not."""
        self._end_flow()
        self.in_step = False
        self._drawn = [name for name, generator, at in self._generators if state_of_generator(generator) != at]
        self._generators = []

    def completed(self, world_size: int, same: Callable[[int], bool]) -> None:
        """Check after a step that is complete on all ranks. `same`: whether all ranks have this number of 63 bits;
        collective. Raises `LoopError` on all ranks if one of them holds untracked state that changes."""
        if self._hook is None or not self._is_watched():
            return
        self._end_flow()
        found = self._judge()
        self._flow, self._begin, self._drawn = None, {}, []
        text = "; ".join(map(str, found[:NAMED]))
        number = xxhash.xxh3_64_intdigest(text.encode()) >> 1 if found else 0
        agreed = world_size == 1 or same(number)
        _refuse(found)
        if not agreed:
            raise LoopError(
                "another rank holds something that training moves and that is not tracked: the LoopError in that "
                "rank's log names it, with the line to write"
            )

    def _is_watched(self) -> bool:
        return self._steps & (self._steps - 1) == 0

    def _judge(self) -> list[Finding]:
        self._covered = Covered(self._state)
        held = self._held()
        now = look((h for h in held.values() if self._is_free(h)), self._first)
        flow = self._flow if self._flow is not None else TensorFlow({})
        looks = Looks(
            self._first,
            self._begin,
            now,
            held,
            flow.reached,
            flow.overwritten,
            self._drawn,
            self._shapes(),
            self._state,
            self._slots & _slots(held.values()),
        )
        found, others = judge(looks)
        new = [name for name in others if name not in self._told and not self.is_untracked(name)]
        self._told.update(new)
        if new:
            log.warning(
                "%s change%s in the steps, and nothing that is tracked holds %s. If the parameters depend on it, %s; "
                "if not, run.untracked(%s) says so",
                ", ".join(new[:NAMED]), "" if len(new) > 1 else "s", "them" if len(new) > 1 else "it",
                track(new[0], self._state),
                ", ".join(map(repr, new[:NAMED])),
            )  # fmt: skip
        return [f for f in found if not self.is_untracked(f.name)]

    def _shapes(self) -> list[Counter[tuple[int, ...]]]:
        modules = [list(t.parameters()) for t in self._state.values() if isinstance(t, torch.nn.Module)]
        optimizers = [[p for g in o.param_groups for p in g["params"]] for o in self._covered.optimizers.values()]
        own = [t for t in self._state.values() if isinstance(t, torch.Tensor)]
        return [Counter(tuple(p.shape) for p in listed if p.requires_grad) for listed in (*modules, *optimizers, own)]

    def _end_flow(self) -> None:
        if self._flow is not None:
            self._flow.end(tensors_of(self._state))

    def _held(self) -> dict[str, Held]:
        """The script's objects by name, and modules older than the loop that it holds in hidden ways."""
        found = list(walk(variables(sys._getframe(1))))
        seen = {id(h.value) for h in found}
        hidden = [m for m in self._modules if id(m) not in seen]
        inner = {id(c) for m in hidden for c in m._modules.values()}
        more = walk((type(m).__name__, m) for m in hidden if id(m) not in inner)
        names: dict[str, Held] = {}
        for h in (*found, *(h for h in more if id(h.value) not in seen)):
            names.setdefault(h.name, h)
        return names

    def _is_free(self, held: Held) -> bool:
        """Whether nothing tracked holds it, in this run or in another run of this process."""
        return not (
            any(c._holds(held.value) for c in {*_live, self}) or self.is_untracked(held.name, type(held.value).__name__)
        )

    def _holds(self, value: Any) -> bool:
        return id(value) in self._covered.objects or (isinstance(value, torch.Tensor) and self._covered.holds(value))

    def is_untracked(self, *names: str) -> bool:
        """Whether the script has said that it may be lost: by its name, its owner's name, or its class's."""
        return any(
            name == said or name.startswith((f"{said}.", f"{said}[")) for name in names for said in self._untracked
        )

    # Checks before the first step.

    def _find(self) -> list[Finding]:
        """Find objects that training is going to change, whether they have changed yet or not."""
        findings = list[Finding]()
        named = {id(h.value): h for h in walk(variables(sys._getframe(1)))}
        kinds = (Optimizer, LRScheduler, torch.nn.Module, torch.amp.GradScaler)
        found = [h.value for h in named.values() if isinstance(h.value, kinds)]
        listed = gc.get_objects()
        wanted = {kind for kind in set(map(type, listed)) if issubclass(kind, kinds)}
        found += [o for o in listed if type(o) in wanted and id(o) not in named]
        del listed
        for o in found:
            name = named[id(o)].name if id(o) in named else type(o).__name__
            if not self._is_free(Held(name, o)):
                continue
            if isinstance(o, Optimizer):
                self._early.add(o)
                continue
            if isinstance(o, torch.nn.Module):
                self._modules.add(o)
            if (what := self._known(o, id(o) in named)) is not None:
                findings.append(Finding(name, f"is {what}", track(name, self._state)))
        return findings

    def _known(self, value: Any, named: bool) -> str | None:
        """A description of the object, if it is useful for training only. An object without a name may be left from
        earlier code."""
        if isinstance(value, LRScheduler):
            tracked = any(value.optimizer is o for o in self._covered.optimizers.values())
            return f"a learning-rate scheduler ({type(value).__name__}) of a tracked optimizer" if tracked else None
        if isinstance(value, torch.amp.GradScaler):
            return "a gradient scaler" if named and value.is_enabled() else None
        average = isinstance(value, torch.optim.swa_utils.AveragedModel)
        if not average and not any(kind.__name__ in _WRAPPERS for kind in type(value).__mro__):
            return None
        if not named or not any((average or p.requires_grad) and self._is_lost(p) for p in value.parameters()):
            return None
        return "an average of weights" if average else f"a module in {type(value).__name__}"

    def _is_lost(self, tensor: torch.Tensor) -> bool:
        return not any(c._holds(tensor) for c in {*_live, self})

    # Checks when an optimizer steps.

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._flow is not None:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            self._flow.note(g for g in gradients if g is not None)
        if self._sizes.get(optimizer) == _size(optimizer):
            return
        if self.in_step:
            self._covered = Covered(self._state)
            tracked = next((name for name, o in self._covered.optimizers.items() if o is optimizer), None)
            if tracked is not None:
                _refuse(self._judge_parameters(optimizer, tracked))
                self._check_groups(optimizer, tracked)
            elif threading.get_ident() == self._thread or not any(optimizer in c._sizes for c in _live):
                self._check_stranger(optimizer)

    def _judge_parameters(self, optimizer: Optimizer, name: str, kind: str = "tracked optimizer") -> list[Finding]:
        """The first parameter of the optimizer that nothing tracked holds, if there is one."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if self._covered.holds(parameter) or self.is_untracked(name):
                continue
            held = {h.name: h for h in walk(variables(sys._getframe(1)))}
            found = next((n for n, h in held.items() if h.value is parameter), None)
            subject = subject_of(found, held) if found is not None else "the_module"
            what = f"({found or f'of shape {list(parameter.shape)}'}) is trained by the {kind} {name}"
            return [Finding(subject, what, track(subject, self._state))]
        self._sizes[optimizer] = _size(optimizer)
        return []

    def _check_groups(self, optimizer: Optimizer, name: str) -> None:
        """Check the groups: a new process makes the optimizer as it was before the loop, and cannot hold the state of
        another group."""
        before, now = self._groups.get(optimizer), len(optimizer.param_groups)
        if before is None or now <= before or self.is_untracked(name):
            return
        raise LoopError(
            f"{name}.add_param_group was called in the loop: {name} had {before} groups when run.steps() began, and "
            f"has {now}. A process that replaces a lost one makes it with {before}, and what was saved does not fit. "
            f"Call {name}.add_param_group({{'params': …, 'lr': 0.0}}) before run.steps(), and set the group's "
            f"'lr' in the step from which it is to be trained; or, if nothing is lost with it, run.untracked({name!r})"
        )

    def _check_stranger(self, optimizer: Optimizer) -> None:
        """Check an untracked optimizer. One that was made in this step, of parameters made in this step, leaves nothing
        behind."""
        named = {id(h.value): h.name for h in walk(variables(sys._getframe(1))) if isinstance(h.value, Optimizer)}
        name = named.get(id(optimizer), type(optimizer).__name__)
        if self.is_untracked(name, type(optimizer).__name__):
            self._sizes[optimizer] = _size(optimizer)
            return
        moves = any(self._covered.holds(p) for group in optimizer.param_groups for p in group["params"])
        older = optimizer in self._early or self._strangers.setdefault(optimizer, self._steps) != self._steps
        if moves or older:
            what = f"is an optimizer ({type(optimizer).__name__}) that steps"
            found = [Finding(name, what, track(name, self._state))]
            found += self._judge_parameters(optimizer, name, "optimizer")
            # Each of the others would be refused in its own first step, in a later start of the script.
            tracked = self._covered.optimizers.values()
            for other in (o for o in self._early if o is not optimizer and id(o) in named):
                other_name, kind = named[id(other)], type(other).__name__
                if not self.is_untracked(other_name, kind) and not any(other is o for o in tracked):
                    found.append(Finding(other_name, f"is an optimizer ({kind}) too", track(other_name, self._state)))
            _refuse([found[0], *sorted(found[1:], key=lambda one: one.name)])


def _refuse(found: list[Finding]) -> None:
    """Raises `LoopError` that tells all of them, if there are any."""
    if found:
        more = f". And {len(found) - 1} more, in the log" if len(found) > 1 else ""
        raise LoopError("; ".join(map(str, found[:NAMED])), brief=f"{found[0]}{more}")


def _slots(held: Iterable[Held]) -> set[tuple[str, int]]:
    """Which tensor lies in which place of a list or mapping, by the tensor's id. One that has a shorter name too is not
    among `held` by the name of its place."""
    containers = (h for h in held if isinstance(h.value, list | tuple | Mapping))
    return {(c.name, id(c.value)) for h in containers for c in children(h) if isinstance(c.value, torch.Tensor)}


def _size(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _generators(held: list[Held]) -> Iterator[Held]:
    """The script's own generators. The global ones are saved, and have their own rules."""
    common = {id(torch.default_generator), id(random._inst), id(np.random.mtrand._rand)}
    common |= {id(g) for g in torch.cuda.default_generators}
    return (h for h in held if isinstance(h.value, Generator) and id(h.value) not in common)


def _is_fused(value: Any) -> bool:
    return isinstance(value, _FUSED) and not value.training
