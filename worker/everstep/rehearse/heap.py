"""Reads the numbers and texts that stand anywhere in a rehearsed process, under names that another process has too.

A walk from the script's variables (`plain_values`) knows the places in which scripts keep state, and no list of places
closes. This reads each object that Python's collector of garbage knows, whatever leads to it, and names what it holds
by its class, its function or its module. Objects of one name are one value with several texts. What the walk reads is
left out ([ADR 0062](../../../docs/adr/0062-a-rehearsal-reads-the-whole-heap.md)).

An object of a library counts by those attributes that the script's text names: by itself a script reads no others.
Invariant: none of the script's code is called, but for finalizers of what is garbage.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import types
from collections import defaultdict
from itertools import islice
from typing import Any

import numpy as np
import torch

from everstep.rehearse.begun_anew import Heap
from everstep.rehearse.elsewhere import named_by_script
from everstep.rehearse.not_read import not_read
from everstep.train.guards.containers import MISSING, VIEWS, as_container, as_plain, length_of, steady_key
from everstep.train.guards.contents import DIGEST, PRINTED, STATEFUL, Beyond, Contents, is_iterator
from everstep.train.guards.holders import parts_of_holder
from everstep.train.guards.plain_values import Roots
from everstep.train.guards.script_objects import (
    SUSPENDED,
    attributes,
    code_behind,
    is_own,
    is_script,
    is_special,
    locals_of,
    locals_of_suspended,
    public,
    state_of_function,
    walk,
)
from everstep.train.guards.sources import OURS

OBJECTS = 500_000  # that are looked at
LONG = 60  # characters of a text
TEXTS = 16  # of one name that are written out
LEVELS = 6  # of containers in each other
FEW = 16  # elements of a container that have names
SMALL = 1024  # elements of a tensor that is a result of its step
_BOUND = (types.CellType, types.MethodType, functools.partial)
# What these hold is read where something has a name for it.
_UNNAMED = (dict, list, tuple, set, frozenset, types.CellType, types.MethodType, types.FrameType)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.CodeType,
         types.FrameType, property, *SUSPENDED)  # fmt: skip


_UNORDERED = (set, frozenset, *VIEWS)


def _has_attributes(value: object) -> bool:
    kind = type(value)
    return kind is not types.FunctionType and kind.__dictoffset__ != 0


# This is imported before a script, in the process from which those of all runs are forked: what libraries have made by
# then is none of the objects of which the collector knows later.
IMPORTED = [value for value in gc.get_objects() if _has_attributes(value)]


def read(roots: Roots, frame: types.FrameType | None, beyond: list[str], unread: list[str]) -> Heap:
    """`roots`: where the walk begins that reads the script's other values. `beyond` gets the names of what is too much
    to be read, and `unread` those of what cannot be read."""
    gc.collect()
    reading = _Reading(_known(roots), named_by_script(frame), beyond, unread)
    objects = gc.get_objects()
    if len(objects) > OBJECTS:
        beyond.append(f"what no variable leads to, in more than {OBJECTS} objects")
    for value in islice(objects, OBJECTS):
        reading.look(value)
    for value in IMPORTED:
        reading.look_at_library(value)
    reading.look_at_threads()
    return {name: _shortened(sorted(texts)) for name, texts in reading.texts.items()}


def _shortened(texts: list[str]) -> list[str]:
    return texts if len(texts) <= TEXTS else [f"{len(texts)} values{DIGEST}{Contents(bounded=False).digest(texts)}"]


class _Reading:
    """`known`: ids of what is not looked at. `named`: the globals, attributes and keys that the script's text names.
    `beyond`, `unread`: see `read`."""

    def __init__(self, known: set[int], named: frozenset[str], beyond: list[str], unread: list[str]) -> None:
        self._known, self._named, self._beyond, self._unread = known, named, beyond, unread
        self._contents = Contents(tensors=True)
        self.texts = defaultdict[str, list[str]](list)

    def look(self, value: Any) -> None:
        """At one object, by its class."""
        if type(value) in _UNNAMED or id(value) in self._known:
            return
        with contextlib.suppress(Exception):  # the script's own classes may raise anything
            parts = _parts_of_script(value)
            if parts is None:
                self.look_at_library(value)
                if _is_of_python(type(value)):
                    self._look_into(value, f"{type(value).__qualname__}[…]")
            for name, part in parts or ():
                self._add(name, part)

    def look_at_library(self, value: Any) -> None:
        """At those attributes of an object of a library that the script's text names."""
        kind = type(value)
        with contextlib.suppress(AttributeError):  # some have no attributes, and some classes no plain name
            is_module = issubclass(kind, types.ModuleType)
            if is_module and is_script(getattr(value, "__file__", None) or "<none>", named=True):
                return  # its variables are read by the walk
            owner = value if is_module or issubclass(kind, type) else kind
            own = vars(value) if issubclass(kind, type) else object.__getattribute__(value, "__dict__")
            if (owner.__name__ if is_module else owner.__module__).partition(".")[0] not in OURS:
                for key in self._named.intersection(own):
                    self._add(f"{owner.__name__}.{key}", own[key], by_script=False)

    def _look_into(self, value: Any, name: str, level: int = 0) -> None:
        """At what only an object of Python's own library leads to, as to the results in a cache of `functools`: the
        collector knows no dictionary of numbers and texts alone."""
        own = getattr(value, "__dict__", None)
        for part in gc.get_referents(value) if level < LEVELS else ():
            if type(part) is dict and part is not own:
                for key in self._named.intersection(part):
                    self._add(f"{name}[{key!r}]", part[key], by_script=False)
            if type(part) in (dict, list, tuple) and part is not own:
                self._look_into(part, name, level + 1)

    def look_at_threads(self) -> None:
        """At the variables of the script's functions that run in other threads."""
        others = sys._current_frames()
        # A variable of this function that has its own frame would keep all frames above it, with the loop's generator.
        others.pop(threading.get_ident(), None)
        for top in others.values():
            frame: types.FrameType | None = top
            while frame is not None:
                if is_script(frame.f_code.co_filename):
                    for key, part in locals_of(frame):
                        self._add(f"{frame.f_code.co_qualname}:{key}", part)
                frame = frame.f_back

    def _add(self, name: str, value: Any, level: int = 0, *, by_script: bool = True) -> None:
        """The texts of a value: of a container's parts under names of their own, where they would be written so."""
        kind = type(value)
        parts: list[tuple[str, Any]] = []
        is_printed = kind in PRINTED or issubclass(kind, np.generic)
        if (plain := value if is_printed else as_plain(value)) is not MISSING:
            text = repr(plain)
            self.texts[name].append(text if len(text) <= LONG else f"{text[:LONG]}{self._digest(name, plain)}")
        elif level > LEVELS or issubclass(kind, _CODE):
            self._note_generator(name, value, by_script)
            return
        elif (length := length_of(value)) is not None:
            inner = as_container(value, FEW + 1)
            pairs = list(islice(inner.items() if isinstance(inner, dict) else enumerate(inner), FEW + 1))
            named = length <= FEW and not issubclass(kind, _UNORDERED) and all(as_plain(key) is key for key, _ in pairs)
            self.texts[name].append(f"{length} elements{'' if named or not by_script else self._digest(name, value)}")
            parts = [(f"[{steady_key(key, i)!r}]", part) for i, (key, part) in enumerate(pairs)] if named else []
        elif issubclass(kind, torch.Tensor | np.ndarray):
            if by_script and not _is_result(value):
                self.texts[name].append(f"{kind.__name__}{self._digest(name, value)}")
        elif kind is types.CellType:
            parts = [("", value.cell_contents)] if value != types.CellType() else []
        elif issubclass(kind, functools.partial):
            parts = [(".args", value.args), (".keywords", value.keywords)]
        elif (held := parts_of_holder(value)) is not None:
            parts = list(held.items())
        elif by_script and not issubclass(kind, STATEFUL) and (unread := not_read(value)):
            self._unread.append(f"{name} ({unread})")
        elif issubclass(kind, STATEFUL) or is_iterator(kind):
            self.texts[name].append(f"{kind.__name__}{self._digest(name, value)}")
        elif not kind.__dictoffset__:  # of a class in C, which names nothing
            parts = [("[…]", part) for part in gc.get_referents(value)]
        for path, part in parts:
            self._add(f"{name}{path}", part, level + 1, by_script=by_script)

    def _note_generator(self, name: str, value: Any, by_script: bool) -> None:
        """A generator of a library is not read; the variables of the script's own are looked at by themselves."""
        if by_script and isinstance(value, types.GeneratorType) and (unread := not_read(value)):
            self._unread.append(f"{name} ({unread})")

    def _digest(self, name: str, value: Any) -> str:
        try:
            return f"{DIGEST}{self._contents.digest(value)}"
        except Beyond as e:
            self._beyond.append(f"{name} ({e})")
            return ""


