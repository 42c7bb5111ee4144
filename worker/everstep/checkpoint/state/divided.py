"""An optimizer that divides its state by whole parameters among the ranks: torch's `ZeroRedundancyOptimizer`.

Its own `state_dict` wants the whole state on one rank first. Here each rank gives the state of its own parameters,
under the numbers that they have in an undivided optimizer. So a commit is the same as that of the undivided one, and
either reads the commits of the other. Knows no process group, and uses private names of torch, which
`tests/recovery/test_divided_optimizers.py` watches. Invariant: a rank holds state of its own parameters only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any, Final

import torch

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.state.union import Union
from everstep.torch_private import optimizers

NAME: Final = "ZeroRedundancyOptimizer"


def is_divided(target: object) -> bool:
    """Whether this is such an optimizer, without importing what defines it."""
    return any(kind.__name__ == NAME for kind in type(target).__mro__)


def stepped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that makes the steps and has their state. In a divided optimizer it is the one of this rank's
    parameters."""
    inner: torch.optim.Optimizer = optimizer.optim if is_divided(optimizer) else optimizer
    return inner


def undividable(key: str, optimizer: Any) -> str:
    """Why this optimizer's state cannot be saved by parts; empty if it can."""
    if optimizers.overlaps(optimizer):
        return (
            f"{key}: {NAME}(overlap_with_ddp=True) leaves its first steps out, and steps in the backward pass, which "
            "cannot be repeated when a peer is lost. Leave overlap_with_ddp out, and call optimizer.step() in the step"
        )
    if isinstance(optimizer.optim, torch.optim.LBFGS):
        return (
            f"{key}: {NAME} with LBFGS makes a line search of its own on each rank. Its state is of all parameters of "
            "a rank together, so other ranks cannot take parts of it. Use LBFGS without ZeroRedundancyOptimizer"
        )
    return ""


class DividedOptimizer:
    """`optimizer`, a `ZeroRedundancyOptimizer`, as this rank saves and restores it. `own_state`: the state by parameter
    that `state_dict` returns instead of the present one."""

    def __init__(self, optimizer: Any, own_state: Mapping[Any, Any] | None = None) -> None:
        self.optimizer = optimizer
        self._own_state = own_state

    @property
    def of_own(self) -> Any:
        """The optimizer of this rank's parameters, whose class a commit names."""
        return self.optimizer.optim

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, in the order of their numbers."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def numbers(self) -> frozenset[int]:
        """The numbers of this rank's parameters."""
        mine = {id(p) for group in self.optimizer.optim.param_groups for p in group["params"]}
        return frozenset(number for number, p in enumerate(self.parameters) if id(p) in mine)

    def state_dict(self) -> dict[str, Any]:
        state = self.optimizer.optim.state if self._own_state is None else self._own_state
        return {
            "state": {number: state[p] for number, p in enumerate(self.parameters) if p in state},
            "param_groups": hyperparameters(self.optimizer),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Replace the present state with this rank's part of `tree`, which may have more."""
        self.optimizer.optim.state.clear()
        self.optimizer.state.clear()  # `ZeroRedundancyOptimizer.load_state_dict` keeps the tensors there, too
        self.add(tree)

    def add(self, tree: Mapping[str, Any]) -> None:
        """Add the part of `tree` that is this rank's. Raises `ValueError` if `tree` has other groups."""
        groups, inner = self.optimizer.param_groups, self.optimizer.optim
        sizes = [len(group["params"]) for group in tree["param_groups"]]
        if sizes != [len(group["params"]) for group in groups]:
            raise ValueError(f"groups of {sizes} parameters, and others in the optimizer passed in")
        for group, saved in zip(groups, tree["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name not in ("params", "param_names")})
        optimizers.sync_groups(self.optimizer, groups, inner.param_groups)
        on_device = {id(p) for group in inner.param_groups for p in group["params"] if _steps_on_device(group)}
        mine = self.numbers()
        for number, p in enumerate(self.parameters):
            if number in mine and number in tree["state"]:
                inner.state[p] = {
                    name: _placed(name, value, p, id(p) in on_device) for name, value in tree["state"][number].items()
                }


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """The groups, with numbers for parameters, as `Optimizer.state_dict` has them."""
    groups: list[dict[str, Any]] = []
    begin = 0
    for group in optimizer.param_groups:
        end = begin + len(group["params"])
        groups.append({**group, "params": list(range(begin, end))})
        begin = end
    return groups


def _steps_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("fused"))


def _placed(name: str, value: Any, parameter: torch.Tensor, on_device: bool) -> Any:
    """A value of a parameter's state where torch's optimizers expect it, with its bits."""
    if not isinstance(value, torch.Tensor) or (name == "step" and not on_device):
        return value
    return value.to(parameter.device)


class DividedState(MutableMapping[str, Any]):
    """`state`, with its divided optimizers as this rank saves and restores them."""

    def __init__(self, state: Mapping[str, Any], divided: Collection[str]) -> None:
        self._state: Any = state
        self._divided = divided

    def __getitem__(self, key: str) -> Any:
        target = self._state[key]
        return Union(DividedOptimizer(target)) if key in self._divided else target

    def __setitem__(self, key: str, value: Any) -> None:
        self._state[key] = value

    def __delitem__(self, key: str) -> None:
        raise TypeError("nothing is taken out of the state of a run")

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def by_parts(state: Mapping[str, Any], model_size: int = 1) -> Mapping[str, Any]:
    """`state` as it is saved: itself if no optimizer in it is divided. `model_size`: over how many ranks one replica of
    the model is divided. Raises `StateMismatch` for an optimizer that cannot be saved."""
    divided = [key for key, target in state.items() if is_divided(target)]
    for key in divided:
        if why := undividable(key, state[key]):
            raise StateMismatch(why)
        if model_size > 1:
            raise StateMismatch(
                f"{key}: with run.mesh(model=N) each rank of a replica has an optimizer of its own, which {NAME} would "
                "divide further, and a commit cannot tell those parts apart. Use an undivided optimizer"
            )
    return DividedState(state, divided) if divided else state
