"""Finds the numbers of `enumerate` that only the loop itself has, as in `for step, batch in enumerate(loader):` with no
other `step` in the script. A repeated step and a new process count otherwise, and nothing can be computed by it."""

from __future__ import annotations

import ast
import functools
from types import FrameType

from everstep.train.guards.script_objects import is_script
from everstep.train.guards.sources import tree_of

_READS_ANY = {"locals", "globals", "vars", "dir", "eval", "exec"}  # functions that read variables without their names


def idle_indices(frame: FrameType | None) -> set[str]:
    """Of the script's functions that run: the variables that hold such numbers, as `Roots` names them."""
    found, nearer = set[str](), set[str]()
    while frame is not None:
        code = frame.f_code
        if is_script(code.co_filename):
            idle = _idle_in(code.co_filename) & frame.f_locals.keys()
            owner = frame.f_globals.get("__name__") if frame.f_locals is frame.f_globals else code.co_qualname
            found |= {*(idle - nearer), *(f"{owner}.{name}" for name in idle)}
            nearer |= frame.f_locals.keys()
        frame = frame.f_back
    return found


@functools.cache
def _idle_in(file: str) -> frozenset[str]:
    """The names in a file that loops over `enumerate` give its numbers, and that occur nowhere else in it."""
    nodes = list(ast.walk(tree_of(file) or ast.Module([], [])))
    used = [one for one in nodes if isinstance(one, ast.Name)]
    indices = [n for one in nodes if isinstance(one, ast.For | ast.AsyncFor) for n in _index_of(one)]
    other = {one.id for one in used if not any(one is index for index in indices)}
    other |= {name for one in nodes if isinstance(one, ast.Global | ast.Nonlocal) for name in one.names}
    return frozenset() if other & _READS_ANY else frozenset({one.id for one in indices} - other)


def _index_of(loop: ast.For | ast.AsyncFor) -> list[ast.Name]:
    match loop.target, loop.iter:
        case ast.Tuple(elts=[ast.Name() as index, _]), ast.Call(func=ast.Name(id="enumerate")):
            return [index]
    return []
