"""Which of an optimizer's saved state belongs to which of its parameters: by name where the modules are in the state.

`Optimizer.state_dict` counts parameters. After a change of their order, or of the groups, a number is another
parameter, and torch notices nothing as long as the shapes are the same. Invariant: a value goes to the
parameter of the name under which it was saved; without names, only into an optimizer with the same groups.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.format.manifest import Entry
from everstep.checkpoint.load.fitted import Body, Fit
from everstep.checkpoint.load.selection import Selection, below
from everstep.checkpoint.state import named
from everstep.checkpoint.state.divided import DividedOptimizer
from everstep.checkpoint.state.tree import references

# The state of torch's optimizers that has the shape of the parameter.
_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
     "sum", "ax", "prev"}
)  # fmt: skip


def fit(
    key: str, target: torch.optim.Optimizer, body: Body, live: Mapping[str, Any], entries: Mapping[str, Entry],
    selection: Selection, touched: Collection[str], found: Fit,
) -> Body | None:  # fmt: skip
    """The body for this optimizer, with its own numbers; None if it is not to be filled, which `found` is told.
    `touched`: the keys of the state of which anything may be taken."""
    was, now = body.get("class"), type(target).__name__
    if was is not None and was != now:
        found.problems.append(
            f"{key}: the commit holds the state of {was}, the state passed in {now}: make an optimizer of that class, "
            f"or leave it out with exclude=[{key!r}]"
        )
        return None
    tree, saved, names = body["tree"], body.get("names"), live.get("names")
    if type(target).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        if saved is None or names is None or [selection.renamed(name) for name in saved] == names:
            return body
        (found.problems if selection.strict else found.mismatched).append(
            f"{key}: a {now} reads its state in its own way, by the numbers of its parameters, and these are other "
            "parameters than the commit's, or in another order. Give it the same parameters in the same order"
        )
        return None
    sizes = [len(group["params"]) for group in tree["param_groups"]]
    same = sizes == [len(group["params"]) for group in target.param_groups]
    if saved is not None and names is not None:
        there = [selection.renamed(name) for name in saved]
        if selection.whole and there == names and same:
            return body
        order = {id(p): n for p, n in zip(named.parameters_of(target), names, strict=True)}
        if not selection.whole:
            return _partly(key, target, body, there, names, entries, selection, touched, found)
        odd = sorted(set(there) ^ set(names))
        if odd:
            where = "commit" if odd[0] in there else "state passed"
            found.problems.append(f"{key}: {odd[0]} is in the optimizer of the {where} only")
            return None
        try:
            return {**body, "tree": _encoded(named.by_number(target, order, key, _by_name(tree, there)))}
        except StateMismatch as e:
            found.problems.append(str(e))
            return None
    if not same:
        text = f"{key}: groups of {sizes} parameters in the commit, and others in the state passed"
        (found.problems if selection.strict else found.mismatched).append(
            f"{text}; which is which cannot be told without the names, which it has if the modules are in the state too"
        )
        return None
    if (odd_one := _of_another_shape(target, tree, entries)) is not None:
        number, name, shape = odd_one
        (found.problems if selection.strict else found.mismatched).append(
            f"{key}: {name} of parameter {number} has shape {shape} in the commit, and the parameter "
            f"{tuple(named.parameters_of(target)[number].shape)}: they are in another order. Put the modules into the "
            "state too, by whose names each gets its own"
        )
        return None
    return body


def odd_division(target: DividedOptimizer, body: Body, live: Mapping[str, Any]) -> str:
    """Why the body is of another optimizer than this one, whose state is divided among the ranks; empty if it is not.
    Values go to parameters by number, so these must be the same parameters in the same order."""
    if body.get("class") not in (None, live.get("class")):
        return (
            f"the commit holds the state of {body['class']}, the state passed in {live.get('class')}: make it with "
            f"optimizer_class=torch.optim.{body['class']}"
        )
    saved = [len(group["params"]) for group in body["tree"]["param_groups"]]
    here = [len(group["params"]) for group in target.optimizer.param_groups]
    names = (body.get("names"), live.get("names"))
    if saved != here or (None not in names and names[0] != names[1]):
        return (
            f"the commit's groups have {saved} parameters, and those passed in {here}, or others, or in another order: "
            "a ZeroRedundancyOptimizer reads a commit by their numbers. Give it the same ones in the same order"
        )
    return ""


def _of_another_shape(
    target: torch.optim.Optimizer, tree: Mapping[str, Any], entries: Mapping[str, Entry]
) -> tuple[int, str, tuple[int, ...]] | None:
    """The first moment that cannot be of the parameter that has its number: the number, its name and its shape."""
    parameters = named.parameters_of(target)
    for number, values in tree["state"].get("$dict", []) if isinstance(tree["state"], dict) else []:
        if (moment := _moment_unlike(target, parameters[number], values, entries)) is not None:
            return (number, *moment)
    return None


def _partly(
    key: str, target: torch.optim.Optimizer, body: Body, there: list[str], names: list[str],
    entries: Mapping[str, Entry], selection: Selection, touched: Collection[str], found: Fit,
) -> Body | None:  # fmt: skip
    """State for the parameters that are taken and that the commit knows; the others, and groups of such, keep what they
    have. A parameter that the selection leaves out of a module keeps its state too; where nothing is taken of a module,
    the selection speaks of the optimizer alone."""
    saved = _by_name(body["tree"], there)
    originals = dict(zip(there, body["names"], strict=True))
    parameters = dict(zip(names, named.parameters_of(target), strict=True))
    taken = {
        n for n in (*names, *there) if selection.takes(n) or not any(below(n, key, literally=True) for key in touched)
    }
    fits = set[str]()
    for name in names:
        if name not in taken:
            continue
        if name not in originals:
            _told(found, found.missing, selection, f"{key}/{name}", "is in the state passed and not in the commit")
        elif odd := _odd(target, parameters[name], entries.get(originals[name]), saved["state"].get(name), entries):
            _told(found, found.mismatched, selection, f"{key}/{name}", odd)
        else:
            fits.add(name)
    for name in there:
        if name in taken and name not in parameters:
            _told(found, found.not_taken, selection, f"{key}/{name}", "is in the commit and not in the state passed")
        elif name not in fits:
            found.not_taken.append(f"{key}/{name}")
    groups = []
    for group in target.state_dict()["param_groups"]:
        held = [names[n] for n in group["params"] if names[n] in fits]
        options = [saved["param_groups"][name] for name in held]
        for name, option in zip(held, options, strict=True) if selection.strict else ():
            if (what := named.unlike(options[0], option)) is not None:
                found.problems.append(
                    f"{key}: {name} and {held[0]} are in one group, and the commit has another {what!r} for each. "
                    "Group the parameters as the run did that saved it"
                )
                return None
        alike = bool(options) and all(named.unlike(options[0], option) is None for option in options)
        groups.append({**group, **(options[0] if alike else {})})
    state = {n: saved["state"][name] for n, name in enumerate(names) if name in fits and name in saved["state"]}
    kept = [n for n, name in enumerate(names) if name not in fits]
    return {**body, "tree": _encoded({"state": state, "param_groups": groups}), "partial": True, "kept": kept}


def _told(found: Fit, report: list[str], selection: Selection, path: str, what: str) -> None:
    if selection.strict:
        found.problems.append(f"{path} {what}")
    else:
        report.append(path)


def _odd(
    target: torch.optim.Optimizer, parameter: torch.Tensor, saved: Entry | None, values: Any,
    entries: Mapping[str, Entry],
) -> str | None:  # fmt: skip
    """Why the state of the commit's parameter is none for this one, or None. A tied parameter has no entry of its own,
    and then the shape of its moments tells."""
    own = tuple(parameter.shape)
    if saved is not None and saved.shape != own:
        return f"has shape {saved.shape} in the commit, {own} in the state passed"
    if (moment := _moment_unlike(target, parameter, values, entries)) is not None:
        return f"has a {moment[0]} of shape {moment[1]} in the commit, and shape {own} in the state passed"
    return None


def _moment_unlike(
    target: torch.optim.Optimizer, parameter: torch.Tensor, values: Any, entries: Mapping[str, Entry]
) -> tuple[str, tuple[int, ...]] | None:
    """The first moment that cannot be of this parameter, with its shape. Of torch's own optimizers: others may keep one
    of another shape than its parameter."""
    if not type(target).__module__.startswith("torch.optim.") or not isinstance(values, dict):
        return None
    for name, value in values.items():
        entry = entries.get(value.get("$tensor", "")) if isinstance(value, dict) else None
        if name in _MOMENTS and entry is not None and entry.shape != tuple(parameter.shape):
            return name, entry.shape
    return None


def _by_name(tree: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """An encoded `state_dict` with the names for the numbers, as `named.by_name` has it."""
    pairs = tree["state"].get("$dict", []) if isinstance(tree["state"], dict) else []
    options = {
        names[number]: {option: value for option, value in group.items() if option not in ("params", "param_names")}
        for group in tree["param_groups"]
        for number in group["params"]
    }
    rest = {name: value for name, value in tree.items() if name not in ("state", "param_groups")}
    return {**rest, "state": {names[number]: value for number, value in pairs}, "param_groups": options}


def _encoded(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "state": {"$dict": [[number, value] for number, value in tree["state"].items()]}}


def tensors_of(body: Mapping[str, Any]) -> dict[int | str, list[str]]:
    """Parameter's number, or name, → names of its state's tensors, from the encoded state of an optimizer."""
    state = body.get("tree", {}).get("state", {})
    if body.get("kind") == "optimizer":
        return {name: list(references(value)) for name, value in state.items()}
    pairs = state.get("$dict", []) if isinstance(state, dict) else []
    return {
        pair[0]: list(references(pair[1]))
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int)
    }
