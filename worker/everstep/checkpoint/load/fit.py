"""Fits a commit into the state that was passed: decides which part goes where, before the first byte is read.

Knows trees, shapes and names, and reads nothing. Invariant: what cannot be loaded as it was asked for is refused here,
with every name that is at fault, while the state is still as it was; and no value is put under another name.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any, Final

import torch

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.format.manifest import CommitRecord, Entry
from everstep.checkpoint.load import fit_optimizer
from everstep.checkpoint.load.fit_values import misfits
from everstep.checkpoint.load.fitted import BEYOND, LACKING, NAMED, UNSET, Body, Fit
from everstep.checkpoint.load.selection import Selection
from everstep.checkpoint.state.capture import MALFORMED, Captured, asked_of, kind_of
from everstep.checkpoint.state.divided import DividedOptimizer
from everstep.checkpoint.state.memory import crossed
from everstep.checkpoint.state.modules import bare, buffer_names, is_free, migrated, unset_buffers
from everstep.checkpoint.state.tree import DTYPES, join, place, references
from everstep.checkpoint.state.union import Union, inside

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
                fitting.found.bodies[key] = ranks[rank][key]
        elif key in saved:
            if isinstance(target, Union) and not chosen.whole:
                raise StateMismatch(
                    f"{key}: what is marked with everstep.Union is loaded as it was saved: leave strict=False, "
                    "include=, exclude= and rename= out, or load the key in another call"
                )
            fitting.add(key, target, asked_of(state, key, saved[key]))
        elif not getattr(target, "everstep_optional", False):
            if chosen.strict:
                raise StateMismatch(f"the commit has no {key!r}; it has {', '.join(sorted(saved)) or 'nothing'}")
            fitting.found.missing.append(key)
    found = fitting.found
    found.not_taken += [key for key in saved if key not in state or key not in touched]
    if found.problems:
        more = f"; and {len(found.problems) - NAMED} more" * (len(found.problems) > NAMED)
        unmarked = [
            k for k, body in saved.items() if body.get("union") and not isinstance(state.get(k, Union({})), Union)
        ]
        partly = f". If a rank holds only some of {unmarked[0]}, mark it with everstep.Union" if unmarked else ""
        raise StateMismatch(
            f"the commit of step {record.step} does not fit the state passed in: {'; '.join(found.problems[:NAMED])}"
            f"{more}. Nothing was changed. strict=False loads what fits, cast=True converts types, and include=, "
            f"exclude= and rename= say what to take{partly}"
        )
    return found


class _Fitting:
    """The keys of one state, one after the other."""

    def __init__(
        self, state: Mapping[str, Any], captured: Captured, entries: Mapping[str, Entry], selection: Selection,
        touched: set[str],
    ) -> None:  # fmt: skip
        self.found = Fit()
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
            # A fault of ours would be taken for one of the commit. The places alone: a message may quote the commit.
            log.error("%r: values that cannot be read:\n%s", key, "".join(traceback.format_tb(e.__traceback__)))
            self.found.problems.append(f"{key}: the commit's values for it are malformed ({e!r})")

    def _add(self, key: str, marked: Any, body: Body) -> None:
        live: Any = self._captured.values[key]
        kind, saved, target = kind_of(marked), body["kind"], inside(marked)
        if kind == "module" and (saved == "module" or _is_state_dict(body["tree"])):
            self._module(key, bare(target), body, live)
        elif saved == "optimizer" and isinstance(target, torch.optim.Optimizer):
            if body.get("class", type(target).__name__) != type(target).__name__:
                text = f"{key}: the commit holds the state of {body['class']}, the state passed in"
                self.found.problems.append(f"{text} {type(target).__name__}: make an optimizer of that class")
                return
            self.found.bodies[key] = {**body, "cast": self._selection.cast}
        elif kind == "stateful" and saved == "stateful":
            self._stateful(key, target, body, live)
        elif kind == "value" and saved in ("value", "module"):
            self._value(key, target, body, live["tree"])
        else:
            self.found.problems.append(
                f"{key}: the commit holds a {_WORDS[saved]}, the state passed in a {_WORDS[kind]}"
            )
            return
        if key in self.found.bodies:
            for name, own in _pairs(self.found.bodies[key]["tree"], live["tree"]):
                self.found.live.setdefault(name, []).append(own)

    def _module(self, key: str, module: torch.nn.Module, body: Body, live: Any) -> None:
        own, free = live["tree"], migrated(module)
        if self._of_session:
            # These are loaded before the module gives its buffers the size that they had when they were saved.
            free += buffer_names(module)
        unset = unset_buffers(module)
        tree, complete = self._named(key, body["tree"], own, free, unset, cast=self._selection.cast)
        metadata = live.get("metadata") if self._selection.rename else body.get("metadata")
        # A module that judges names by itself raises for those that it lacks, unless it is filled in part.
        partial = not complete or bool(free and not self._selection.strict)
        self.found.bodies[key] = {"kind": "module", "tree": tree, "partial": partial}
        if partial:
            self.found.judges[key] = free
        if metadata:
            self.found.bodies[key]["metadata"] = metadata

    def _named(
        self, key: str, tree: Any, own: Any, free: tuple[str, ...], unset: Collection[str], *, cast: bool
    ) -> tuple[dict[str, Any], bool]:
        """What of a mapping of names goes into another, and whether that is all of both. What is `free` a module brings
        into its own form by itself: that is for it to judge. `unset`: buffers that are None."""
        found, chosen = self.found, self._selection
        taken: dict[str, Any] = {}
        complete = True
        for name, value in tree.items():
            path = join(key, name)
            if not chosen.takes(path):
                found.not_taken.append(path)
            elif (
                self._same_type(path, value, own.get(name), cast)
                if is_free(name, free)
                else name in own and self._same_form(path, value, own[name], cast)
            ):
                taken[name] = value
                continue
            elif name not in own:
                self._told(found.not_taken, path, BEYOND + UNSET * (name in unset))
            complete = False
        for name in own:
            path = join(key, name)
            if name in tree or (is_free(name, free) and chosen.takes(path)):
                continue
            complete = False
            if chosen.takes(path):
                self._told(found.missing, path, LACKING)
        return taken, complete

    def _told(self, report: list[str], path: str, what: str) -> None:
        if self._selection.strict:
            self.found.problems.append(f"{path} {what}")
        else:
            report.append(path)

    def _same_form(self, path: str, value: Any, own: Any, cast: bool) -> bool:
        """Whether a tensor has the shape and type of the live one; if it does not, that is told."""
        live, entry = self._tensor(own), self._entry(value)
        if live is None and entry is None:
            return True
        found = self.found
        if live is None or entry is None:
            found.problems.append(f"{path}: a tensor in the {'commit' if live is None else 'state passed'} only")
            return False
        shape = tuple(live.shape)
        # A module takes one number as a scalar, as torch's load_state_dict does.
        scalar = shape == () and entry.shape == (1,) and kind_of(self._state.get(path.partition("/")[0])) == "module"
        if entry.shape != shape and not scalar:
            text = f"{path}: shape {entry.shape} in the commit, {shape} in the state passed"
            (found.problems if self._selection.strict else found.mismatched).append(text)
            return False
        return self._same_type(path, value, own, cast)

    def _same_type(self, path: str, value: Any, own: Any, cast: bool) -> bool:
        """Whether two tensors are of one dtype; if they are not, that is told. An extra state is of any type."""
        live, entry = self._tensor(own), self._entry(value)
        if live is None or entry is None or cast or path.endswith("_extra_state"):
            return True
        if entry.dtype != DTYPES.get(live.dtype):
            text = f"{path}: {entry.dtype} in the commit, {DTYPES.get(live.dtype)} in the state passed"
            self.found.problems.append(text)
            return False
        return True

    def _stateful(self, key: str, target: Any, body: Body, live: Any) -> None:
        if isinstance(target, torch.optim.Optimizer):
            told = fit_optimizer.fit(key, target, body, live, self._entries, self._selection, self._touched, self.found)
            if told is None:
                return
            body = told
            for name, own in () if self._selection.cast else _pairs(body["tree"], live["tree"]):
                entry, tensor = self._entries[name], self._captured.tensors[own]
                if entry.shape == tuple(tensor.shape) and entry.dtype != DTYPES.get(tensor.dtype):
                    text = f"{entry.dtype} in the commit, {DTYPES.get(tensor.dtype)} in the state passed"
                    self.found.problems.append(f"{own}: {text}")
        elif isinstance(target, DividedOptimizer) and (why := fit_optimizer.odd_division(target, body, live)):
            self.found.problems.append(f"{key}: {why}")
            return
        self.found.bodies[key] = {**body, "cast": self._selection.cast}

    def _value(self, key: str, target: Any, body: Body, own: Any) -> None:
        tree, found, cast = body["tree"], self.found, self._selection.cast
        if isinstance(target, torch.Tensor):
            if not self._same_form(key, tree, own, cast):
                return
        elif body["kind"] == "module" or (_is_plain(tree) and _is_plain(own) and not self._selection.whole):
            if not _is_plain(own):
                found.problems.append(f"{key}: the commit holds a module, the state passed in no module or dict")
                return
            if body["kind"] == "module":
                tree, complete = self._named(key, tree, own, (), (), cast=cast)
            else:
                complete = False
                found.not_taken += [join(key, k) for k in tree if not self._selection.takes(join(key, k))]
                found.missing += [join(key, k) for k in own if k not in tree]
                taken = [k for k in tree if self._selection.takes(join(key, k))]
                tree = {k: tree[k] for k in taken if k not in own or self._fits(join(key, k), tree[k], own[k])}
            found.bodies[key] = {"kind": "value", "tree": tree, "partial": not complete, "cast": cast}
            return
        elif not self._fits(key, tree, own):
            return
        elif not isinstance(target, dict | list) and not isinstance(self._state, MutableMapping):
            found.problems.append(f"{key}: a plain value can be restored only into a mutable mapping (a dict)")
            return
        found.bodies[key] = {"kind": "value", "tree": tree, "cast": cast}

    def _fits(self, path: str, tree: Any, own: Any) -> bool:
        """Whether all tensors and arrays in a plain value can be filled with the commit's; if not, that is told."""
        odd = list(misfits(tree, own, path, self._entries, self._captured.tensors, self._selection.cast))
        if self._of_session:  # the script has begun anew, and what it keeps may have grown since it began before
            odd = [misfit for misfit in odd if not misfit.shape]
        for misfit in odd:
            left = misfit.shape and not self._selection.strict
            (self.found.mismatched if left else self.found.problems).append(misfit.text)
        if odd and all(misfit.path != path for misfit in odd):
            self.found.not_taken.append(path)  # with what does fit in it
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
    """Whether an encoded tree is a mapping of texts, and no tagged value."""
    return isinstance(tree, dict) and not any(key.startswith("$") for key in tree)


