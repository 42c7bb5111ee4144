"""Makes the advice for loop-carried variables: lines of code to write in their place."""

from __future__ import annotations

import re
import types
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from everstep.train.guards.script_text.known_values import MISSING, PARTS, held
from everstep.train.guards.script_text.loop_carried import LoopCarried
from everstep.train.guards.script_text.value_origins import FORWARD, ITERATORS
from everstep.train.guards.untracked.covered import OWN_NAMES, word

NAMED = 8  # variables in one text
_LONGEST = 60  # characters of a value that is written out


@dataclass(frozen=True, slots=True)
class Text:
    """Of one refusal. `brief`: where there is no room for the whole; of the most harmful mistake alone."""

    whole: str
    _brief: str = ""

    @property
    def brief(self) -> str:
        return self._brief or self.whole


def text_of(file: str, found: list[LoopCarried], values: Mapping[str, Any], taken: Iterable[str] = ()) -> Text:
    """The advice for variables of the loop in `file`, the most harmful first. `taken`: the names that are tracked
    already."""
    taken = {*taken, *OWN_NAMES}
    more = f". {len(found) - 1} more variables are carried, see the log" if len(found) > 1 else ""
    worst = found[0]
    said = _said(worst, worst.file or file, worst.at_file or file)
    lines = ". ".join(_lines([worst], values, {*taken}))
    brief = f"{said}. {lines}; or run.untracked({worst.name!r}){more}"
    return Text(_whole(file, found, values, taken), brief)


def _whole(file: str, found: list[LoopCarried], values: Mapping[str, Any], taken: Iterable[str]) -> str:
    said = "; ".join(_said(f, f.file or file, f.at_file or file) for f in found[:NAMED])
    names = ", ".join(repr(f.name) for f in found)
    them = "it" if len(found) == 1 else "them"
    own = next((f.name for f in found if f.own), None)
    reduce = f". Reduce a rank's own loss (dist.all_reduce) before it goes into {own}: all ranks must have the same"
    tensors = [f.name for f in found if f.bound and isinstance(held(values, f.name), torch.Tensor)]
    fetched = (
        f". If {' and '.join(dict.fromkeys(tensors))} came from this rank's own samples (a batch that is fetched a "
        "step early), fetch it in the step that trains on it instead: what is tracked must be the same on all ranks"
    )
    ending = f"or, if nothing is lost with {them}, run.untracked({names})"
    return (
        f"{said}: a process that replaces a lost one starts without {them}. "
        f"{'. '.join(_lines(found, values, {*taken}))}{reduce if own is not None else ''}"
        f"{fetched if tensors else ''}; {ending}"
    )


def _said(f: LoopCarried, file: str, at_file: str) -> str:
    where = f"line {f.at}" if at_file == file else f"line {f.at} of {at_file}"
    if f.hidden:
        return (
            f"{f.name} is changed from step to step, by calls that the text of the loop does not show (a callback, a "
            f"hook), and it affects {f.use} ({where})"
        )
    return (
        f"{f.name} is carried from step to step in a plain variable (line {f.line} of {file} changes it), and "
        f"it affects {f.use} ({where})"
    )


def _lines(found: list[LoopCarried], values: Mapping[str, Any], taken: set[str]) -> list[str]:
    lines = [f"Use `step.number` in place of {f.name}" for f in found if f.counts]
    tracked = dict[str, None]()
    dicts = dict[str, list[LoopCarried]]()  # the owner of the attributes → the variables that go into one dictionary
    for f in found:
        *front, last = PARTS.findall(f.name)
        owner = "".join(front)
        holder = held(values, owner) if owner else MISSING
        if f.counts:
            continue
        if isinstance(holder, torch.nn.Module) and f.use == FORWARD:
            lines.append(_of_module(f.name, taken))
        elif isinstance(holder, types.FunctionType | types.MethodType) and _is_inside(holder, last[1:], values, f.name):
            lines.append(_of_function(f.name, owner, held(values, f.name), taken))
        elif last.startswith("[") or _is_whole(f, held(values, f.name)):
            tracked[owner if last.startswith("[") else f.name] = None
        else:
            dicts.setdefault(owner, []).append(f)
    if tracked:
        arguments = ", ".join(f"{_free(word(name), taken)}={name}" for name in tracked)
        lines.append(f"Write run.track({arguments}) before run.steps()")
    lines += [_dictionary(owner, inside, values, taken) for owner, inside in dicts.items()]
    return lines


