"""Refuses untracked state that training changes, with its name: such state is lost with its process.

Some of it is found before the first step: a parameter of a tracked optimizer that nothing tracked holds, a schedule of
such an optimizer, a gradient scaler, an average of weights, a module in DDP or FSDP. An optimizer is judged when it
steps. Parameters that move by other ways, and random generators that a step draws from, are found in the 1st, 2nd, 4th,
8th, … step of a world. Other tensors that steps change are named at the start (`carried_names`), and are compared
after a loss or a restart (`comparison`).

This module knows no process group: its caller says how ranks compare a number. Invariants: looking at an object does
not change it, and no object of the script is kept alive. All ranks raise after the same step. A step that is not
watched costs one look-up for each optimizer that steps.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from everstep.checkpoint.state import layouts
from everstep.checkpoint.state.alike import first_bytes
from everstep.checkpoint.state.sharding import local_of
from everstep.recovery.errors import LoopError
from everstep.torch_private.modules import children_of
from everstep.torch_private.tensors import version
from everstep.train.guards.script_objects import Generator, Held, variables, walk
from everstep.train.guards.untracked.covered import Covered, keyword

NAMED = 8  # names in one text
BYTES = 2**12  # of a parameter, by which it is seen to move
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
_live: weakref.WeakSet[UntrackedStateCheck] = weakref.WeakSet()  # of this process, whose threads may be several runs


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding. `line`: what to write instead."""

    name: str
    what: str
    line: str

    def __str__(self) -> str:
        return (
            f"{self.name} {self.what}, and nothing that is tracked holds it: a process that replaces a lost one starts "
            f"without it. Write {self.line}; or, if nothing is lost with it, run.untracked({self.name!r})"
        )


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
        # Of each untracked optimizer, the first step in which it stepped.
        self._untracked_since: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # untracked modules, perhaps without a name
        self._behind: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()  # step 2: its state
        self._parameters: dict[str, _Seen] = {}  # as they were first seen
        self._generators: dict[str, tuple[Any, int]] = {}  # with their states when the step began
        self._drawn = set[str]()
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

    def moved(self) -> None:
        """Tell of a new world."""
        self._steps = 0

    def uncount(self) -> None:
        """Take back the newest step, which was not one of the run."""
        self._steps -= 1

    def begins(self) -> None:
        """Begin a step."""
        self._steps += 1
        self.in_step = True
        if self._hook is None or not self._is_watched():
            return
        self._covered = Covered(self._state)
        free = self._free()
        self._look(free)
        # The global generators are saved, and have their own rules.
        methods: Any = (random.random, np.random.rand)
        common = [torch.default_generator, *torch.cuda.default_generators, *(one.__self__ for one in methods)]
        known = {id(one) for one in common}
        drawn = (h for h in free if isinstance(h.value, Generator) and id(h.value) not in known)
        self._generators = {h.name: (h.value, _state_of(h.value)) for h in drawn}

    def over(self) -> None:
        """End a step's block, whether it ended well or not."""
        self.in_step = False
        self._drawn = {name for name, (generator, at) in self._generators.items() if _state_of(generator) != at}
        self._generators = {}

    def completed(self, world_size: int, same: Callable[[int], bool]) -> None:
        """Check after a step that is complete on all ranks. `same`: whether all ranks have this number of 63 bits;
        collective. Raises `LoopError` on all ranks if one of them holds untracked state that changes."""
        if self._hook is None or not self._is_watched():
            return
        found = self._judge()
        self._drawn = set()
        if self._steps == 2:
            self._behind.update((one, _state_names(one)) for one in self._covered.optimizers.values())
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
        free = self._free()
        held = {h.name: h for h in free}
        found: dict[str, Finding] = {}
        for name in self._look(free):
            subject = subject_of(name, held)
            what = f"holds parameters that move ({name})"
            found.setdefault(subject, Finding(subject, what, track(subject, self._state)))
        for name in self._drawn:
            line = f"{track(name, self._state)}, and each step sets it"
            line += " (or draw from run.shared_rng, which is the same on all ranks)"
            found.setdefault(name, Finding(name, "is a random generator that moves in a step", line))
        return [found[name] for name in sorted(found) if not self.is_untracked(name)]

    def _look(self, free: Iterable[Held]) -> list[str]:
        """The names of the parameters that have moved since they were first seen."""
        moved = list[str]()
        for held in free:
            if not _is_parameter(held.value):
                continue
            first, now = self._parameters.get(held.name), _Seen.of(held.value)
            if first is None or first.held() is not held.value:
                self._parameters[held.name] = now
            elif first.mark != now.mark:
                moved.append(held.name)
        return sorted(moved)

    def _free(self) -> list[Held]:
        """The script's objects that nothing tracked holds, and modules older than the loop that it holds in hidden
        ways, each under a name of its own."""
        found = list(walk(variables(sys._getframe(1))))
        seen = {id(h.value) for h in found}
        hidden = [m for m in self._modules if id(m) not in seen]
        inner = {id(c) for m in hidden for c in children_of(m).values()}
        more = walk((type(m).__name__, m) for m in hidden if id(m) not in inner)
        names: dict[str, Held] = {}
        for h in (*found, *(h for h in more if id(h.value) not in seen)):
            names.setdefault(h.name, h)
        return [h for h in names.values() if self._is_free(h)]

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
        if self._steps == 3 and (behind := self._behind.pop(optimizer, None)) is not None:
            self._check_offloaded(optimizer, behind)
        if self._sizes.get(optimizer) == _size(optimizer):
            return
        if self.in_step:
            self._covered = Covered(self._state)
            tracked = next((name for name, o in self._covered.optimizers.items() if o is optimizer), None)
            if tracked is not None:
                _refuse(self._judge_parameters(optimizer, tracked))
                self._check_groups(optimizer, tracked)
            elif threading.get_ident() == self._thread or not any(optimizer in c._sizes for c in _live):
                self._check_untracked(optimizer)

    def _check_offloaded(self, optimizer: Optimizer, behind: set[str]) -> None:
        """Check that its state is complete where commits are made. `behind`: what it had when the last step ended."""
        name = next((name for name, o in self._covered.optimizers.items() if o is optimizer), "optimizer")
        back = sorted(_state_names(optimizer) - behind)
        if back and not self.is_untracked(name):
            raise LoopError(
                f"{name} gets {', '.join(back)} back before it steps: they are in its state in a step, and elsewhere "
                "between two steps, so that no commit and no new process has them. Leave them in its state when the "
                f"step ends (on another device, if it is for memory); or, if nothing is lost, run.untracked({name!r})"
            )

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

    def _check_untracked(self, optimizer: Optimizer) -> None:
        """Check an untracked optimizer. One that was made in this step, of parameters made in this step, leaves nothing
        behind."""
        named = {id(h.value): h.name for h in walk(variables(sys._getframe(1))) if isinstance(h.value, Optimizer)}
        name = named.get(id(optimizer), type(optimizer).__name__)
        if self.is_untracked(name, type(optimizer).__name__):
            self._sizes[optimizer] = _size(optimizer)
            return
        moves = any(self._covered.holds(p) for group in optimizer.param_groups for p in group["params"])
        older = optimizer in self._early or self._untracked_since.setdefault(optimizer, self._steps) != self._steps
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


