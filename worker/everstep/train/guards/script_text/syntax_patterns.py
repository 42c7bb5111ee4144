"""Recognises forms of expressions and statements of a script. Pure: it answers questions about syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_INDEX = re.compile(r"(.*_)?(i|j|idx|index|id|uid|path|file|filename|fname)")  # of a variable: which sample it is
_SIZES = frozenset({"size", "numel", "dim"})


def path_of(e: ast.AST) -> str | None:
    """ "a.b['c']", if it is written so."""
    match e:
        case ast.Name():
            return e.id
        case ast.Attribute():
            owner = path_of(e.value)
            return None if owner is None else f"{owner}.{e.attr}"
        case ast.Subscript(slice=ast.Constant(value=str() | int() as key)):
            owner = path_of(e.value)
            return None if owner is None else f"{owner}[{key!r}]"
    return None


def root_of(e: ast.expr) -> ast.expr:
    """The object of an element or a slice."""
    while isinstance(e, ast.Subscript) and path_of(e) is None:
        e = e.value
    return e


def or_itself(source: ast.AST | None, key: str) -> bool:
    """Whether it keeps its value or gets another: `x = x or 1`."""
    match source:
        case ast.BoolOp(values=operands):
            pass
        case ast.IfExp():
            operands = [source.body, source.orelse]
        case _:
            return False
    others = [o for o in operands if path_of(o) != key]
    return len(others) < len(operands) and not any(path_of(n) == key for o in others for n in ast.walk(o))


def asked_for(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The keys and containers, as written, in a file's tests whether a key exists."""
    for n in ast.walk(tree):
        match n:
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[container]):
                yield ast.unparse(key), ast.unparse(container)
            case ast.Call(func=ast.Attribute(value=container, attr="get"), args=[key, *_]):
                yield ast.unparse(key), ast.unparse(container)
            case ast.Try(handlers=[ast.ExceptHandler(type=ast.Name(id="KeyError"))]):
                reads = (part for s in n.body for part in ast.walk(s) if isinstance(part, ast.Subscript))
                yield from ((ast.unparse(part.slice), ast.unparse(part.value)) for part in reads)


def is_property(method: ast.FunctionDef) -> bool:
    return any((path_of(d) or "").endswith("property") for d in method.decorator_list)


def is_index(key: ast.expr) -> bool:
    """Whether it identifies a sample: `idx`, `batch.index`, `int(i)`. A label does not: many samples share it."""
    while isinstance(key, ast.Call) and (key.args or isinstance(key.func, ast.Attribute)):
        key = key.args[0] if key.args else key.func.value if isinstance(key.func, ast.Attribute) else key
    while isinstance(key, ast.Subscript):
        key = key.value
    name = (path_of(key) or "").rpartition(".")[2]
    return _INDEX.fullmatch(name) is not None


def current_of(s: ast.If) -> Iterator[tuple[ast.expr, list[ast.Assign]]]:
    """For `if now != last: last = now; made = f(now)`: the value from which the rest may be made, and the
    assignments."""
    tests = s.test.values if isinstance(s.test, ast.BoolOp) and isinstance(s.test.op, ast.Or) else [s.test]
    body = [n for n in s.body if isinstance(n, ast.Assign)]
    targets = {path_of(root_of(t)) for n in body for t in n.targets}
    if len(body) < len(s.body) or s.orelse or None in targets:
        return
    others = [t for t in tests if not _asks_differs(t)]
    if not all(_asks_absent(t, targets) for t in others):
        return
    for test in tests:
        match test:
            case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[right]):
                for now, last in ((left, right), (right, left)):
                    if path_of(_sized(last)) in targets and not _mentions(now, targets):
                        yield now, body


def _asks_differs(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.NotEq)


def _asks_absent(test: ast.expr, targets: set[str | None]) -> bool:
    match test:
        case ast.Compare(left=held, ops=[ast.Is()], comparators=[ast.Constant(value=None)]):
            return path_of(held) in targets
        case ast.UnaryOp(op=ast.Not(), operand=held):
            return path_of(held) in targets
    return False


def _sized(e: ast.expr) -> ast.expr:
    """The object whose size `mask.shape[0]`, `mask.size(1)` and `len(mask)` are."""
    match e:
        case ast.Subscript(value=ast.Attribute(value=held, attr="shape")) | ast.Call(func=ast.Name("len"), args=[held]):
            return held
        case ast.Call(func=ast.Attribute(value=held, attr=attr)) if attr in _SIZES:
            return held
    return e


def _mentions(e: ast.expr, paths: set[str | None]) -> bool:
    return any(path_of(n) in paths for n in ast.walk(e))


def counts_itself(function: ast.FunctionDef) -> bool:
    """Whether the values of a generator depend on the number of earlier calls. They do not if it begins again each
    time."""
    asked = [n for n in ast.walk(function) if isinstance(n, ast.Yield | ast.YieldFrom)]
    loops = [n for n in function.body if isinstance(n, ast.While)]
    if len(asked) != 1 or not isinstance(asked[0], ast.Yield) or len(loops) != 1:
        return True
    (loop,) = loops
    inside = list(ast.walk(loop))
    if asked[0] not in inside or any(isinstance(n, ast.For) and asked[0] in list(ast.walk(n)) for n in inside):
        return True
    stored = {path_of(n) for n in inside if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Store)}
    written = set[str | None]()
    for statement in loop.body:
        parts = list(ast.walk(statement))
        reads = {path_of(n) for n in parts if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Load)}
        if any(isinstance(n, ast.AugAssign) or _advances(n) for n in parts) or reads & (stored - written):
            return True
        written |= {path_of(n) for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return False


def _advances(n: ast.AST) -> bool:
    match n:
        case ast.Call(func=ast.Name("next")):
            return True
        case ast.Call(func=ast.Attribute(attr=attr)):
            return attr in ("append", "pop", "popleft", "update", "add")
    return False