def _is_inside(function: Any, name: str, values: Mapping[str, Any], path: str) -> bool:
    """Whether it is a default or a closure's variable of a function, and not an attribute."""
    return name not in vars(function) and held(values, path) is not MISSING


def _is_whole(f: LoopCarried, value: Any) -> bool:
    """Whether it can be tracked as it is, and stays the same object."""
    return isinstance(value, list | dict) and not f.bound


def _dictionary(owner: str, inside: list[LoopCarried], values: Mapping[str, Any], taken: set[str]) -> str:
    """The advice to track a dictionary that is made where the variables are."""
    kept, uses = list[str](), list[str]()
    name = f"{owner}.carried" if owner else "carried"
    for f in {f.name: f for f in inside}.values():  # one variable may be carried in two functions
        key, value = word(f.name), held(values, f.name)
        kind = type(value).__name__
        place = f"{name}[{key!r}]"
        kept.append(f"{key!r}: {_kept(f.name, value, kind)}")
        uses.append(_use(f.name, place, value, kind))
    argument = _free(f"{word(owner)}_carried" if owner else "carried", taken)
    where = "" if owner else f" behind the line that makes {inside[0].name}"
    within = f" (in the class of {owner}: self.carried)" if owner and owner != "self" else ""
    return (
        f"Write {name} = {{{', '.join(kept)}}}{where} and run.track({argument}={name}) before run.steps(), and in the "
        f"loop{within} {', '.join(uses)}"
    )


def _kept(name: str, value: Any, kind: str) -> str:
    if kind == "count":
        return re.split(r"[(,)]", repr(value))[1]
    if kind in ITERATORS:
        return "0"
    if value is MISSING:
        return "0"
    return f"list({name})" if kind == "deque" else f"dict.fromkeys({name})" if kind == "set" else name


def _use(name: str, place: str, value: Any, kind: str) -> str:
    if kind == "count":
        by = re.split(r"[(,)]", repr(value))[2].strip() or "1"
        return f"{place} in place of next({name}), and behind it {place} += {by}"
    if kind in ITERATORS:
        return (
            f"{word(name)}_values[{place}] in place of next({name}), and behind it {place} += 1, where before the loop "
            f"{word(name)}_values = list(itertools.islice({name}, N)), N being how many the whole run takes"
        )
    if isinstance(value, deque):
        cut = f", and behind it del {place}[:-{value.maxlen}]" if value.maxlen else ", and pop(0) in place of popleft()"
        return f"{place} in place of {name}{cut}"
    if kind == "set":
        return f"{place} in place of {name}, and {place}[x] = None in place of {name}.add(x)"
    return f"{place} in place of {name}"


def _of_module(name: str, taken: set[str]) -> str:
    key = word(name)
    place, argument = f"{key}_now", _free(f"{key}_now", taken)
    return (
        f"Write {place} = {{{key!r}: {name}}} and run.track({argument}={place}) before run.steps(), change "
        f"{place}[{key!r}] in the loop in place of {name}, and write {name} = {place}[{key!r}] before each forward pass"
    )


def _of_function(name: str, function: str, value: Any, taken: set[str]) -> str:
    key = word(name)
    shown = repr(value) if len(repr(value)) < _LONGEST else "…"
    argument = _free("carried", taken)
    return (
        f"Write {argument} = {{{key!r}: {shown}}} at the top of the file and run.track({argument}={argument}) before "
        f"run.steps(), and in {word(function)} use {argument}[{key!r}] in place of {key}"
    )


def _free(name: str, taken: set[str]) -> str:
    """A keyword under which nothing is tracked yet."""
    while name in taken:
        name = f"{name}_2"
    taken.add(name)
    return name
