"""Fits a commit into the state that was passed: decides which part goes where, before the first byte is read.

Knows trees, shapes and names, and reads nothing. Invariants: a load that is not possible as requested is refused here,
with the names at fault, before the state is changed; and no value is put under another name.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.format.manifest import CommitRecord, Entry
from everstep.checkpoint.load.selection import LoadReport, Selection, below
from everstep.checkpoint.state import named
from everstep.checkpoint.state.capture import MALFORMED, Captured, body_for_rank, kind_of
from everstep.checkpoint.state.divided import DividedOptimizer
from everstep.checkpoint.state.layouts import crossed
from everstep.checkpoint.state.modules import Answer, bare, buffer_names, is_free, late_buffers, migrated, unset_buffers
from everstep.checkpoint.state.tree import DTYPES, join, memory_of, references
from everstep.checkpoint.state.union import Union, inside

# --- fitted
# The result of fitting a commit into a state: what goes where, what is left out, and what does not fit.

NAMED: Final = 5  # problems that an error names

LACKING: Final = "is in the state passed and not in the commit"
BEYOND: Final = "is in the commit and not in the state passed"
UNSET: Final = " (the buffer is None here, by a setting of torch's module: make it as the run did that saved it)"

Body = dict[str, Any]


@dataclass(slots=True)
class Fit:
    """`bodies`: the content for each key of the state, as `state.apply` takes it. `live`: for each of the commit's
    tensors, the names in `Captured.tensors` of the live tensors that it is put into. `judges`: for each module that is
    filled in part, the names that the module itself accepts or reports (`modules.is_free`)."""

    bodies: dict[str, Body] = field(default_factory=dict)
    live: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    not_taken: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    judges: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def report(self) -> LoadReport:
        return LoadReport(tuple(self.missing), tuple(self.not_taken), tuple(self.mismatched))

    def judged(self, answers: Mapping[str, Answer], selection: Selection) -> None:
        """Add the modules' own reports (see `state.apply`) to this one. Raises `StateMismatch` for them if the
        selection is strict. They are known only after the load, so the state is changed by then."""
        problems: list[str] = []
        for key, answer in answers.items():
            own = self.judges.get(key, ())
            lacking = [join(key, name) for name in answer.missing if is_free(name, own)]
            lacking = [path for path in lacking if selection.takes(path)]
            beyond = [join(key, name) for name in answer.unexpected if is_free(name, own)]
            problems += [f"{path} {LACKING}" for path in lacking] + [f"{path} {BEYOND}" for path in beyond]
            self.missing += lacking
            self.not_taken += beyond
        if problems and selection.strict:
            more = f"; and {len(problems) - NAMED} more" * (len(problems) > NAMED)
            raise StateMismatch(
                f"{'; '.join(problems[:NAMED])}{more}. The module reads such names by itself, so this is known only "
                "after it was filled with the rest: do not train on. strict=False leaves them and reports them, and "
                "exclude= leaves them out"
            )


# --- fit optimizer
# Which of an optimizer's saved state belongs to which of its parameters: by name where the modules are in the state.
# `Optimizer.state_dict` counts parameters. After a change of their order, or of the groups, a number is another
# parameter, and torch notices nothing as long as the shapes are the same. Invariant: a value goes to the parameter of
# the name under which it was saved; without names, only into an optimizer with the same groups.

# The state of torch's optimizers that has the shape of the parameter.
_MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
     "sum", "ax", "prev"}
)  # fmt: skip


def fit_optimizer(
    key: str, target: torch.optim.Optimizer, body: Body, live: Mapping[str, Any], entries: Mapping[str, Entry],
    selection: Selection, touched: Collection[str], fitted: Fit,
) -> Body | None:  # fmt: skip
    """The body for this optimizer, with its own numbers. None if it is not to be filled; the reason is added to
    `fitted`. `touched`: the keys of the state that the selection may take something of."""
    was, now = body.get("class"), type(target).__name__
    if was is not None and was != now:
        fitted.problems.append(
            f"{key}: the commit holds the state of {was}, the state passed in {now}: make an optimizer of that class, "
            f"or leave it out with exclude=[{key!r}]"
        )
        return None
    tree, saved, names = body["tree"], body.get("names"), live.get("names")
    if type(target).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        if saved is None or names is None or [selection.renamed(name) for name in saved] == names:
            return body
        (fitted.problems if selection.strict else fitted.mismatched).append(
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
            return _partly(key, target, body, there, names, entries, selection, touched, fitted)
        odd = sorted(set(there) ^ set(names))
        if odd:
            where = "commit" if odd[0] in there else "state passed"
            fitted.problems.append(f"{key}: {odd[0]} is in the optimizer of the {where} only")
            return None
        try:
            return {**body, "tree": _encoded(named.by_number(target, order, key, _by_name(tree, there)))}
        except StateMismatch as e:
            fitted.problems.append(str(e))
            return None
    if not same:
        text = f"{key}: groups of {sizes} parameters in the commit, and others in the state passed"
        (fitted.problems if selection.strict else fitted.mismatched).append(
            f"{text}; which is which cannot be told without the names, which it has if the modules are in the state too"
        )
        return None
    if (odd_one := _of_another_shape(target, tree, entries)) is not None:
        number, name, shape = odd_one
        (fitted.problems if selection.strict else fitted.mismatched).append(
            f"{key}: {name} of parameter {number} has shape {shape} in the commit, and the parameter "
            f"{tuple(named.parameters_of(target)[number].shape)}: they are in another order. Put the modules into the "
            "state too, by whose names each gets its own"
        )
        return None
    return body


def odd_division(target: DividedOptimizer, body: Body, live: Mapping[str, Any]) -> str:
    """Why the body does not fit this optimizer, whose state is divided among the ranks; empty if it fits. Values go to
    parameters by number, so the commit must have the same parameters in the same order."""
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
    """The first moment that cannot belong to the parameter of its number: the number, its name and its shape."""
    parameters = named.parameters_of(target)
    for number, values in tree["state"].get("$dict", []) if isinstance(tree["state"], dict) else []:
        if (moment := _moment_unlike(target, parameters[number], values, entries)) is not None:
            return (number, *moment)
    return None


def _partly(
    key: str, target: torch.optim.Optimizer, body: Body, there: list[str], names: list[str],
    entries: Mapping[str, Entry], selection: Selection, touched: Collection[str], fitted: Fit,
) -> Body | None:  # fmt: skip
    """The state for the parameters that the selection takes and the commit has. Other parameters, and groups of only
    such, keep their state. If the selection leaves a parameter of a module out, its optimizer state stays too. If
    nothing of a module is taken, all of its optimizer state may be."""
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
            _report(fitted, fitted.missing, selection, f"{key}/{name}", LACKING)
        elif odd := _odd(target, parameters[name], entries.get(originals[name]), saved["state"].get(name), entries):
            _report(fitted, fitted.mismatched, selection, f"{key}/{name}", odd)
        else:
            fits.add(name)
    for name in there:
        if name in taken and name not in parameters:
            _report(fitted, fitted.not_taken, selection, f"{key}/{name}", BEYOND)
        elif name not in fits:
            fitted.not_taken.append(f"{key}/{name}")
    groups = []
    for group in target.state_dict()["param_groups"]:
        taken_names = [names[n] for n in group["params"] if names[n] in fits]
        options = [saved["param_groups"][name] for name in taken_names]
        for name, option in zip(taken_names, options, strict=True) if selection.strict else ():
            if (what := named.unlike(options[0], option)) is not None:
                fitted.problems.append(
                    f"{key}: {name} and {taken_names[0]} are in one group, and the commit has another {what!r} for "
                    "each. Group the parameters as the run did that saved it"
                )
                return None
        alike = bool(options) and all(named.unlike(options[0], option) is None for option in options)
        groups.append({**group, **(options[0] if alike else {})})
    state = {n: saved["state"][name] for n, name in enumerate(names) if name in fits and name in saved["state"]}
    kept = [n for n, name in enumerate(names) if name not in fits]
    return {**body, "tree": _encoded({"state": state, "param_groups": groups}), "partial": True, "kept": kept}


def _report(fitted: Fit, paths: list[str], selection: Selection, path: str, problem: str) -> None:
    if selection.strict:
        fitted.problems.append(f"{path} {problem}")
    else:
        paths.append(path)


def _odd(
    target: torch.optim.Optimizer, parameter: torch.Tensor, saved: Entry | None, values: Any,
    entries: Mapping[str, Entry],
) -> str | None:  # fmt: skip
    """Why the state of the commit's parameter does not fit this one, or None. A tied parameter has no entry of its own;
    then the shape of its moments is compared."""
    own = tuple(parameter.shape)
    if saved is not None and saved.shape != own:
        return f"has shape {saved.shape} in the commit, {own} in the state passed"
    if (moment := _moment_unlike(target, parameter, values, entries)) is not None:
        return f"has a {moment[0]} of shape {moment[1]} in the commit, and shape {own} in the state passed"
    return None


def _moment_unlike(
    target: torch.optim.Optimizer, parameter: torch.Tensor, values: Any, entries: Mapping[str, Entry]
) -> tuple[str, tuple[int, ...]] | None:
    """The first moment that cannot belong to this parameter, with its shape. Only torch's own optimizers are checked:
    moments of others may have another shape than the parameter."""
    if not type(target).__module__.startswith("torch.optim.") or not isinstance(values, dict):
        return None
    for name, value in values.items():
        entry = entries.get(value.get("$tensor", "")) if isinstance(value, dict) else None
        if name in _MOMENTS and entry is not None and entry.shape != tuple(parameter.shape):
            return name, entry.shape
    return None


def _by_name(tree: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """An encoded `state_dict` with names instead of numbers, in the form of `named.by_name`."""
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


# --- fit values
# Which tensors and arrays inside plain values have another form in the commit than in the state that was passed.
# Invariant: a live tensor or array that a commit's value would replace, instead of filling it, is named.

_TAGS: Final = {"$tensor": "tensor", "$ndarray": "array"}
_INSTEAD: Final = "None in its place takes what the commit has"


@dataclass(frozen=True, slots=True)
class Misfit:
    """A path in a value, and what does not fit there. `shape`: only the shape differs, so it may be left out."""

    path: str
    text: str
    shape: bool = False


def misfits(
    tree: Any, live: Any, path: str, entries: Mapping[str, Entry], tensors: Mapping[str, torch.Tensor], cast: bool
) -> Iterator[Misfit]:
    """The paths where `live` has a tensor or an array that cannot be filled with the value in `tree`."""
    if (own := _tagged(live)) is not None:
        theirs = _tagged(tree)
        if theirs is None or theirs[0] != own[0]:
            there = f"an {theirs[0]}" if theirs and theirs[0] == "array" else "a tensor" if theirs else f"no {own[0]}"
            here = "an array" if own[0] == "array" else "a tensor"
            yield Misfit(path, f"{path}: {there} in the commit, {here} in the state passed; {_INSTEAD}", True)
            return
        tensor, entry = tensors[own[1]], entries[theirs[1]]
        if entry.shape != tuple(tensor.shape):
            text = f"{path}: shape {entry.shape} in the commit, {tuple(tensor.shape)} in the state passed; {_INSTEAD}"
            yield Misfit(path, text, True)
        elif entry.dtype != DTYPES.get(tensor.dtype) and not cast:
            yield Misfit(path, f"{path}: {entry.dtype} in the commit, {DTYPES.get(tensor.dtype)} in the state passed")
        return
    others = dict(_items(tree))
    for name, value in _items(live):
        if name in others:
            shown = join(path, name[1] if isinstance(name[1], str | int) else name[0])
            yield from misfits(others[name], value, shown, entries, tensors, cast)


def _items(tree: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """The items of an encoded container: each with a text that is unique in it, and its name."""
    if isinstance(tree, list):
        yield from (((f"[{n}]", n), value) for n, value in enumerate(tree))
    elif isinstance(tree, dict) and len(tree) == 1 and isinstance(parts := tree.get("$tuple"), list):
        yield from (((f"({n})", n), value) for n, value in enumerate(parts))
    elif isinstance(tree, dict) and len(tree) == 1 and isinstance(pairs := tree.get("$dict"), list):
        yield from (((repr(key), key if isinstance(key, str | int) else None), value) for key, value in pairs)
    elif isinstance(tree, dict):
        yield from (((repr(key), key), value) for key, value in tree.items() if not key.startswith("$"))


def _tagged(tree: Any) -> tuple[str, str] | None:
    """The kind of an encoded tensor or array, and its name in the commit."""
    if isinstance(tree, dict) and len(tree) == 1:
        ((tag, name),) = tree.items()
        if tag in _TAGS and isinstance(name, str):
            return _TAGS[tag], name
    return None


# --- fit

log = logging.getLogger("everstep.checkpoint")


def fit(
    state: Mapping[str, Any], captured: Captured, record: CommitRecord, rank: int, selection: Selection | None = None
) -> Fit:
    """Raises `StateMismatch` naming what the commit lacks, has too much, or has in another shape or type."""
    chosen = selection or Selection()
    values: Mapping[str, Any] = record.values if isinstance(record.values, dict) else {}
    saved = _renamed(values.get("state", {}), state, chosen)
    if not chosen.whole:
        chosen.check(_paths(values.get("state", {})), (*_paths(captured.values), *captured.own_values))
    parts: dict[str, list[str]] = {key: [] for key in state}
    for bodies in (saved, captured.values):
        for key, body in bodies.items():
            parts.setdefault(key, []).extend(_paths({key: body}))
    touched = {key for key, paths in parts.items() if chosen.touches(paths or [key])}
    fitting = _Fitting(state, captured, {e.name: e for e in record.entries}, chosen, touched)
    for key, target in state.items():
        if key not in touched:
            continue
        if getattr(target, "everstep_per_rank", False):
            ranks = values.get("ranks", [])
            if rank < len(ranks) and key in ranks[rank]:
                fitting.fitted.bodies[key] = ranks[rank][key]
        elif key in saved:
            if isinstance(target, Union) and not chosen.whole:
                raise StateMismatch(
                    f"{key}: what is marked with everstep.Union is loaded as it was saved: leave strict=False, "
                    "include=, exclude= and rename= out, or load the key in another call"
                )
            fitting.add(key, target, body_for_rank(state, key, saved[key]))
        elif not getattr(target, "everstep_optional", False):
            if chosen.strict:
                raise StateMismatch(f"the commit has no {key!r}; it has {', '.join(sorted(saved)) or 'nothing'}")
            fitting.fitted.missing.append(key)
    fitted = fitting.fitted
    fitted.not_taken += [key for key in saved if key not in state or key not in touched]
    if fitted.problems:
        more = f"; and {len(fitted.problems) - NAMED} more" * (len(fitted.problems) > NAMED)
        unmarked = [
            k for k, body in saved.items() if body.get("union") and not isinstance(state.get(k, Union({})), Union)
        ]
        partly = f". If a rank holds only some of {unmarked[0]}, mark it with everstep.Union" if unmarked else ""
        raise StateMismatch(
            f"the commit of step {record.step} does not fit the state passed in: {'; '.join(fitted.problems[:NAMED])}"
            f"{more}. Nothing was changed. strict=False loads what fits, cast=True converts types, and include=, "
            f"exclude= and rename= say what to take{partly}"
        )
    return fitted


class _Fitting:
    """Fits the keys of one state, one after the other."""

    def __init__(
        self, state: Mapping[str, Any], captured: Captured, entries: Mapping[str, Entry], selection: Selection,
        touched: set[str],
    ) -> None:  # fmt: skip
        self.fitted = Fit()
        self._state = state
        self._captured = captured
        self._entries = entries
        self._selection = selection
        self._touched = touched
        self._of_session = any(getattr(target, "everstep_of_session", False) for target in state.values())

    def add(self, key: str, marked: Any, body: Body) -> None:
        try:
            self._add(key, marked, body)
        except MALFORMED as e:
            # It may be a fault of this code, so the lines are logged. The error's text is not: it may quote the commit.
            log.error("%r: values that cannot be read:\n%s", key, "".join(traceback.format_tb(e.__traceback__)))
            self.fitted.problems.append(f"{key}: the commit's values for it are malformed ({e!r})")

    def _add(self, key: str, marked: Any, body: Body) -> None:
        live: Any = self._captured.values[key]
        kind, saved, target = kind_of(marked), body["kind"], inside(marked)
        if kind == "module" and (saved == "module" or _is_state_dict(body["tree"])):
            self._module(key, bare(target), body, live)
        elif saved == "optimizer" and isinstance(target, torch.optim.Optimizer):
            if body.get("class", type(target).__name__) != type(target).__name__:
                text = f"{key}: the commit holds the state of {body['class']}, the state passed in"
                self.fitted.problems.append(f"{text} {type(target).__name__}: make an optimizer of that class")
                return
            self.fitted.bodies[key] = {**body, "cast": self._selection.cast}
        elif kind == "stateful" and saved == "stateful":
            self._stateful(key, target, body, live)
        elif kind == "value" and saved in ("value", "module"):
            self._value(key, target, body, live["tree"])
        else:
            self.fitted.problems.append(
                f"{key}: the commit holds a {_WORDS[saved]}, the state passed in a {_WORDS[kind]}"
            )
            return
        if key in self.fitted.bodies:
            for name, own in _pairs(self.fitted.bodies[key]["tree"], live["tree"]):
                self.fitted.live.setdefault(name, []).append(own)

    def _module(self, key: str, module: torch.nn.Module, body: Body, live: Any) -> None:
        own, free = live["tree"], migrated(module)
        if self._of_session:
            # These are loaded before the module gives its buffers the size that they had when they were saved.
            free += buffer_names(module)
        else:
            free += tuple(late_buffers(module))
        unset = unset_buffers(module)
        tree, complete = self._named(key, body["tree"], own, free, unset, cast=self._selection.cast)
        metadata = live.get("metadata") if self._selection.rename else body.get("metadata")
        # A module that judges names by itself raises for those that it lacks, unless it is filled in part.
        partial = not complete or bool(free and not self._selection.strict)
        self.fitted.bodies[key] = {"kind": "module", "tree": tree, "partial": partial}
        if partial:
            self.fitted.judges[key] = free
        if metadata:
            self.fitted.bodies[key]["metadata"] = metadata

    def _named(
        self, key: str, tree: Any, own: Any, free: tuple[str, ...], unset: Collection[str], *, cast: bool
    ) -> tuple[dict[str, Any], bool]:
        """The entries of one mapping of names that go into another, and whether that is all of both. Names in `free`
        are left to the module, which converts them itself. `unset`: buffers that are None."""
        fitted, chosen = self.fitted, self._selection
        taken: dict[str, Any] = {}
        complete = True
        for name, value in tree.items():
            path = join(key, name)
            if not chosen.takes(path):
                fitted.not_taken.append(path)
            elif (
                self._same_type(path, value, own.get(name), cast)
                if is_free(name, free)
                else name in own and self._same_form(path, value, own[name], cast)
            ):
                taken[name] = value
                continue
            elif name not in own:
                _report(fitted, fitted.not_taken, chosen, path, BEYOND + UNSET * (name in unset))
            complete = False
        for name in own:
            path = join(key, name)
            if name in tree or (is_free(name, free) and chosen.takes(path)):
                continue
            complete = False
            if chosen.takes(path):
                _report(fitted, fitted.missing, chosen, path, LACKING)
        return taken, complete

    def _same_form(self, path: str, value: Any, own: Any, cast: bool) -> bool:
        """Whether a tensor has the shape and type of the live one. If not, the problem is added to `fitted`."""
        live, entry = self._tensor(own), self._entry(value)
        if live is None and entry is None:
            return True
        fitted = self.fitted
        if live is None or entry is None:
            fitted.problems.append(f"{path}: a tensor in the {'commit' if live is None else 'state passed'} only")
            return False
        shape = tuple(live.shape)
        # A module takes one number as a scalar, as torch's load_state_dict does.
        scalar = shape == () and entry.shape == (1,) and kind_of(self._state.get(path.partition("/")[0])) == "module"
        if entry.shape != shape and not scalar:
            text = f"{path}: shape {entry.shape} in the commit, {shape} in the state passed"
            (fitted.problems if self._selection.strict else fitted.mismatched).append(text)
            return False
        return self._same_type(path, value, own, cast)

    def _same_type(self, path: str, value: Any, own: Any, cast: bool) -> bool:
        """Whether two tensors have one dtype. If not, the problem is added to `fitted`. An extra state may have any."""
        live, entry = self._tensor(own), self._entry(value)
        if live is None or entry is None or cast or path.endswith("_extra_state"):
            return True
        if entry.dtype != DTYPES.get(live.dtype):
            text = f"{path}: {entry.dtype} in the commit, {DTYPES.get(live.dtype)} in the state passed"
            self.fitted.problems.append(text)
            return False
        return True

    def _stateful(self, key: str, target: Any, body: Body, live: Any) -> None:
        if isinstance(target, torch.optim.Optimizer):
            fitted_body = fit_optimizer(
                key, target, body, live, self._entries, self._selection, self._touched, self.fitted
            )
            if fitted_body is None:
                return
            body = fitted_body
            for name, own in () if self._selection.cast else _pairs(body["tree"], live["tree"]):
                entry, tensor = self._entries[name], self._captured.tensors[own]
                if entry.shape == tuple(tensor.shape) and entry.dtype != DTYPES.get(tensor.dtype):
                    text = f"{entry.dtype} in the commit, {DTYPES.get(tensor.dtype)} in the state passed"
                    self.fitted.problems.append(f"{own}: {text}")
        elif isinstance(target, DividedOptimizer) and (why := odd_division(target, body, live)):
            self.fitted.problems.append(f"{key}: {why}")
            return
        self.fitted.bodies[key] = {**body, "cast": self._selection.cast}

    def _value(self, key: str, target: Any, body: Body, own: Any) -> None:
        tree, fitted, cast = body["tree"], self.fitted, self._selection.cast
        if isinstance(target, torch.Tensor):
            if not self._same_form(key, tree, own, cast):
                return
        elif body["kind"] == "module" or (_is_plain(tree) and _is_plain(own) and not self._selection.whole):
            if not _is_plain(own):
                fitted.problems.append(f"{key}: the commit holds a module, the state passed in no module or dict")
                return
            if body["kind"] == "module":
                tree, complete = self._named(key, tree, own, (), (), cast=cast)
            else:
                complete = False
                fitted.not_taken += [join(key, k) for k in tree if not self._selection.takes(join(key, k))]
                fitted.missing += [join(key, k) for k in own if k not in tree]
                taken = [k for k in tree if self._selection.takes(join(key, k))]
                tree = {k: tree[k] for k in taken if k not in own or self._fits(join(key, k), tree[k], own[k])}
            fitted.bodies[key] = {"kind": "value", "tree": tree, "partial": not complete, "cast": cast}
            return
        elif not self._fits(key, tree, own):
            return
        elif not isinstance(target, dict | list) and not isinstance(self._state, MutableMapping):
            fitted.problems.append(f"{key}: a plain value can be restored only into a mutable mapping (a dict)")
            return
        fitted.bodies[key] = {"kind": "value", "tree": tree, "cast": cast}

    def _fits(self, path: str, tree: Any, own: Any) -> bool:
        """Whether all tensors and arrays in a plain value can be filled with the commit's. If not, the problems are
        added to `fitted`."""
        odd = list(misfits(tree, own, path, self._entries, self._captured.tensors, self._selection.cast))
        if self._of_session:  # the script has started again, and its values in the commit may have grown by then
            odd = [misfit for misfit in odd if not misfit.shape]
        for misfit in odd:
            left = misfit.shape and not self._selection.strict
            (self.fitted.mismatched if left else self.fitted.problems).append(misfit.text)
        if odd and all(misfit.path != path for misfit in odd):
            self.fitted.not_taken.append(path)  # all of it, also the parts that fit
        return not odd

    def _tensor(self, own: Any) -> torch.Tensor | None:
        return self._captured.tensors[own["$tensor"]] if _is_tensor(own) else None

    def _entry(self, value: Any) -> Entry | None:
        return self._entries[value["$tensor"]] if _is_tensor(value) else None


_WORDS: Final = {
    "optimizer": "marked optimizer",
    "module": "module",
    "stateful": "object with a state_dict",
    "value": "plain value",
}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and "$tensor" in value


def _is_plain(tree: Any) -> bool:
    """Whether an encoded tree is a mapping whose keys are texts, and no tagged value."""
    return isinstance(tree, dict) and not any(key.startswith("$") for key in tree)


def _is_state_dict(tree: Any) -> bool:
    """Whether an encoded tree is a module's state_dict that was saved as a plain dict."""
    return _is_plain(tree) and bool(tree) and all(_is_tensor(value) for value in tree.values())