def _is_result(value: Any) -> bool:
    """Whether it is a large tensor that hangs in a graph of derivatives."""
    return isinstance(value, torch.Tensor) and value.numel() > SMALL and value.grad_fn is not None


def _is_of_python(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names and not issubclass(kind, _CODE)


def _parts_of_script(value: Any) -> list[tuple[str, Any]] | None:
    """What an object holds, by name, if it is the script's; None for one of a library."""
    kind = type(value)
    if kind is types.FunctionType:
        parts = state_of_function(value).items()
        return [(f"{value.__qualname__}{key if key[0] == '.' else f':{key}'}", part) for key, part in parts]
    if issubclass(kind, SUSPENDED):
        code, variables = locals_of_suspended(value)
        return [(f"{code.co_qualname}:{key}", part) for key, part in variables or ()]
    if issubclass(kind, functools.partial):
        behind = code_behind(value)
        if behind is None or not is_script(behind.co_filename):
            return None
        return [(f"partial of {behind.co_qualname}", value)]
    if kind is types.ModuleType:
        is_made = not (hasattr(value, "__file__") or getattr(value, "__spec__", None))  # by a call of its class
        return [(f"{value.__name__}.{key}", part) for key, part in public(vars(value))] if is_made else None
    if issubclass(kind, type):
        own = list(vars(value).items()) if is_own(value) else None
        return own and [(f"{value.__qualname__}.{key}", part) for key, part in own if not is_special(key)]
    if not is_own(kind):
        return None
    inner = [(kind.__qualname__, as_container(value))] if length_of(value) is not None else []
    return [*inner, *((f"{kind.__qualname__}.{key}", part) for key, part in attributes(value))]


def _known(roots: Roots) -> set[int]:
    """The ids of what the walk reads, with the script's own objects in it."""
    waiting = [*roots.state.values(), *roots.closed, *(value for _, value in roots.all())]
    waiting += [named.value for named in walk(roots.all(), roots.closed)]
    known = set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) not in known and (parts := _parts_of_known(value)) is not None:
            known.add(id(value))
            waiting += parts
    return known


def _parts_of_known(value: Any) -> list[Any] | None:
    kind = type(value)
    if issubclass(kind, type):
        return [*value.__mro__[1:], *(part for part in vars(value).values() if length_of(part) is not None)] \
            if is_own(value) else None  # fmt: skip
    if kind in _BOUND or length_of(value) is not None:
        return [part for part in gc.get_referents(value) if kind is not types.MethodType or part is value.__self__]
    if kind is types.FunctionType or issubclass(kind, SUSPENDED) or is_own(kind):
        return [kind, *(part for _, part in _parts_of_script(value) or ())]
    return None
