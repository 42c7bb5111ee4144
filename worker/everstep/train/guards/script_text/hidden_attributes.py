"""Finds attributes and containers of the script's objects that grow from step to step, by their values.

`loop_carried` finds what the text of the loop changes. A callback in a list, a hook, or a method in a registry changes
an attribute by calls that this text does not show, such as a count with a threshold that comes hundreds of steps later.
So the values are compared, and the text is asked only whether the loop trains by them. Then a count is refused while
all processes still have it, under each launcher, and not after a restart, when no process is left that has it.

An attribute counts if a method of its class, or a function, computes its next value from that attribute, or from
another one that counts; a class's own attribute too, wherever that happens. It counts even before it changes: a flag
that is set when a count is high enough. A value that a callback sets anew in each step is not state. A list, set or
deque counts if its length changes. A dictionary does not: one that grows is mostly a cache, which each process fills
for itself. Invariants: none of the script's code is called, at most `VISITS` objects are looked at, and none of its
objects is kept alive.
"""

from __future__ import annotations

import ast
import functools
import logging
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from everstep.train.guards.script_objects import is_open, variables, walk
from everstep.train.guards.script_text.sources import loaded_files, tree_of
from everstep.train.guards.script_text.syntax_patterns import path_of

log = logging.getLogger("everstep.train")

Token = int | tuple[int, str]  # the id of a container; or of an object, with the name of its attribute

VISITS = 2000
FEW = 8  # elements by which a list is known again
_PLAIN = (bool, int, float)
_CONTAINERS = (list, set, deque)
_OF_THE_RUN = frozenset({"step", "number", "epoch"})  # of an object other than the one that is changed: the run's


class HiddenAttributes:
    """The comparison in one process."""

    def __init__(self) -> None:
        self._steps = 0
        self._first: dict[Token, tuple[_Mark, Any]] = {}
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
        found, moved, known = set[Token](), dict[tuple[int, str], type](), dict[tuple[int, str], type]()
        for token, mark, value, kind in _values(frame):
            first, before = self._first.setdefault(token, (mark, value))
            changed = before != value and value == value  # noqa: PLR0124  not a NaN
            if not first.is_same(mark):
                continue
            if isinstance(token, tuple):
                known[token] = kind
                if changed:
                    moved[token] = kind
            elif changed:
                found.add(token)
        new = (found | _carried(moved, known)) - self._told
        self._told |= new
        return new


@dataclass(frozen=True, slots=True)
class _Mark:
    """By which an object is known again, although another one may have its id after its end."""

    name: str = ""
    parts: tuple[Any, ...] = ()  # weak references, or plain values

    def is_same(self, other: _Mark) -> bool:
        pairs = zip(self.parts, other.parts, strict=False)  # a list may have grown, or have become shorter
        return self.name == other.name and all(a is b or (type(a) in _PLAIN and a == b) for a, b in pairs)


def _values(frame: types.FrameType | None) -> Iterator[tuple[Token, _Mark, Any, type]]:
    roots = list(variables(frame))
    for kind in {id(value): value for _, value in roots if isinstance(value, type) and is_open(value)}.values():
        for name, part in list(vars(kind).items()):
            if type(part) in _PLAIN:  # a count of a class, which an exception of its own may keep too
                yield (id(kind), name), _Mark(parts=(weakref.ref(kind),)), part, kind
    for held in islice(walk(roots), VISITS):
        value, kind = held.value, type(held.value)
        if kind in _CONTAINERS:
            parts = (_part(one) for one in value[:FEW]) if kind is list else (weakref.ref(value),)
            yield id(value), _Mark(held.name, tuple(parts)), len(value), kind
        elif is_open(kind) and not isinstance(value, torch.nn.Module | type | types.ModuleType):
            try:
                mark = _Mark(parts=(weakref.ref(value),))
            except TypeError:  # it has slots, and no place for one
                continue
            for name, part in list(getattr(value, "__dict__", {}).items()):
                if type(part) in _PLAIN:
                    yield (id(value), name), mark, part, kind


def _part(value: Any) -> Any:
    """A weak reference is the same object as long as its referent lives. Two are not compared by `==`, which would
    compare their referents by the script's code."""
    try:
        return value if type(value) in _PLAIN else weakref.ref(value)
    except TypeError:
        return type(value)


# What the text says of an attribute.


@dataclass(frozen=True, slots=True)
class _Setter:
    """A statement that gives the attribute a value. `kind`: the class whose method does so to its own object, else
    empty. The value, or whether it is given, depends on the attributes `own` of the same object, and on `others`."""

    kind: str
    own: frozenset[str]
    others: frozenset[str]