def _state_names(optimizer: Optimizer) -> set[str]:
    return {str(name) for state in optimizer.state.values() if isinstance(state, Mapping) for name in state}


def _size(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A parameter as it was at one look. It is not kept alive. `mark`: its shape, how often torch has counted a change
    of it, and a digest of its first bytes, because `.data` changes without being counted."""

    held: weakref.ref[torch.Tensor]
    mark: tuple[tuple[int, ...], int, int]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Seen:
        digest = xxhash.xxh3_64_intdigest(first_bytes(local_of(tensor.detach()), BYTES))
        return cls(weakref.ref(tensor), (tuple(tensor.shape), version(tensor), digest))


def _is_parameter(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or is_lazy(value) or not layouts.is_dense(value):
        return False
    return isinstance(value, torch.nn.Parameter) or (value.is_leaf and value.requires_grad)


def _state_of(generator: Generator) -> int:
    """A digest of the generator's state."""
    if isinstance(generator, torch.Generator):
        data: Any = generator.get_state().numpy()
        return xxhash.xxh3_64_intdigest(data)
    if isinstance(generator, np.random.Generator):
        return hash(repr(generator.bit_generator.state))
    if isinstance(generator, random.SystemRandom):
        return 0  # it has no state
    return hash(repr(generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()))


def track(name: str, taken: Collection[str] = ()) -> str:
    """The line that tracks `name`. `taken`: the names that are tracked already."""
    return f"run.track({keyword(name, taken)}={name}) before run.steps()"


def subject_of(name: str, held: Mapping[str, Held]) -> str:
    """What has to be tracked so that `name` is: the whole module, list or mapping of which it is a part."""
    for _ in range(32):
        owner = held.get(held[name].owner) if name in held else None
        if owner is None or not isinstance(owner.value, torch.nn.Module | Mapping | list | tuple):
            return name
        name = owner.name
    return name
