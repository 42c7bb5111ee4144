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
from everstep.train.guards.contents import Contents
from everstep.train.guards.script_objects import Generator, NamedValue, variables, walk
from everstep.train.guards.untracked.covered import Covered, keyword

NAMED = 8  # names in one text
BYTES = 2**12  # of a parameter, by which it is seen to move
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


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
        self._steps = 0
        self.in_step = False
        self._sizes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # of good ones
        self._groups: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # at the beginning
        # Of each untracked optimizer, the first step in which it stepped; 0: it is older than the loop.
        self._untracked_since: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # untracked modules, perhaps without a name
        self._behind: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()  # step 2: its state
        self._parameters: dict[str, tuple[weakref.ref[torch.Tensor], object]] = {}  # each with its first `_mark`
        self._generators: dict[str, tuple[Any, str]] = {}  # with digests of their states when the step began
        self._drawn = set[str]()
        self._hook: Any = None

    def start(self) -> None:
        """Check when the script has built its objects. Raises `LoopError` for what is wrong already."""
        self._covered = Covered(self._state)
        findings = list[Finding]()
        for name, optimizer in self._covered.optimizers.items():
            findings += self._judge_parameters(optimizer, name)
            self._groups[optimizer] = len(optimizer.param_groups)
        _refuse([*findings, *self._find()])
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Stop, because no more steps are taken."""
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
        if not self._is_watched():
            return
        self._covered = Covered(self._state)
        free = self._free()
        self._look(free)
        # The global generators are saved, and have their own rules.
        methods: Any = (random.random, np.random.rand)
        common = [torch.default_generator, *torch.cuda.default_generators, *(method.__self__ for method in methods)]
        known = {id(generator) for generator in common}
        drawn = (h for h in free if isinstance(h.value, Generator) and id(h.value) not in known)
        self._generators = {h.name: (h.value, Contents().digest(h.value)) for h in drawn}

    def over(self) -> None:
        """End a step's block, whether it ended well or not."""
        self.in_step = False
        states = self._generators.items()
        self._drawn = {name for name, (generator, before) in states if Contents().digest(generator) != before}
        self._generators = {}

    def completed(self, world_size: int, same: Callable[[int], bool]) -> None:
        """Check after a step that is complete on all ranks. `same`: whether all ranks have this number of 63 bits;
        collective. Raises `LoopError` on all ranks if one of them holds untracked state that changes."""
        if not self._is_watched():
            return
        findings = self._judge()
        self._drawn = set()
        if self._steps == 2:
            self._behind.update((optimizer, _state_names(optimizer)) for optimizer in self._covered.optimizers.values())
        text = "; ".join(map(str, findings[:NAMED]))
        agreed = world_size == 1 or same(xxhash.xxh3_64_intdigest(text.encode()) >> 1 if findings else 0)
        _refuse(findings)
        if not agreed:
            raise LoopError(
                "another rank holds something that training moves and that is not tracked: the LoopError in that "
                "rank's log names it, with the line to write"
            )

    def _is_watched(self) -> bool:
        return self._hook is not None and self._steps & (self._steps - 1) == 0

    def _judge(self) -> list[Finding]:
        self._covered = Covered(self._state)
        free = self._free()
        by_name = {h.name: h for h in free}
        findings: dict[str, Finding] = {}
        for name in self._look(free):
            subject = subject_of(name, by_name)
            what = f"holds parameters that move ({name})"
            findings.setdefault(subject, Finding(subject, what, track(subject, self._state)))
        for name in self._drawn:
            line = f"{track(name, self._state)}, and each step sets it"
            line += " (or draw from run.shared_rng, which is the same on all ranks)"
            findings.setdefault(name, Finding(name, "is a random generator that moves in a step", line))
        return [findings[name] for name in sorted(findings) if not self.is_untracked(name)]

    def _look(self, free: Iterable[NamedValue]) -> list[str]:
        """The names of the parameters that have moved since they were first seen."""
        moved = list[str]()
        for named in free:
            if not _is_parameter(named.value):
                continue
            first, mark = self._parameters.get(named.name), _mark(named.value)
            if first is None or first[0]() is not named.value:
                self._parameters[named.name] = weakref.ref(named.value), mark
            elif first[1] != mark:
                moved.append(named.name)
        return sorted(moved)

    def _free(self) -> list[NamedValue]:
        """The script's objects that nothing tracked holds, and modules older than the loop that it holds in hidden
        ways, each under a name of its own."""
        named = _named()
        hidden = [m for m in self._modules if id(m) not in named]
        inner = {id(c) for m in hidden for c in children_of(m).values()}
        more = walk((type(m).__name__, m) for m in hidden if id(m) not in inner)
        names: dict[str, NamedValue] = {}
        for h in (*named.values(), *(h for h in more if id(h.value) not in named)):
            names.setdefault(h.name, h)
        return [h for h in names.values() if self._is_free(h)]

    def _is_free(self, named: NamedValue) -> bool:
        return not self._holds(named.value) and not self.is_untracked(named.name, type(named.value).__name__)

    def _holds(self, value: Any) -> bool:
        return id(value) in self._covered.objects or (isinstance(value, torch.Tensor) and self._covered.holds(value))

    def is_untracked(self, *names: str) -> bool:
        """Whether the script has said that it may be lost: by its name, its owner's name, or its class's."""
        return any(
            name == known or name.startswith((f"{known}.", f"{known}[")) for name in names for known in self._untracked
        )

    # Checks before the first step.

    def _find(self) -> list[Finding]:
        """Find objects that training is going to change, whether they have changed yet or not."""
        findings = list[Finding]()
        named = _named()
        kinds = (Optimizer, LRScheduler, torch.nn.Module, torch.amp.GradScaler)
        objects = [h.value for h in named.values() if isinstance(h.value, kinds)]
        listed = gc.get_objects()
        wanted = {kind for kind in set(map(type, listed)) if issubclass(kind, kinds)}
        objects += [o for o in listed if type(o) in wanted and id(o) not in named]
        del listed
        for o in objects:
            name = named[id(o)].name if id(o) in named else type(o).__name__
            if not self._is_free(NamedValue(name, o)):
                continue
            if isinstance(o, Optimizer):
                self._untracked_since[o] = 0
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
        if not named or not any((average or p.requires_grad) and not self._holds(p) for p in value.parameters()):
            return None
        return "an average of weights" if average else f"a module in {type(value).__name__}"

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
            else:
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
            by_name = {h.name: h for h in _named().values()}
            own = next((n for n, h in by_name.items() if h.value is parameter), None)
            subject = subject_of(own, by_name) if own is not None else "the_module"
            what = f"({own or f'of shape {list(parameter.shape)}'}) is trained by the {kind} {name}"
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
        names = {id(h.value): h.name for h in _named().values() if isinstance(h.value, Optimizer)}
        name, kind = names.get(id(optimizer), type(optimizer).__name__), type(optimizer).__name__
        if self.is_untracked(name, kind):
            self._sizes[optimizer] = _size(optimizer)
            return
        moves = any(self._covered.holds(p) for group in optimizer.param_groups for p in group["params"])
        if not moves and self._untracked_since.setdefault(optimizer, self._steps) == self._steps:
            return
        first = Finding(name, f"is an optimizer ({kind}) that steps", track(name, self._state))
        more = self._judge_parameters(optimizer, name, "optimizer")
        # Each of the others would be refused in its own first step, in a later start of the script.
        early = (o for o, step in self._untracked_since.items() if not step and o is not optimizer and id(o) in names)
        for other in early:
            other_name, kind = names[id(other)], type(other).__name__
            if not self.is_untracked(other_name, kind) and not self._holds(other):
                more.append(Finding(other_name, f"is an optimizer ({kind}) too", track(other_name, self._state)))
        _refuse([first, *sorted(more, key=lambda finding: finding.name)])


