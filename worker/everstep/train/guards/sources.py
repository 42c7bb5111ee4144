"""Reads the text of the script's functions, and finds their definitions in it."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import types
from collections.abc import Iterator
from typing import Any

from everstep.train.guards.script_objects import is_script

LARGEST = 2**20  # bytes of the largest file that is read
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
DECORATORS = 20  # most lines of decorators
# Where they are installed from a checkout, their files do not look like those of a library.
OURS = {"everstep", "everstep_horovod", "everstep_local", "everstep_operator", "everstep_sources"}


def tree_of(path: str) -> ast.Module | None:
    """The syntax tree of a file; None if there is no text."""
    text = "".join(linecache.getlines(path))
    return _parsed(text) if text and len(text) <= LARGEST else None


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def forget() -> None:
    """Give up the trees: what is read once, at the start, is read many times."""
    _parsed.cache_clear()
    _definitions.cache_clear()


def loaded_files() -> set[str]:
    """The files of the script that this process has loaded."""
    loaded = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] not in OURS]
    files = {getattr(module, "__file__", None) or "" for module in loaded}
    return {file for file in files if file and is_script(file, named=True)}


def code_of(function: Any) -> types.CodeType | None:
    """The code of a function of the script, without its decorators."""
    function = inspect.unwrap(function) if callable(function) else None
    is_own = isinstance(function, types.FunctionType) and is_script(function.__code__.co_filename)
    return function.__code__ if is_own else None


def definition(tree: ast.Module, code: types.CodeType) -> ast.FunctionDef | None:
    """The definition of a function. A lambda counts as one, if it is the only one in its line."""
    if code.co_name == "<lambda>":
        lambdas = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno]
        return _named(lambdas[0]) if len(lambdas) == 1 else None
    lines = range(code.co_firstlineno, code.co_firstlineno + DECORATORS)
    named = (n for n in _definitions(tree).get(code.co_name, ()) if n.lineno in lines)
    return min(named, key=lambda n: n.lineno, default=None)


@functools.lru_cache(maxsize=64)
def _definitions(tree: ast.Module) -> dict[str, list[ast.FunctionDef]]:
    by_name = dict[str, list[ast.FunctionDef]]()
    for n in ast.walk(tree):
        if isinstance(n, ast.FunctionDef):
            by_name.setdefault(n.name, []).append(n)
    return by_name


def frames_that_ask(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The frames from `frame` upwards, to that of the script's function in whose loop it asks for a step."""
    while frame is not None:
        yield frame
        if is_script(frame.f_code.co_filename) and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        frame = frame.f_back


def loop_at(file: str, line: int) -> tuple[ast.Module, ast.For | ast.While] | None:
    """The innermost loop that takes its next element in this line, also by `next`, with its file."""
    tree = tree_of(file)
    loops: list[ast.For | ast.While] = [
        n for n in (ast.walk(tree) if tree is not None else ())
        if (isinstance(n, ast.For) and n.iter.lineno <= line <= end(n.iter))
        or (isinstance(n, ast.For | ast.While) and n.lineno <= line <= end(n) and _takes(n, line))
    ]  # fmt: skip
    innermost = max(loops, key=lambda n: n.lineno, default=None)
    return None if tree is None or innermost is None else (tree, innermost)


def counted_around(tree: ast.AST, loop: ast.AST) -> dict[str, int]:
    """The variables of the `for` loops around this one that their bodies read, with their lines: a loop over steps that
    is taken in parts, as by `islice`; also of this one if it takes steps by `next` and counts them by `range`. In a new
    process parts and counts begin anew. A loop that asks for its steps itself is no part."""
    counted = dict[str, int]()
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef)):
        for around in (n for n in _within(function) if isinstance(n, ast.For)):
            if around is loop and not (isinstance(around.iter, ast.Call) and path_of(around.iter.func) == "range"):
                continue
            inside = [n for part in around.body for n in ast.walk(part)]
            asks = any(isinstance(n, ast.Attribute) and n.attr in ("steps", "epochs") for n in ast.walk(around))
            if (around is not loop and loop not in inside) or loop not in _within(function) or asks:
                continue
            read = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            names = (n.id for n in ast.walk(around.target) if isinstance(n, ast.Name) and n.id in read)
            counted.update(dict.fromkeys(names, around.lineno))
    return counted


def _within(function: ast.AST) -> list[ast.AST]:
    """Its nodes, without those of the functions in it."""
    nodes, todo = list[ast.AST](), list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            nodes.append(node)
            todo += ast.iter_child_nodes(node)
    return nodes


def _takes(loop: ast.For | ast.While, line: int) -> bool:
    calls = (n for n in ast.walk(loop) if isinstance(n, ast.Call) and n.lineno <= line <= end(n))
    return any((path_of(n.func) or "").rpartition(".")[2] in ("next", "__next__") for n in calls)


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


def end(node: ast.stmt | ast.expr) -> int:
    """The last line of its text."""
    return node.end_lineno or node.lineno


def own_names(function: Function) -> set[str]:
    """The variables of a function that end with its call."""
    own = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    waiting: list[ast.AST] = [*function.body] if isinstance(function.body, list) else [function.body]
    others = set[str]()
    for n in waiting:
        match n:
            case ast.Global() | ast.Nonlocal():
                others.update(n.names)
            case ast.Name(ctx=ast.Store() | ast.Del()):
                own.add(n.id)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                own.add(n.name)
            case ast.Import() | ast.ImportFrom():
                own.update(alias.asname or alias.name.partition(".")[0] for alias in n.names)
        if not isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(n))
    return own - others


def _named(e: ast.Lambda) -> ast.FunctionDef:
    body = ast.copy_location(ast.Return(e.body), e.body)
    return ast.copy_location(ast.FunctionDef(f"lambda{e.lineno}", e.args, [body], []), e)
