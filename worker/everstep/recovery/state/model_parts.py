"""Defines what a commit contains of a model that the script itself divides over the ranks of a replica,
`run.mesh(model=N)`.

Rank r of a world has place r % N. The contents of torch's own objects differ between places: other layers, or other
parts of a layer. They may have the same names and shapes, so only the place tells them apart. In a commit their keys
contain the place, `model@0of2`, and ranks of one place share the writing. All other tracked objects are the same on all
ranks. Invariant: a rank never gets the state of another place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from everstep.checkpoint import Union
from everstep.recovery.errors import LoopError
from everstep.recovery.state.shape import MODEL, Shape
from everstep.recovery.state.switches import Switches

_OWN = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
    Switches,
)


def is_of_place(target: Any) -> bool:
    """Whether each place of a replica has its own version of this object, and perhaps objects that other places
    lack."""
    return isinstance(target, _OWN)


class Placed(MutableMapping[str, Any]):
    """`state`, as rank `model_rank` of each replica of `model_size` ranks saves and restores it."""

    def __init__(self, state: Mapping[str, Any], model_rank: int, model_size: int) -> None:
        check(state)
        self._state: Any = state
        self.model_size = model_size
        self._suffix = f"@{model_rank}of{model_size}"

    def __getitem__(self, name: str) -> Any:
        key = name.removesuffix(self._suffix)
        if key != name and key in self._state and is_of_place(self._state[key]):
            return Union(self._state[key])
        if is_of_place(target := self._state[name]):
            raise KeyError(name)
        return target

    def __setitem__(self, name: str, value: Any) -> None:
        self._state[name] = value  # a plain value is the same in all places

    def __delitem__(self, name: str) -> None:
        raise TypeError("nothing is taken out of the state of a run")

    def __iter__(self) -> Iterator[str]:
        return (f"{key}{self._suffix}" if is_of_place(self._state[key]) else key for key in self._state)

    def __len__(self) -> int:
        return len(self._state)


Naming = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def naming(shape: Shape, mesh: Any) -> Naming:
    """The names of this process's state in commits."""
    if shape.model_size == 1:
        return lambda state: state
    model_rank, model_size = mesh.get_local_rank(MODEL), shape.model_size
    return lambda state: Placed(state, model_rank, model_size)


def advice(refusal: str, model_size: int) -> str:
    """An addition to the refusal of a commit, if the commit's replicas have another number of places than this run's
    `model_size`; else nothing."""
    saved = {int(n) for n in re.findall(r"@\d+of(\d+)\b", refusal.partition("; it has ")[2])}
    if "; it has " not in refusal or saved == ({model_size} if model_size > 1 else set()):
        return ""
    mesh = "run.mesh(model=N)"
    had = f"run.mesh(model={min(saved)})" if saved else f"no {mesh}"
    return (
        f". The run that saved it had {had}: a commit of a model that a script divides loads in a run that divides it "
        f"alike. Write {had if saved else 'none'} here too, or give this run another URL"
    )


def check(state: Mapping[str, Any]) -> None:
    """Raises `LoopError` for a trained tensor that rank 0 alone would save although each place has its own."""
    modules = [t for t in state.values() if isinstance(t, torch.nn.Module)]
    in_modules = {id(p) for module in modules for p in module.parameters()}
    for key, target in state.items():
        if isinstance(target, torch.Tensor) and target.requires_grad:
            raise LoopError(
                f"track({key}=…): with run.mesh(model=N) each rank of a replica has parameters of its own, and commits "
                "keep those of modules apart. Put this tensor into a module, as a torch.nn.Parameter, and track that"
            )
        if not isinstance(target, torch.optim.Optimizer):
            continue
        for group in target.param_groups:
            for p in group["params"]:
                if id(p) not in in_modules:
                    raise LoopError(
                        f"{key} trains a tensor of shape {list(p.shape)} that no tracked module holds: with "
                        "run.mesh(model=N) a commit knows parameters by their modules' names. Track the module"
                    )
