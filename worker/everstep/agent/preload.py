"""Finds a script's slow imports (Hugging Face's and Lightning's), which the fork server makes before the fork.

These imports take tens of seconds. The script is read, not run, together with the modules beside it that it imports.
Invariants: a module is imported only if the script imports it, or if a library does at the script's call. Nothing is
imported if the script may set an environment variable, because libraries read many variables at import. A file that
cannot be read is left alone: the process itself reports it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

# Libraries that take long to import. `import transformers` alone imports next to nothing, so the names that a script
# imports from them are imported too.
SLOW = ("transformers", "accelerate", "datasets", "peft", "trl", "evaluate", "lightning", "pytorch_lightning")
# Libraries that these import late, in a function that every script calls: `accelerator.prepare(loader)`.
LATE = {"accelerate": "datasets"}
OURS = "everstep"  # its adapters import these libraries
MOST_FILES = 32
MOST_BYTES = 2**20  # of a file
MOST_NAMES = 64

# Functions by which a script sets environment variables, on whatever object it calls them.
_SETTERS = ("putenv", "unsetenv", "load_dotenv")


def preloaded(script: str) -> tuple[str, ...]:
    """The modules to import, or names in them as "module:name", in the script's order; none if that is not safe."""
    modules: list[str] = []
    waiting, seen = [Path(script)], set[Path]()
    while waiting:
        path = waiting.pop(0)
        if path in seen:
            continue
        seen.add(path)
        tree = _read(path)
        if len(seen) > MOST_FILES or tree is None or _is_opaque(tree) or _sets_variables(tree):
            return ()
        for module, name in _imports(tree):
            top = module.partition(".")[0]
            if top in SLOW and _is_users_own(top, script):
                return ()
            if top in SLOW or f"{module}.".startswith(f"{OURS}.train.adapters."):
                modules.append(f"{module}:{name}" if name else module)
                modules += [
                    late for library, late in LATE.items() if library in module.split(".") and _is_there(late, script)
                ]
            else:
                waiting += _beside(Path(script).parent, module)
    return tuple(dict.fromkeys(modules))[:MOST_NAMES]


def _read(path: Path) -> ast.Module | None:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        return ast.parse(text) if len(text) <= MOST_BYTES else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_users_own(module: str, script: str) -> bool:
    """Whether the user has a file with the library's name."""
    return any(_beside(folder, module) for folder in (Path(script).parent, Path.cwd()))


def _is_there(module: str, script: str) -> bool:
    """Whether the library is installed, and no file of the user's hides it."""
    return importlib.util.find_spec(module) is not None and not _is_users_own(module, script)


def _beside(folder: Path, module: str) -> list[Path]:
    """The files of a module in this folder."""
    files, here = [], folder
    for part in module.split("."):
        files += [path for path in (here / f"{part}.py", here / part / "__init__.py") if path.is_file()]
        here /= part
    return files


def _is_opaque(tree: ast.Module) -> bool:
    """Whether the file has relative imports, which are not followed here."""
    return any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each module that the file imports at its own import, with the name that is taken from it, or without one."""
    for node in _at_import(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, "" if alias.name == "*" else alias.name) for alias in node.names)


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes outside of functions; a function may never be called."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _at_import(node)


def _sets_variables(tree: ast.Module) -> bool:
    """Whether the file may set environment variables, also in functions, because an import may call them."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _SETTERS:
                return True
            case ast.Call(func=ast.Attribute(value=value, attr="setdefault" | "update" | "pop" | "clear")):
                if _is_environ(value):
                    return True
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()) if _is_environ(value):
                return True
    return False


def _is_environ(value: ast.AST) -> bool:
    return (isinstance(value, ast.Attribute) and value.attr == "environ") or (
        isinstance(value, ast.Name) and value.id == "environ"
    )
