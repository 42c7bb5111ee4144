"""What a commit holds of a model that the script itself divides over the ranks of a replica, `run.mesh(model=N)`.

Rank r of a world has place r % N. What torch's own objects hold is each place's own: other layers, or other parts of a
layer, maybe under the same names and with the same shapes, so nothing but the place tells them apart. In a commit they
have the place in their key, `model@0of2`, and ranks of one place share the writing. All else that is tracked is the
same on all ranks. Invariant: a rank is never given what another place has saved.
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
    """Whether each place of a replica keeps its own of it, and may have other ones than other places."""
    return isinstance(target, _OWN)


class Placed(MutableMapping[str, Any]):
    """`state`, as rank `place` of each replica of `places` ranks saves and restores it."""

    def __init__(self, state: Mapping[str, Any], place: int, places: int) -> None:
        check(state)
        self._state: Any = state
        self.places = places
        self._suffix = f"@{place}of{places}"

    def __getitem__(self, name: str) -> Any:
        key = name.removesuffix(self._suffix)
        if key != name and key in self._state and is_of_place(self._state[key]):
            return Union(self._state[key])
        if is_of_place(target := self._state[name]):
            raise KeyError(name)
        return target

    def __setitem__(self, name: str, value: Any) -> None:
        self._state[name] = value  # a plain value, which no place has for itself

    def __delitem__(self, name: str) -> None:
        raise TypeError("nothing is taken out of the state of a run")

    def __iter__(self) -> Iterator[str]:
        return (f"{key}{self._suffix}" if is_of_place(self._state[key]) else key for key in self._state)

    def __len__(self) -> int:
        return len(self._state)


Naming = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def naming(shape: Shape, mesh: Any) -> Naming:
    """How the state of this process is named in commits."""
    if shape.places == 1:
        return lambda state: state
    place, places = mesh.get_local_rank(MODEL), shape.places
    return lambda state: Placed(state, place, places)


def advice(refusal: str, places: int) -> str:
    """What to say behind the refusal of a commit, in a run of replicas of `places` ranks, if that has another number of
    them; else nothing."""
    saved = {int(n) for n in re.findall(r"@\d+of(\d+)\b", refusal.partition("; it has ")[2])}
    if "; it has " not in refusal or saved == ({places} if places > 1 else set()):
        return ""
    mesh = "run.mesh(model=N)"
    had = f"run.mesh(model={min(saved)})" if saved else f"no {mesh}"
    return (
        f". The run that saved it had {had}: a commit of a model that a script divides loads in a run that divides it "
        f"alike. Write {had if saved else 'none'} here too, or give this run another URL"
    )


def check(state: Mapping[str, Any]) -> None:
    """Raises `LoopError` for what is trained and would be saved by rank 0 alone, though each place has its own."""
    modules = [t for t in state.values() if isinstance(t, torch.nn.Module)]
    held = {id(p) for module in modules for p in module.parameters()}
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
                if id(p) not in held:
                    raise LoopError(
                        f"{key} trains a tensor of shape {list(p.shape)} that no tracked module holds: with "
                        "run.mesh(model=N) a commit knows parameters by their modules' names. Track the module"
                    )
