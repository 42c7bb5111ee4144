"""Reads the script's plain values, and digests of its tensors, so that they can be compared with those of another
process, and a refusal can name what a new process lacks."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sized
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import xxhash
from torch.nn.parameter import is_lazy

from everstep.checkpoint.state import layouts
from everstep.recovery import digests
from everstep.train.guards.script_objects import MISSING, Held, Name, children, is_own, value_of, variables, walk
from everstep.train.guards.untracked.covered import Covered

log = logging.getLogger("everstep.train")

Values = dict[str, str]

VISITS = 2000  # objects that are looked at: other ranks wait meanwhile
MOST = 4000  # values
FEW = 16  # elements of a container
LONG = 60  # characters of a value
MOST_NAMED = 8  # variables in a text for a person
MOST_TENSORS = 256  # of those that are carried, and of the others
MOST_BYTES = 2**26  # of all of these
# What to do about them.
TRACK = (
    "Track what steps change (`run.track(name=value)` before the loop; a number inside of a dictionary), or let it be "
    "computed anew in each step from run.step"
)
_CONTAINERS = (list, dict, set, tuple, deque)
_ROOT = re.compile(r"[.\[]")
_unread = set[str]()  # that a warning has named
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


def untracked_values(
    frame: types.FrameType | None, state: Mapping[str, object], carried: Mapping[str, Name] = MappingProxyType({})
) -> Values:
    """The same, without the variables that are tracked, and what they hold; and with digests of the tensors and arrays
    that are not saved. `carried`: the names that the loop carries from step to step. Their tensors come first, and a
    warning names those that are beyond the bound."""
    tracked = {id(value) for value in state.values()}
    held = dict(reversed(list(variables(frame))))
    found = {
        name: text for name, text in plain_values(frame).items()
        if id(held.get(_ROOT.split(name, maxsplit=1)[0], MISSING)) not in tracked
    }  # fmt: skip
    try:
        found |= _tensors(held, state, carried)
    except Exception:  # as above
        log.warning("the script's tensors could not be read, and are not compared", exc_info=True)
    return found


def _tensors(held: Mapping[str, object], state: Mapping[str, object], carried: Mapping[str, Name]) -> Values:
    covered, left, found = Covered(state), MOST_BYTES, Values()
    named = [(name, value_of(held, parts)) for name, parts in carried.items()]
    for roots, closed in ((named, ()), (held.items(), state.values())):
        tensors = (one for one in islice(walk(roots, closed), VISITS) if _is_compared(one.value, covered))
        unread = list[str]()
        for place, one in enumerate(tensors):
            if one.name in found:
                continue
            if place < MOST_TENSORS and one.value.nbytes <= left:
                left -= one.value.nbytes
                with contextlib.suppress(Exception):  # a subclass of the script's may raise anything
                    found[one.name] = _digested(one.value)
            else:
                unread.append(one.name)
        if roots is named and not _unread.issuperset(unread):
            _unread.update(unread)
            log.warning(
                "not compared with those of other processes, because together they are more than %d MiB or %d tensors: "
                "%s", MOST_BYTES >> 20, MOST_TENSORS, listed(unread),
            )  # fmt: skip
    return found


def _is_compared(value: object, covered: Covered) -> bool:
    if isinstance(value, np.ndarray):
        return not (value.dtype.hasobject or id(value) in covered.objects)
    return (
        isinstance(value, torch.Tensor) and layouts.is_dense(value) and not is_lazy(value) and not covered.holds(value)
    )


def _digested(value: Any) -> str:
    if isinstance(value, np.ndarray):
        data: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        kind, digest = "array", xxhash.xxh3_64_intdigest(data)
    else:
        kind, digest = "tensor", digests.content(value)
    return f"{kind} of shape {list(value.shape)} with digest {digest & 0xFFFFFFFF:08x}"


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
