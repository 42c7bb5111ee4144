"""Reads the text of the script's functions, and finds their definitions in it."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import linecache
import sys
import types
from pathlib import Path
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


def program() -> str | None:
    """A digest of the script's arguments, of the files that they name, and of all files of the script that this process
    has loaded. None if the script is no file (a prompt, a notebook)."""
    if getattr(sys.modules.get("__main__"), "__file__", None) is None:
        return None
    found = hashlib.sha256(repr(sys.argv).encode())
    named = [part for argument in sys.argv[1:] for part in (argument, argument.rpartition("=")[2])]
    for path in (*sorted(loaded_files()), *named):
        with contextlib.suppress(OSError, ValueError):
            if Path(path).is_file() and Path(path).stat().st_size <= LARGEST:
                found.update(path.encode() + b"\0" + Path(path).read_bytes())
    return found.hexdigest()


def code_of(function: Any) -> types.CodeType | None:
    """The code of a function of the script, without its decorators."""
    function = inspect.unwrap(function) if callable(function) else None
    found = isinstance(function, types.FunctionType) and is_script(function.__code__.co_filename)
    return function.__code__ if found else None


def definition(tree: ast.Module, code: types.CodeType) -> ast.FunctionDef | None:
    """The definition of a function. A lambda counts as one, if it is the only one in its line."""
    if code.co_name == "<lambda>":
        found = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == code.co_firstlineno]
        return _named(found[0]) if len(found) == 1 else None
    lines = range(code.co_firstlineno, code.co_firstlineno + DECORATORS)
    named = (n for n in _definitions(tree).get(code.co_name, ()) if n.lineno in lines)
    return min(named, key=lambda n: n.lineno, default=None)


@functools.lru_cache(maxsize=64)
def _definitions(tree: ast.Module) -> dict[str, list[ast.FunctionDef]]:
    found = dict[str, list[ast.FunctionDef]]()
    for n in ast.walk(tree):
        if isinstance(n, ast.FunctionDef):
            found.setdefault(n.name, []).append(n)
    return found


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
                own.update(one.asname or one.name.partition(".")[0] for one in n.names)
        if not isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(n))
    return own - others


def _named(e: ast.Lambda) -> ast.FunctionDef:
    body = ast.copy_location(ast.Return(e.body), e.body)
    return ast.copy_location(ast.FunctionDef(f"lambda{e.lineno}", e.args, [body], []), e)
