"""Runs a script in this process as the interpreter would. Standard library only."""

from __future__ import annotations

import builtins
import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType


class ScriptUnreadable(Exception):
    """The file of the script cannot be read; the text is the system's."""


def main_module() -> ModuleType:
    """An empty `__main__`, which stays what it is until the process ends: threads and functions of `atexit` that go on
    after the program's last line find its classes there."""
    module = ModuleType("__main__")
    # In this module the name is a dictionary: the interpreter gives a main module the module.
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    return module


def run_script(script: str, arguments: Sequence[str]) -> None:
    """As `python SCRIPT ARGUMENTS…`: with its `sys.argv`, its `sys.path[0]` and its `__main__`, which stay in place.
    Raises `ScriptUnreadable` before anything runs, and what the script raises."""
    path = os.path.abspath(script)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as e:
        raise ScriptUnreadable(str(e.strerror)) from e
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = main_module()
    module.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None)
    # Without `dont_inherit`, the script would inherit this file's `from __future__ import annotations`.
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - running the user's script is this module's purpose