def _pairs(tree: Any, live: Any) -> Iterator[tuple[str, str]]:
    """The names of the commit's tensors and of the live ones that have the same paths in two encoded trees."""
    if isinstance(tree, list) and isinstance(live, list):
        for saved, own in zip(tree, live, strict=False):
            yield from _pairs(saved, own)
    elif isinstance(tree, dict) and isinstance(live, dict):
        if "$dict" in tree and "$dict" in live:
            others = {repr(pair[0]): pair[1] for pair in live["$dict"]}
            for key, value in tree["$dict"]:
                yield from _pairs(value, others.get(repr(key)))
            return
        for tag, value in tree.items():
            if tag in ("$tensor", "$ndarray") and isinstance(live.get(tag), str):
                yield value, live[tag]
            elif tag in live:
                yield from _pairs(value, live[tag])


def _paths(bodies: Mapping[str, Any]) -> list[str]:
    """The names below the keys of encoded bodies, and the keys that have no names below them."""
    paths = []
    for key, body in bodies.items():
        named = body["kind"] != "stateful" and _is_plain(body["tree"])
        paths += [join(key, name) for name in body["tree"]] if named and body["tree"] else [key]
    return paths


def _renamed(saved: Mapping[str, Body], state: Mapping[str, Any], selection: Selection) -> dict[str, Body]:
    """The commit's bodies under their names after `rename`. Raises `StateMismatch` if two get one name."""
    if not selection.rename:
        return dict(saved)
    renamed: dict[str, Body] = {}
    for key, body in saved.items():
        if body["kind"] == "stateful" or not _is_plain(body["tree"]):
            parts = [(key, selection.renamed(key), None)]
        else:
            parts = [(name, selection.renamed(join(key, name)), value) for name, value in body["tree"].items()]
        for old, path, value in parts:
            if value is None:
                if path in renamed:
                    raise StateMismatch(f"rename: {key} and another key of the commit are both to be {path!r}")
                renamed[path] = body
                continue
            new = max((k for k in state if path.startswith(f"{k}/")), key=len, default=path.partition("/")[0])
            into = renamed.setdefault(new, {**body, "tree": {}})
            name = path[len(new) + 1 :].replace("~1", "/").replace("~0", "~")
            if name in into["tree"]:
                raise StateMismatch(f"rename: {join(key, old)} and another name of the commit are both to be {path!r}")
            into["tree"][name] = value
    return renamed


