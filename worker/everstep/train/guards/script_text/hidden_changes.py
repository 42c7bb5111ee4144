"""Finds global variables of the script that change from step to step although no line of its text changes them.

`loop_carried` finds loop-carried variables in the text. A variable that `exec`, `globals()` or `setattr` changes is in
no such line, so the flow of its value is unknown. A new process does not have it. If it affects training, the first
step of that process may still be right, and a later one wrong (a counter and its threshold), when there is no trained
process to compare with. So it is refused while all processes still have it.

Local variables of functions are left out, because `exec` cannot change them. A list, dictionary or set counts only if
nothing but its module refers to it, and no loop or function names it: then nothing else can change it. Invariants: none
of the script's code is called. Only names that existed after the first step are compared. A variable that some line may
change is left to `loop_carried`.
"""

from __future__ import annotations

import ast
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from everstep.recovery.errors import LoopError
from everstep.train.guards.script_objects import FRAMES, is_script
from everstep.train.guards.script_text.sources import loaded_files, tree_of
from everstep.train.guards.script_text.syntax_patterns import path_of

log = logging.getLogger("everstep.train")

MOST_NAMED = 8
FEW = 16  # elements of a container that are compared
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set)
_NO_MODULES = ("self", "cls")  # a counter of a class explains no global variable of that name
_ALONE = 2  # references: one of the module, and one of the call that counts them
_Scope = tuple[str, dict[str, Any]]  # a file of the script, and the globals of its module


class HiddenChanges:
    """The check in one process. `is_untracked`: whether the script has declared a name untracked."""

    def __init__(self, is_untracked: Callable[..., bool]) -> None:
        self._is_untracked = is_untracked
        self._steps = 0
        self._line: dict[str, int] = {}  # for each file, the line at which its module was after the first step
        self._first: dict[str, dict[str, Any]] = {}
        self._explained = set[tuple[str, str]]()

    def completed(self, frame: types.FrameType | None) -> None:
        """Check after a complete step, when `frame` asks for the next one. This compares the 2nd, 4th, 8th, … step with
        the first. Raises `LoopError`."""
        self._steps += 1
        if self._steps & (self._steps - 1):
            return
        try:
            found = list(self._look(frame))
        except Exception:  # an unforeseen script may cause any error
            log.warning("the script's global variables could not be compared", exc_info=True)
            return
        if found:
            raise LoopError(text_of_hidden(found))

    def _look(self, frame: types.FrameType | None) -> Iterator[tuple[str, str]]:
        """The variables that changed although no line changes them, each with its file."""
        for file, variables in self._scopes(frame):
            now = _values(variables)
            before = self._first.setdefault(file, now)
            for name in sorted(now.keys() & before.keys()):
                if _same(before[name], now[name]) or (file, name) in self._explained or self._is_untracked(name):
                    continue
                if _may_change(file, name, self._line[file], contained=type(variables[name]) in _CONTAINERS):
                    self._explained.add((file, name))
                else:
                    yield name, file

    def _scopes(self, frame: types.FrameType | None) -> list[_Scope]:
        """The modules of the running functions. Only files count, because their whole text is known."""
        found: dict[str, dict[str, Any]] = {}
        for _ in range(FRAMES):
            if frame is None:
                break
            file = frame.f_code.co_filename
            if is_script(file, named=True) and Path(str(frame.f_globals.get("__file__"))).name == Path(file).name:
                found.setdefault(file, frame.f_globals)
                if frame.f_locals is frame.f_globals:
                    self._line.setdefault(file, frame.f_lineno)
            frame = frame.f_back
        for file in found:
            self._line.setdefault(file, 0)
        return list(found.items())


def _values(variables: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in [name for name in variables if not name.startswith("__")]:
        alone = sys.getrefcount(variables[name]) == _ALONE
        value = variables[name]
        if type(value) in _CONTAINERS:
            if alone and (inside := _inside(value)) is not None:
                found[name] = inside
        elif not isinstance(value, types.ModuleType):
            found[name] = value if type(value) in _PLAIN else id(value)
    return found


def _inside(value: Any) -> tuple[Any, ...] | None:
    """The size and the first elements of a container of plain values."""
    elements = list(value.items() if type(value) is dict else value)[:FEW]
    flat = [part for one in elements for part in (one if type(value) is dict else (one,))]
    return (id(value), len(value), *flat) if all(type(part) in _PLAIN for part in flat) else None


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same. A NaN is the same as itself."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (type(one) is type(other) and bool(one == other))


def _may_change(file: str, name: str, line: int, *, contained: bool) -> bool:
    """Whether some line of the script may change this variable of `file` in the loop. `line`: where the module was
    after the first step, so that line and all later ones may still run."""
    names = _names(file)
    if names is None or name in names.bound_in_loops or name in names.declared_global:
        return True
    if any(at >= line for at in names.bound_once.get(name, ())) or (contained and name in names.mentioned):
        return True
    texts = (_names(other) for other in {file, *loaded_files()})
    return any(text is not None and name in text.attributes for text in texts)


class _Names:
    """The uses of a module's variables in the text of its file."""

    def __init__(self, tree: ast.Module) -> None:
        self.bound_in_loops = set[str]()
        self.bound_once: dict[str, list[int]] = {}  # by name, the lines
        self.declared_global = set[str]()
        self.attributes = set[str]()  # attributes that are assigned: `config.count = …`, in other modules too
        self.mentioned = set[str]()  # names in loops and functions
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                self.declared_global.update(node.names)
            elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                self.attributes.update(() if path_of(node.value) in _NO_MODULES else (node.attr,))
        for statement in tree.body:
            self._read(statement, within=False, own=True)

    def _read(self, node: ast.AST, *, within: bool, own: bool) -> None:
        """Read a part of the text. `within`: it is in a loop or function. `own`: names bound there belong to the
        module."""
        within = within or isinstance(node, ast.For | ast.AsyncFor | ast.While)
        for name in _bound(node) if own else ():
            if within:
                self.bound_in_loops.add(name)
            else:
                self.bound_once.setdefault(name, []).append(getattr(node, "lineno", 0))
        if within and isinstance(node, ast.Name):
            self.mentioned.add(node.id)
        scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef)
        for child in ast.iter_child_nodes(node):
            self._read(child, within=within or scope, own=own and not scope)


def _bound(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.alias(name=name, asname=asname):
            return [asname or name.partition(".")[0]]
        case (
            ast.ExceptHandler(name=str() as name) | ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name)
        ):
            return [name]
        case ast.MatchMapping(rest=str() as name):
            return [name]
    return []


@functools.lru_cache(maxsize=256)
def _names(file: str) -> _Names | None:
    tree = tree_of(file)
    return _Names(tree) if tree is not None else None


def text_of_hidden(found: list[tuple[str, str]]) -> str:
    """`found`: each variable and its file."""
    names = [name for name, _ in found[:MOST_NAMED]]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    kept = ", ".join(f"{name!r}: {name}" for name in names)
    uses = ", ".join(f"carried[{name!r}] in place of {name}" for name in names)
    are = "changes" if len(found) == 1 else "change"
    it = "it" if len(found) == 1 else "them"
    return (
        f"{', '.join(names)}{more} {are} from step to step, and no line of {Path(found[0][1]).name} says so (exec, "
        f"globals() or setattr does): a process that replaces a lost one, or a run that goes on from a commit, starts "
        f"without {it}. Write carried = {{{kept}}} and run.track(carried=carried) before run.steps(), and in the loop "
        f"{uses}; or, if nothing is lost with {it}, run.untracked({', '.join(map(repr, names))})"
    )
