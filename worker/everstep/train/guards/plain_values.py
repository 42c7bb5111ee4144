"""Reads the script's plain values, so that a refusal can name what a new process lacks."""

from __future__ import annotations

import functools
import logging
import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sized
from itertools import islice

import torch

from everstep.train.guards.script_objects import Held, children, is_own, variables, walk

log = logging.getLogger("everstep.train")

Values = dict[str, str]

VISITS = 2000  # objects that are looked at: other ranks wait meanwhile
MOST = 4000  # values
FEW = 16  # elements of a container
LONG = 60  # characters of a value
MOST_NAMED = 8  # variables in a text for a person
# What to do about them.
TRACK = (
    "Track what steps change (`run.track(name=value)`; a number inside of a dictionary), or let it be computed anew in "
    "each step from run.step"
)
_CONTAINERS = (list, dict, set, tuple, deque)
_ROOT = re.compile(r"[.\[]")
_KINDS = frozenset({bool, int, float, complex, str})  # no subclasses: they have code of their own


def plain_values(
    frame: types.FrameType | None, own: Iterable[tuple[str, object]] = (), *, closed: Iterable[object] = ()
) -> Values:
    """The script's numbers, texts, names of functions, sizes of containers and shapes of tensors, by name. They only
    make a refusal clearer, so no error is raised. `own`: values beside its variables, by name; `closed`: objects that
    are not looked into."""
    try:
        return _values(frame, own, closed)
    except Exception:  # the script's own classes may raise anything
        log.debug("the script's values could not be read", exc_info=True)
        return {}


def _values(frame: types.FrameType | None, own: Iterable[tuple[str, object]], closed: Iterable[object]) -> Values:
    roots = [*own, *((name, value) for name, value in variables(frame) if name.isidentifier())]
    found: Values = {}
    for name, value in roots:
        _add(found, name, value)
    parts = [part for name, value in roots for part in _of_class(name, value)]
    for part in parts:
        _add(found, part.name, part.value)
    more = [(part.name, part.value) for part in parts if not callable(part.value)]
    for held in islice(walk([*roots, *more], closed), VISITS):
        if isinstance(held.value, torch.nn.Module) and type(held.value).__module__.startswith("torch."):
            continue
        inner = [*children(held), *_elements(held), *_of_class(type(held.value).__name__, type(held.value))]
        for child in (*inner, *(part for one in inner for part in _of_class(one.name, one.value))):
            _add(found, child.name, child.value)
        if len(found) > MOST:
            break
    return found


def _of_class(name: str, value: object) -> list[Held]:
    """The attributes of a class of the script's."""
    own = isinstance(value, type) and is_own(value)
    return [Held(f"{name}.{key}", part, name) for key, part in list(vars(value).items())] if own else []


def _elements(held: Held) -> list[Held]:
    """The elements of a small container of numbers and texts."""
    value = held.value
    if type(value) is dict:
        return [Held(f"{held.name}[{key!r}]", part) for key, part in islice(value.items(), FEW) if _is_plain(key)]
    if type(value) in (list, tuple):
        return [Held(f"{held.name}[{i}]", part) for i, part in enumerate(value[:FEW])]
    return []


def untracked_values(frame: types.FrameType | None, state: Mapping[str, object]) -> Values:
    """The same, without the variables that are tracked, and what they hold."""
    tracked = {id(value) for value in state.values()}
    roots = {name for name, value in variables(frame) if id(value) in tracked}
    return {name: text for name, text in plain_values(frame).items() if _ROOT.split(name, maxsplit=1)[0] not in roots}


def differences(theirs: Values, mine: Values, leave_out: Callable[[str], bool] = lambda _: False) -> list[str]:
    """The values that both have and that differ, as `alpha (0.5 there, 1.0 here)`, with the shortest names first.
    `leave_out`: whether a name does not count."""
    names = [name for name, value in theirs.items() if name in mine and mine[name] != value and not leave_out(name)]
    return [f"{name} ({theirs[name]} there, {mine[name]} in the new process)" for name in sorted(names, key=_order)]


def listed(differing: list[str]) -> str:
    """The first few of `differences`, as text."""
    more = f", and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
    return f"{'; '.join(differing[:MOST_NAMED])}{more}"


def _order(name: str) -> tuple[int, int, str]:
    return name.count(".") + name.count("["), len(name), name


def _add(found: Values, name: str, value: object) -> None:
    if name in found or name.rpartition(".")[2].startswith("__"):
        return
    if isinstance(value, staticmethod | classmethod | functools.partial):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if _is_plain(value):
        found[name] = repr(value)[:LONG]
    elif value is None:
        found[name] = "None"
    elif isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        found[name] = value.__qualname__
    elif type(value) in _CONTAINERS:
        assert isinstance(value, Sized)
        found[name] = f"{len(value)} elements"
    elif type(value) is torch.Tensor:  # what it holds may be on a device, and large
        found[name] = f"tensor of shape {list(value.shape)}"


def _is_plain(value: object) -> bool:
    return type(value) in _KINDS