def fillable(fitted: Fit, captured: Captured, entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    """The live tensors that the commit's bytes may be read into, by the commit's names.

    They are those of keys where each tensor of the commit goes to one live tensor of its shape and type, and each live
    tensor is filled. Tensors whose memory overlaps are left out: the commit may have two values for it."""
    targets: dict[str, torch.Tensor] = {}
    shared = crossed(captured.tensors)
    sources: dict[str, set[str]] = {}  # live tensor → the commit's tensors that go into it, of any key
    for name, owns in fitted.live.items():
        for live in owns:
            sources.setdefault(live, set()).add(name)
    shared |= {live for live, names in sources.items() if len(names) > 1}
    for key, body in fitted.bodies.items():
        own: Any = captured.values.get(key)
        if own is None or body.get("partial"):
            continue
        pairs = set(_pairs(body["tree"], own["tree"]))
        ours, theirs = set(references(own["tree"])), set(references(body["tree"]))
        alone = len(pairs) == len(ours) == len(theirs) == len({o for _, o in pairs}) == len({t for t, _ in pairs})
        # In a union each tied tensor has a name of its own. Two of them must not be read into one memory at once.
        if key in captured.unions:
            alone = alone and len({memory_of(captured.tensors[o]) for o in ours}) == len(ours)
        if alone and not ours & shared and all(_equal(captured.tensors[o], entries.get(t)) for t, o in pairs):
            targets |= {t: captured.tensors[o] for t, o in pairs}
    return targets


def _equal(tensor: torch.Tensor, entry: Entry | None) -> bool:
    return entry is not None and tuple(tensor.shape) == entry.shape and DTYPES.get(tensor.dtype) == entry.dtype