def _is_state_dict(tree: Any) -> bool:
    """Whether it is a module's state_dict that was saved as a plain dict."""
    return _is_plain(tree) and bool(tree) and all(_is_tensor(value) for value in tree.values())


def _pairs(tree: Any, live: Any) -> Iterator[tuple[str, str]]:
    """The commit's tensors and the live ones that stand in the same places of two encoded trees."""
    if isinstance(tree, list) and isinstance(live, list):
        for one, other in zip(tree, live, strict=False):
            yield from _pairs(one, other)
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
    found = []
    for key, body in bodies.items():
        named = body["kind"] != "stateful" and _is_plain(body["tree"])
        found += [join(key, name) for name in body["tree"]] if named and body["tree"] else [key]
    return found


def _renamed(saved: Mapping[str, Body], state: Mapping[str, Any], selection: Selection) -> dict[str, Body]:
    """The commit's bodies under the names that they are to have. Raises `StateMismatch` if two get one name."""
    if not selection.rename:
        return dict(saved)
    found: dict[str, Body] = {}
    for key, body in saved.items():
        if body["kind"] == "stateful" or not _is_plain(body["tree"]):
            parts = [(key, selection.renamed(key), None)]
        else:
            parts = [(name, selection.renamed(join(key, name)), value) for name, value in body["tree"].items()]
        for old, path, value in parts:
            if value is None:
                if path in found:
                    raise StateMismatch(f"rename: {key} and another key of the commit are both to be {path!r}")
                found[path] = body
                continue
            new = max((k for k in state if path.startswith(f"{k}/")), key=len, default=path.partition("/")[0])
            into = found.setdefault(new, {**body, "tree": {}})
            name = path[len(new) + 1 :].replace("~1", "/").replace("~0", "~")
            if name in into["tree"]:
                raise StateMismatch(f"rename: {join(key, old)} and another name of the commit are both to be {path!r}")
            into["tree"][name] = value
    return found


def fillable(fitted: Fit, captured: Captured, entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    """The live tensors by the commit's names that its bytes may be read into: those of keys where each tensor of the
    commit goes to one live tensor of its form, and each live one is filled. None whose memory is partly another's:
    the commit may hold two values for it."""
    found: dict[str, torch.Tensor] = {}
    shared = crossed(captured.tensors)
    sources: dict[str, set[str]] = {}  # by live tensor, the commit's, which several keys may bring
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
        # In a union tied tensors have a name each; two that were read into one memory at once would spoil each other.
        alone = alone and (key not in captured.unions or len({place(captured.tensors[o]) for o in ours}) == len(ours))
        if alone and not ours & shared and all(_equal(captured.tensors[o], entries.get(t)) for t, o in pairs):
            found |= {t: captured.tensors[o] for t, o in pairs}
    return found


def _equal(tensor: torch.Tensor, entry: Entry | None) -> bool:
    return entry is not None and tuple(tensor.shape) == entry.shape and DTYPES.get(tensor.dtype) == entry.dtype