def _refuse(findings: list[Finding]) -> None:
    """Raises `LoopError` that tells all of them, if there are any."""
    if findings:
        more = f". And {len(findings) - 1} more, in the log" if len(findings) > 1 else ""
        raise LoopError("; ".join(map(str, findings[:NAMED])), brief=f"{findings[0]}{more}")


def _state_names(optimizer: Optimizer) -> set[str]:
    return {str(name) for state in optimizer.state.values() if isinstance(state, Mapping) for name in state}


def _size(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _named() -> dict[int, NamedValue]:
    """The script's objects, by identity."""
    return {id(named.value): named for named in walk(variables(sys._getframe(1)))}


def _mark(tensor: torch.Tensor) -> object:
    """What is another one when the parameter has moved: its shape, how often torch has counted a change of it, and a
    digest of its first bytes, because `.data` changes without being counted."""
    digest = xxhash.xxh3_64_intdigest(first_bytes(local_of(tensor.detach()), BYTES))
    return tuple(tensor.shape), version(tensor), digest


def _is_parameter(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or is_lazy(value) or not layouts.is_dense(value):
        return False
    return isinstance(value, torch.nn.Parameter) or (value.is_leaf and value.requires_grad)


def track(name: str, taken: Collection[str] = ()) -> str:
    """The line that tracks `name`. `taken`: the names that are tracked already."""
    return f"run.track({keyword(name, taken)}={name}) before run.steps()"


def subject_of(name: str, by_name: Mapping[str, NamedValue]) -> str:
    """What has to be tracked so that `name` is: the whole module, list or mapping of which it is a part."""
    for _ in range(32):
        owner = by_name.get(by_name[name].owner) if name in by_name else None
        if owner is None or not isinstance(owner.value, torch.nn.Module | Mapping | list | tuple):
            return name
        name = owner.name
    return name