def _carried(moved: Mapping[tuple[int, str], type], known: Mapping[tuple[int, str], type]) -> set[tuple[int, str]]:
    """Those of `moved` that are computed from what the step before has left, or that no text is known to set; and those
    of all `known` ones that are computed from such an attribute of their own object. Each with the class of its
    object."""
    if not moved:
        return set()
    texts = [_setters(file) for file in loaded_files()]

    def setters(name: str, kind: type) -> list[_Setter]:
        kinds = {"", *(base.__name__ for base in kind.__mro__)}
        return [one for text in texts for one in text.get(name, ()) if one.kind in kinds]

    of = {token: setters(token[1], kind) for token, kind in moved.items()}
    carried = set(moved)
    while anew := {t for t in carried if of[t] and not any(_depends(one, t, carried) for one in of[t])}:
        carried -= anew
    names: dict[int, set[str]] = {}
    for holder, name in carried:
        names.setdefault(holder, set()).add(name)
    others = {t: kind for t, kind in known.items() if t[0] in names and t not in moved}
    return carried | {t for t, kind in others.items() if any(one.own & names[t[0]] for one in setters(t[1], kind))}


def _depends(setter: _Setter, token: tuple[int, str], carried: Collection[tuple[int, str]]) -> bool:
    holder, name = token
    own = {n for other, n in carried if other == holder}
    others = {n for other, n in carried if other != holder} - _OF_THE_RUN
    return name in setter.own or not (setter.own.isdisjoint(own) and setter.others.isdisjoint(others))


@functools.lru_cache(maxsize=256)
def _setters(file: str) -> dict[str, list[_Setter]]:
    """By attribute: the statements that set it, but for those of `__init__`."""
    tree = tree_of(file)
    found: dict[str, list[_Setter]] = {}
    for kind, function in _functions(tree) if tree is not None else ():
        own = function.args.args[0].arg if kind and function.args.args else ""
        for (base, name), paths in _Assignments(function).attributes():
            split = [(b, attr) for b, _, attr in (path.rpartition(".") for path in paths)]
            same = frozenset(attr for b, attr in split if b == base)
            others = frozenset(attr for b, attr in split if b and b != base)
            found.setdefault(name, []).append(_Setter(kind if base == own else "", same, others))
    return found


def _functions(node: ast.AST, kind: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions and methods, each with the name of its class. Those inside of functions belong to these."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name != "__init__":
                yield kind, child
        else:
            yield from _functions(child, child.name if isinstance(child, ast.ClassDef) else kind)


class _Assignments:
    """The assignments of a function, each with the variables and attributes on which it depends."""

    def __init__(self, function: ast.AST) -> None:
        self._found: list[tuple[str, frozenset[str]]] = []
        self._block(ast.iter_child_nodes(function), frozenset())

    def attributes(self) -> Iterator[tuple[tuple[str, str], set[str]]]:
        """The assignments to attributes. A local variable stands for what it was computed from."""
        for target, paths in self._found:
            base, _, name = target.rpartition(".")
            if base:
                behind, waiting = set(paths), list(paths)
                while waiting:
                    path = waiting.pop()
                    more = {p for t, found in self._found for p in found if t == path and "." not in t} - behind
                    behind |= more
                    waiting += more
                yield (base, name), behind

    def _block(self, body: Iterable[ast.AST], control: frozenset[str]) -> None:
        for s in body:
            match s:
                case ast.Assign(targets=targets):
                    for target in targets:
                        self._assign(target, s.value, control)
                case ast.AugAssign(target=target):
                    self._assign(target, s.value, control | _paths(target))
                case ast.AnnAssign() | ast.NamedExpr():
                    self._assign(s.target, s.value, control)
                case ast.For() | ast.AsyncFor():
                    self._assign(s.target, s.iter, control)
                    self._block((*s.body, *s.orelse), control | _paths(s.iter))
                case ast.If() | ast.While():
                    self._block([s.test], control)
                    decided = control | _paths(s.test)
                    self._block((*s.body, *s.orelse), decided)
                    if isinstance(s.body[-1], ast.Return | ast.Continue | ast.Break | ast.Raise):
                        control = decided
                case _:
                    self._block(ast.iter_child_nodes(s), control)

    def _assign(self, target: ast.expr, value: ast.expr | None, control: frozenset[str]) -> None:
        if value is None:  # an annotation alone
            return
        self._block([value], control)
        if isinstance(target, ast.Tuple | ast.List):
            pairs = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            for i, part in enumerate(target.elts):
                self._assign(part, value.elts[i] if pairs else value, control)  # type: ignore[attr-defined]
        elif isinstance(target, ast.Name | ast.Attribute) and (path := path_of(target)) is not None:
            self._found.append((path, control | _paths(value)))


def _paths(e: ast.expr) -> frozenset[str]:
    """The variables and attributes that an expression reads."""
    return frozenset(path for n in ast.walk(e) if (path := path_of(n)) is not None)
