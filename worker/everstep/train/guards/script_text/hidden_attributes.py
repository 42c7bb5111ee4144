"""Finds attributes and containers of the script's objects that grow from step to step, by their values.

`loop_carried` finds what the text of the loop changes. A callback in a list, a hook, or a method in a registry changes
an attribute by calls that this text does not show, such as a count with a threshold that comes hundreds of steps later.
So the values are compared, and the text is asked only whether the loop trains by them. Then a count is refused while
all processes still have it, under each launcher, and not after a restart, when no process is left that has it.

An attribute counts if some function of the script computes its next value from that attribute, or from another one that
changes too. A value that a callback sets anew in each step is not state. A list, set or deque counts if its length
changes. A dictionary does not: one that grows is mostly a cache, which each process fills for itself. Invariants: none
of the script's code is called, at most `VISITS` objects are looked at, and none is kept alive.
"""

from __future__ import annotations

import ast
import functools
import logging
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from everstep.train.guards.script_objects import is_open, is_script, variables, walk
from everstep.train.guards.script_text.sources import tree_of

log = logging.getLogger("everstep.train")

Token = int | tuple[int, str]  # the id of a container; or of an object, with the name of its attribute

VISITS = 2000
_PLAIN = (bool, int, float)
_CONTAINERS = (list, set, deque)


class HiddenAttributes:
    """The comparison in one process."""

    def __init__(self) -> None:
        self._steps = 0
        self._first: dict[Token, tuple[Any, Any]] = {}  # a weak reference, or the container's name; and the value
        self._told = set[Token]()

    def completed(self, frame: types.FrameType | None) -> set[Token]:
        """Look after a complete step, when `frame` asks for the next one. The 2nd, 4th, 8th, … step is compared with
        the first look at each object. Returns what has changed and was not returned before."""
        self._steps += 1
        if self._steps & (self._steps - 1):
            return set()
        try:
            return self._look(frame)
        except Exception:  # an unforeseen script may cause any error
            log.warning("the attributes of the script's objects could not be compared", exc_info=True)
            return set()

    def _look(self, frame: types.FrameType | None) -> set[Token]:
        moved = set[Token]()
        for token, holder, value in _values(frame):
            then, before = self._first.setdefault(token, (holder, value))
            if then == holder and before != value and value == value:  # noqa: PLR0124  not a NaN
                moved.add(token)
        names = {token[1] for token in moved if isinstance(token, tuple)}
        found = {t for t in moved - self._told if not isinstance(t, tuple) or _is_carried(t[1], names)}
        self._told |= found
        return found


def _values(frame: types.FrameType | None) -> Iterator[tuple[Token, Any, Any]]:
    for held in islice(walk(variables(frame)), VISITS):
        value = held.value
        if type(value) in _CONTAINERS:
            yield id(value), held.name, len(value)
        elif is_open(type(value)) and not isinstance(value, torch.nn.Module | type | types.ModuleType):
            try:
                here = weakref.ref(value)
            except TypeError:  # it has slots, and no place for one
                continue
            for name, part in list(getattr(value, "__dict__", {}).items()):
                if type(part) in _PLAIN:
                    yield (id(value), name), here, part


def _is_carried(attribute: str, moved: Iterable[str]) -> bool:
    """Whether a function of the script computes it from what the step before has left, or none is known to set it."""
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    setters = [loads for file in files if is_script(file, named=True) for loads in _setters(file).get(attribute, ())]
    return not setters or any(not loads.isdisjoint({attribute, *moved}) for loads in setters)


@dataclass(frozen=True, slots=True)
class _Uses:
    stores: frozenset[str]
    loads: frozenset[str]


@functools.lru_cache(maxsize=256)
def _setters(file: str) -> dict[str, list[frozenset[str]]]:
    """By attribute: the attributes that each function which sets it reads."""
    tree = tree_of(file)
    found: dict[str, list[frozenset[str]]] = {}
    for function in ast.walk(tree) if tree is not None else ():
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name != "__init__":
            uses = _uses(function)
            for name in uses.stores:
                found.setdefault(name, []).append(uses.loads)
    return found


def _uses(function: ast.AST) -> _Uses:
    stores, loads = set[str](), set[str]()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute):
            (loads if isinstance(node.ctx, ast.Load) else stores).add(node.attr)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute):
            loads.add(node.target.attr)
    return _Uses(frozenset(stores), frozenset(loads))
