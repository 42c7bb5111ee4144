"""Names the objects that may hold state of the script's and of which nothing is read: a rehearsal lists them."""

from __future__ import annotations

import calendar
import fractions
import functools
import io
import multiprocessing.context
import pprint
import random
import re
import subprocess
import sys
import tempfile
import threading
import types
from typing import Any

from everstep.contract.library_files import is_library
from everstep.train.guards.contents import PRINTED, STATEFUL
from everstep.train.guards.holders import first_of, reader_of
from everstep.train.guards.plain_values import MOST_NAMED, Roots
from everstep.train.guards.script_objects import NamedValue

# Objects of these modules are a part of the program, or change without a meaning.
_STATELESS = frozenset({
    "_abc", "_asyncio", "_frozen_importlib", "_frozen_importlib_external", "_io", "_ssl", "_thread", "_weakref",
    "_weakrefset", "abc", "argparse", "ast", "asyncio", "builtins", "codecs", "collections", "concurrent", "contextlib",
    "csv", "dataclasses", "datetime", "enum", "functools", "gettext", "http", "importlib", "inspect", "ipaddress",
    "itertools", "json", "locale", "logging", "operator", "optparse", "os", "pathlib", "pickle", "platform", "posix",
    "re", "selectors", "signal", "socket", "ssl", "string", "struct", "subprocess", "sys", "textwrap",
    "threading", "time", "traceback", "types", "typing", "unittest", "urllib", "uuid", "warnings", "zipfile",
    "zipimport", "zoneinfo", "__future__",
})  # fmt: skip
_WITHOUT_STATE = frozenset({
    "", "__main__", "everstep", "google", "grpc", "numpy", "psutil", "pyarrow", "pybind11_builtins", "pydantic_core",
    "regex", "safetensors", "sentencepiece", "tokenizers", "torch", "yaml",
})  # fmt: skip
_HIDING = frozenset({"pandas"})  # in arrays that several objects share
# Of torch's and numpy's: key-value stores, containers and objects of TorchScript, sums of a monitor, positions.
_HOLDING = frozenset({"Store", "ScriptDict", "ScriptList", "ScriptObject", "Stat", "LockingLogger", "broadcast"})
# Of modules in which others hold state: what these hold no step changes. A fraction is read by its parts.
_CONSTANT = (
    calendar.Calendar, fractions.Fraction, multiprocessing.context.BaseContext, pprint.PrettyPrinter,
    random.SystemRandom, tempfile.TemporaryDirectory,
)  # fmt: skip
_CALLING: Any = type(iter(int, 1))  # an iterator that calls a function
_SCANNER = type(re.compile("").scanner(""))  # type: ignore[attr-defined]  # the function of `re.finditer` is of one
_COUNTED = (threading.Semaphore, threading.local)


class NotRead:
    """The objects of one walk. A few of each class: a script may declare the first one."""

    def __init__(self) -> None:
        self._names = dict[str, list[str]]()

    def look(self, named: NamedValue) -> None:
        """At an object that the walk has come to."""
        is_read = isinstance(named.value, STATEFUL) and not isinstance(named.value, types.GeneratorType)
        if not is_read and (kind := not_read(named.value)):
            names = self._names.setdefault(kind, [])
            names += [named.name] if len(names) < MOST_NAMED else []

    def names(self, roots: Roots) -> list[str]:
        """Each with its class, but for what belongs to something tracked."""
        named = ((name, kind) for kind, names in self._names.items() for name in names)
        return [f"{name} ({kind})" for name, kind in named if not roots.is_tracked(name)]


def not_read(value: Any) -> str:
    """The name of its class, if it is an object of Python's own library that may hold state and of which nothing is
    read, or of an extension in C; otherwise nothing."""
    kind: Any = type(value)
    module = kind.__module__ or ""
    if kind in PRINTED or (_may_hold(module) and issubclass(kind, _CONSTANT)):
        return ""
    if issubclass(kind, types.GeneratorType):
        return _of_library(value)
    if isinstance(value, subprocess.Popen):  # a process that the script asks: its variables are its own
        return "subprocess.Popen" if value.stdin and value.stdout and value.returncode is None else ""
    if _hides_position(value, kind):
        return "re.finditer" if kind is _CALLING else f"{module}.{kind.__qualname__}"
    if first_of(kind) in _COUNTED or (_may_hold(module) and not issubclass(kind, type)) or _is_extension(kind):
        return "" if reader_of(kind) is not None else f"{module}.{kind.__qualname__}"
    return ""


def _of_library(generator: Any) -> str:
    """The function of a generator of a library that can go on: its variables are not read. Those of ours, such as the
    loop over a run's steps, go on with the run."""
    frame = generator.gi_frame
    if frame is None or generator.gi_running or not is_library(generator.gi_code.co_filename):
        return ""
    module = str(frame.f_globals.get("__name__", ""))
    return "" if module.startswith("everstep") else f"{module}.{generator.__qualname__}"


def _hides_position(value: Any, kind: Any) -> bool:
    """Whether it is an iterator of Python's own, or a text that is read line by line, which cannot say where it is."""
    if kind is io.TextIOWrapper:
        try:
            return not value.closed and value.readable() and value.seekable() and value.tell() < 0
        except (OSError, ValueError):  # by `next`: all of a small file is in memory then
            return True
    if kind is _CALLING:
        called = next(iter(value.__reduce__()[1]), None)
        return isinstance(called, types.BuiltinMethodType) and isinstance(called.__self__, _SCANNER)
    is_iterator = kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")
    return is_iterator and kind.__reduce__ is object.__reduce__ and not issubclass(kind, types.GeneratorType)


@functools.lru_cache(maxsize=4096)
def _is_extension(kind: type) -> bool:
    """Whether its objects hold what no attribute shows, in a library that is not known to hold nothing there."""
    package = (kind.__module__ or "").partition(".")[0]
    if package in _HIDING:
        return True
    if package in ("torch", "numpy") and not _HOLDING.isdisjoint(base.__name__ for base in kind.__mro__):
        return True
    has_attributes = kind.__dictoffset__ or any("__slots__" in vars(base) for base in kind.__mro__)
    return not (has_attributes or package in _WITHOUT_STATE or package in sys.stdlib_module_names)


@functools.lru_cache(maxsize=4096)
def _may_hold(module: str) -> bool:
    package = module.partition(".")[0]
    return package in sys.stdlib_module_names and package not in _STATELESS
