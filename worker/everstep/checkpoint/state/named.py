"""An optimizer's state by the names of its parameters, and back to the numbers that `Optimizer.state_dict` uses.

Numbers are places in one process' optimizer: on another rank, or after a change of the order, the same number is
another parameter. A name is the same everywhere. Knows torch's layout of an optimizer's `state_dict`, not files.
Invariant: each value goes to the parameter of the name under which it was saved, or an error says which one it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from everstep.checkpoint.errors import StateMismatch

# The entries of a group that list its parameters: by number, and by the names that the optimizer was made with.
_PARAMETER_LISTS: Final = ("params", "param_names")


def names_of(modules: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """The name of each parameter of these modules (by key in the state, without wrappers) by its `id`: the key and the
    module's own name for it, `model.layers.0.weight`. A tied parameter has the first of its names.

    Raises `StateMismatch` if two parameters have one name.
    """
    by_id: dict[int, str] = {}
    owner: dict[str, int] = {}
    for key, module in modules.items():
        for path, parameter in module.named_parameters(remove_duplicate=False):
            name = f"{key}.{path}"
            if owner.setdefault(name, id(parameter)) != id(parameter):
                raise StateMismatch(
                    f"{name}: two parameters of the state have this name; rename one of the state's keys"
                )
            by_id.setdefault(id(parameter), name)
    return by_id


def numbered(optimizer: torch.optim.Optimizer, names: Mapping[int, str], key: str) -> list[str]:
    """The names of an optimizer's parameters, in the order of the numbers in its `state_dict`.

    Raises `StateMismatch` for a parameter without a name, or if two have the same.
    """
    order: list[str] = []
    for at, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise StateMismatch(
                    f"{key}: parameter {number} of group {at}, of shape {tuple(parameter.shape)}, belongs to no module "
                    "of the state, so it has no name. Give the module that holds it in the same state"
                )
            order.append(names[id(parameter)])
    if len(set(order)) < len(order):
        twice = sorted({name for name in order if order.count(name) > 1})
        raise StateMismatch(f"{key}: {twice[0]} is in the optimizer twice; give each parameter once")
    return order


def by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str], key: str) -> dict[str, Any]:
    """`optimizer.state_dict()` with names instead of numbers: `{"state": {name: …}, "param_groups": {name: the options
    of its group}}`. Each parameter has its own options, because another rank, or a later run, may group them otherwise.

    Raises `StateMismatch` as `numbered` does, and for state that belongs to no parameter.
    """
    order = numbered(optimizer, names, key)
    tree = optimizer.state_dict()
    state: dict[str, Any] = {}
    for number, value in tree["state"].items():
        if not isinstance(number, int) or not 0 <= number < len(order):
            raise StateMismatch(f"{key}: its state has {number!r}, which is the number of no parameter")
        state[order[number]] = value
    options = {
        order[number]: {name: value for name, value in group.items() if name not in _PARAMETER_LISTS}
        for group in tree["param_groups"]
        for number in group["params"]
    }
    rest = {name: value for name, value in tree.items() if name not in ("state", "param_groups")}
    return {**rest, "state": state, "param_groups": options}


def by_number(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], key: str, tree: Mapping[str, Any]
) -> dict[str, Any]:
    """The argument for `optimizer.load_state_dict`, from the result of `by_name` for these parameters.

    Raises `StateMismatch` for a parameter that `tree` lacks, and for parameters of one group whose options differ.
    """
    order = numbered(optimizer, names, key)
    options, state = tree["param_groups"], tree["state"]
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        new_group = {name: value for name, value in group.items() if name in _PARAMETER_LISTS or not group["params"]}
        for number in group["params"]:
            name = order[number]
            if name not in options:
                raise StateMismatch(f"{key}: the commit has no optimizer state for the parameter {name!r}")
            first = options[order[group["params"][0]]]
            if (what := unlike(first, options[name])) is not None:
                raise StateMismatch(
                    f"{key}: {name} and {order[group['params'][0]]} are in one group, and the commit has another "
                    f"{what!r} for each. Group the parameters as the run did that saved it"
                )
            new_group |= first
        groups.append(new_group)
    rest = {name: value for name, value in tree.items() if name not in ("state", "param_groups")}
    numbers = {number: state[name] for number, name in enumerate(order) if name in state}
    return {**rest, "state": numbers, "param_groups": groups}


def keep_types(optimizer: torch.optim.Optimizer, tree: Mapping[str, Any]) -> None:
    """Put back the values that torch has cast. It casts an optimizer's state to the parameter's type, so float32
    moments of a bfloat16 parameter would lose bits."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in tree["state"].items() if isinstance(tree.get("state"), dict) else ():
        if not isinstance(number, int) or number >= len(parameters) or not isinstance(values, dict):
            continue
        live = optimizer.state.get(parameters[number], {})
        for name, value in values.items():
            current = live.get(name)
            if name == "step" or not isinstance(value, torch.Tensor) or not isinstance(current, torch.Tensor):
                continue  # torch chooses the step's type by the device that the optimizer computes it on
            if value.dtype != current.dtype:
                live[name] = value.to(device=current.device)


def unlike(left: Mapping[str, Any], right: Mapping[str, Any]) -> str | None:
    """The first option whose value is not the same for two parameters; None if there is none."""
    for name in sorted(set(left) | set(right)):
        if name not in left or name not in right or not _same(left[name], right[name]):
            return name
    return None


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


def names_in(optimizer: torch.optim.Optimizer, paths: Mapping[int, str]) -> list[str] | None:
    """The paths of an optimizer's parameters in the order of their numbers; None unless each has a path of its own."""
    in_order = [paths.get(id(parameter), "") for parameter in parameters_of(optimizer)]
    return in_order if all(in_order) and len(set(in_order)) == len(in_order) else None


def parameters_of(target: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in target.param_groups for p in group["params"]]
