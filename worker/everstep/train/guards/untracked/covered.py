"""Finds what the tracked objects hold, and so what a checkpoint or another member's state restores.

A parameter counts as held if a tracked module, tensor, list or mapping holds it, or if its memory is in the
`state_dict` of another tracked object. Other objects that such an object reaches by its attributes are not refused; but
its author may have forgotten them (`reached`), so their values are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from everstep.checkpoint.state import layouts, schedules
from everstep.checkpoint.state.divided import stepped
from everstep.checkpoint.state.sharding import local_of
from everstep.contract.refusal import OWN_MODULES
from everstep.recovery.errors import LoopError
from everstep.recovery.state.switches import SWITCHES
from everstep.torch_private.modules import buffers_of, parameters_of, unsaved_of
from everstep.torch_private.tensors import storage_of
from everstep.train.guards.script_objects import walk

OWN_NAMES = ("step", "data", "rng")  # the session's own objects are tracked under these names

_OWN = torch.nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler | torch.amp.GradScaler


class Covered:
    """The coverage of `state` as it is now."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.objects = set[int]()
        self.reached = set[int]()  # of these, what a tracked object's author may save, and may have forgotten
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._tensors = set[int]()
        self._memory = set[int | None]()
        for key, target in state.items():
            self._add(key, target)
        self.reached -= set(map(id, state.values()))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether its values are saved and sent to new members."""
        return id(tensor) in self._tensors or _memory(tensor) in self._memory

    def _add(self, key: str, target: Any) -> None:
        self.objects.add(id(target))
        if isinstance(target, torch.nn.Module):
            self._add_module(target)
        elif isinstance(target, torch.Tensor):
            self._add_tensor(target)
        elif isinstance(target, torch.optim.Optimizer):
            self.optimizers[key] = target
            self._reach(key, target)
            if (inner := stepped(target)) is not target:
                self._add(f"{key}.optim", inner)
            for state in list(target.state.values()):  # a loaded checkpoint may share its memory
                for value in state.values() if isinstance(state, Mapping) else ():
                    if isinstance(value, torch.Tensor):
                        self._add_tensor(value)
        elif isinstance(target, torch.optim.lr_scheduler.LRScheduler):
            self._add_schedule(target)
        elif isinstance(target, Mapping | list | tuple):
            self._add_container(key, target)
        else:
            self._add_other(key, target)

    def _add_module(self, module: torch.nn.Module) -> None:
        for part in module.modules():
            self.objects.add(id(part))
            for tensor in parameters_of(part).values():
                self._add_tensor(tensor)
            for name in buffers_of(part).keys() - unsaved_of(part):
                self._add_tensor(buffers_of(part)[name])
            if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
                self._reach("", vars(part))

    def _add_schedule(self, schedule: Any) -> None:
        """Add a schedule with its parts, but without the optimizer that it changes."""
        self.objects.add(id(schedule))
        for part in schedules.parts_of(schedule):
            if id(part) not in self.objects:
                self._add_schedule(part)

    def _add_container(self, key: str, target: Any) -> None:
        for named in walk([(key, target)]):
            if isinstance(named.value, _OWN) or (
                callable(getattr(named.value, "state_dict", None)) and not isinstance(named.value, torch.Tensor)
            ):
                raise LoopError(
                    f"track({key}=…): {named.name} is a {type(named.value).__name__}, which cannot be saved as a part "
                    f"of a {type(target).__name__}. Track it by a name of its own before the loop: "
                    f"run.track({word(named.name)}={named.name})"
                    + (f", or all at once: run.track(**{key})" if isinstance(target, Mapping) else "")
                )
            self.objects.add(id(named.value))
            if isinstance(named.value, torch.Tensor):
                self._add_tensor(named.value)

    def _add_other(self, key: str, target: Any) -> None:
        if key == SWITCHES:
            return  # it refers to all modules, but saves other things of them
        if type(target).__module__.startswith(OWN_MODULES):
            for name, part in vars(target).items():  # a loader's dataset and generators: the loader saves what it needs
                self._reach(name, part, saved=True)
            return
        optimizers = self._reach(key, target)
        if not callable(getattr(target, "state_dict", None)):
            return
        try:
            saved = list(walk([(key, target.state_dict())]))
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError):
            return  # the first save reports that
        # Only saved tensors that it really holds count: a copy is freed when this returns, and its memory is reused.
        reached = {_memory(h.value) for h in walk([(key, target)]) if isinstance(h.value, torch.Tensor)}
        self._memory |= {_memory(h.value) for h in saved if isinstance(h.value, torch.Tensor)} & reached - {None}
        # An object that only refers to an optimizer, as schedules do, saves none.
        if any(isinstance(h.value, Mapping) and "param_groups" in h.value for h in saved):
            self.optimizers |= optimizers

    def _reach(self, key: str, target: Any, *, saved: bool = False) -> dict[str, torch.optim.Optimizer]:
        """Count all that the object reaches as its own, except parameters of modules. Return the optimizers among
        it. `saved`: it is known to save what it needs of this."""
        optimizers: dict[str, torch.optim.Optimizer] = {}
        for named in walk([(key, target)]):
            value = named.value
            if isinstance(value, torch.nn.Module) and value is not target:
                continue
            if isinstance(value, torch.optim.Optimizer):
                optimizers[named.name] = value
            elif isinstance(value, torch.nn.Parameter):
                continue
            if saved:
                self.reached.discard(id(value))
            elif id(value) not in self.objects:
                self.reached.add(id(value))
            self.objects.add(id(value))
        if isinstance(target, torch.optim.Optimizer):
            self.optimizers |= optimizers  # the wrapper may be an optimizer itself
        return optimizers

    def _add_tensor(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            self._tensors.add(id(tensor))
            if (memory := _memory(tensor)) is not None:
                self._memory.add(memory)


def word(name: str) -> str:
    """A keyword for the object called `name`."""
    for part in reversed(name.replace("[", ".").replace("]", "").replace("'", "").split(".")):
        if part.isidentifier():
            return part
    return "state"


def keyword(name: str, taken: Collection[str]) -> str:
    """The same, but a keyword that neither the session uses nor `taken` contains."""
    key, used = word(name), {*taken, *OWN_NAMES}
    if key in used:
        key = "_".join(part for part in name.replace("[", ".").split(".") if part.isidentifier()) or key
    while key in used:
        key = f"{key}_2"
    return key


def _memory(tensor: Any) -> int | None:
    local = local_of(tensor)
    if torch.nn.parameter.is_lazy(local) or not layouts.is_dense(local) or not local.numel():
        return None
    return storage_of(local)
