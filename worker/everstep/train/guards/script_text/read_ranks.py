"""Finds variables of a script that hold a rank, or a number of ranks, from the environment.

The text decides. A variable holds a rank if it was assigned one, a value computed from one, or the answer to a question
about one (`main = RANK == 0`). The result of a call is not a rank (a wrapped model, a logger). Neither is the answer to
the question whether there are ranks at all (`"RANK" in os.environ`, `rank != -1`), which is the same in every world.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from everstep.train.guards.script_text.syntax_patterns import path_of

RANKS = frozenset({"RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"})
_CONVERSIONS = frozenset({"int", "str", "float", "bool", "min", "max", "abs"})
_ABSENT = (None, "", "-1", -1)  # what scripts use as the rank if there is none


def read_ranks(tree: ast.Module, within: tuple[int, int]) -> dict[str, int]:
    """The path of each such variable that is bound outside of the lines `within`, and its line."""
    found = dict[str, int]()
    changed = ((n.target, n.value) for n in ast.walk(tree) if isinstance(n, ast.AugAssign))  # `accumulate //= world`
    for target, value in sorted((*bound(tree), *changed), key=lambda pair: pair[1].lineno):
        if not within[0] <= value.lineno <= within[1] and (path := path_of(target)) is not None and holds(value, found):
            found[path] = value.lineno
    return found


def bound(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The assignments in the order of the lines; `a, b = c, d` is two."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.AnnAssign)]
    for n in sorted(found, key=lambda n: n.lineno):
        if n.value is None:
            continue
        for target in n.targets if isinstance(n, ast.Assign) else [n.target]:
            pair = (target, n.value)
            if all(isinstance(e, ast.Tuple | ast.List) for e in pair) and len(target.elts) == len(n.value.elts):  # type: ignore[attr-defined]
                yield from zip(target.elts, n.value.elts, strict=True)  # type: ignore[attr-defined]
            else:
                yield pair


def holds(value: ast.expr, names: Collection[str]) -> bool:
    """Whether the expression is a rank, or depends on one. `names`: the variables that hold one."""
    if (path_of(value) or "") in names:
        return True
    match value:
        case ast.Subscript(value=owner, slice=ast.Constant(value=str() as key)):
            return key in RANKS and _is_environment(owner)
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _CONVERSIONS:
            return any(holds(a, names) for a in arguments)
        case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=key), *_]):
            return key in RANKS and _is_environment(owner)
        case ast.Call(func=function, args=[ast.Constant(value=key), *_]):
            return key in RANKS and (path_of(function) or "").endswith("getenv")
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return not _asks_whether_any(op, right) and (holds(left, names) or holds(right, names))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            # A choice between objects is made once; a choice between values gives each rank its own.
            chosen = not any(isinstance(e, ast.Call) for e in (body, orelse)) and holds(test, names)
            return chosen or holds(body, names) or holds(orelse, names)
        case ast.BinOp() | ast.UnaryOp() | ast.BoolOp() | ast.Compare():
            return any(holds(e, names) for e in ast.iter_child_nodes(value) if isinstance(e, ast.expr))
    return False


def _is_environment(owner: ast.expr) -> bool:
    path = path_of(owner) or ""
    return path == "environ" or path.endswith(".environ")


def _asks_whether_any(op: ast.cmpop, right: ast.expr) -> bool:
    try:
        limit = ast.literal_eval(right)
    except ValueError:
        return False
    match op:
        case ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot():
            return limit in _ABSENT
        case ast.Gt() | ast.LtE():
            return bool(limit == -1)
        case ast.GtE() | ast.Lt():
            return bool(limit == 0)
    return False
