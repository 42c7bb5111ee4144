"""Finds what no variable around the loop leads to: the globals of the script's other modules, what the script has set
on modules and classes of libraries, settings of torch, and the variables of the environment.

Invariants: none of the script's code is called. Of a module only that is read which may change: a name that some
function binds anew, and objects.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from everstep.train.guards.plain_values import may_change
from everstep.train.guards.script_objects import is_own, is_script, is_special, public, scopes
from everstep.train.guards.sources import OURS

MOST_MODULES = 64
# Launchers, torch and this package set these, anew for each world.
_OF_THE_WORLD = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCH", "EVERSTEP", "_EVERSTEP", "HOROVOD", "GLOO_",
    "NCCL_", "OMP_", "ACCELERATE_", "PL_", "PYTEST", "COLUMNS", "LINES", "PWD", "OLDPWD",
)  # fmt: skip
_AT_START = dict(os.environ)
# By a module's name its id, and whether it is of the script's: libraries have thousands, and each step looks.
_judged = dict[str, tuple[int, bool]]()
_NUMBERS = (bool, int, float, str)
_VALUES = (*_NUMBERS, list, dict, set, deque, torch.Tensor, np.ndarray)
_OWNERS = (types.ModuleType, type, types.FunctionType)
_LEVELS = 4  # `torch.nn.functional.mse_loss.calls`
_PREFIX, _SETS = dis.opmap["EXTENDED_ARG"], dis.opmap["STORE_ATTR"]
_STORES = frozenset({_SETS, dis.opmap["STORE_GLOBAL"]})


def elsewhere(frame: types.FrameType | None, beyond: list[str]) -> list[tuple[str, Any]]:
    """Values by the names by which the script could write them. `beyond` gets a text if there are too many modules."""
    others = _others(frame, beyond)
    texts = _texts(frame, others)
    return [
        *_of_modules(others),
        *_of_made(texts),
        *_of_libraries(texts),
        *_of_environment(),
        *_of_torch(),
        *_of_python(),
    ]


def set_on_objects(frame: types.FrameType | None) -> frozenset[str]:
    """The names of the attributes that the script's text sets on objects."""
    return frozenset[str]().union(*(text.set for _, text in _texts(frame, _others(frame, []))))


def named_by_script(frame: types.FrameType | None) -> frozenset[str]:
    """The globals, attributes and keys that the script's text names, in all of its modules. Python's own are left out:
    a text of documentation names `__doc__`, which each class of a library has that a step imports."""
    texts = [text for _, text in _texts(frame, _others(frame, []))]
    while frame is not None:
        module = sys.modules.get(str(frame.f_globals.get("__name__")))
        texts += [_text_of(module)] if module is not None and is_script(frame.f_code.co_filename) else []
        frame = frame.f_back
    names = frozenset[str]().union(*(text.read | text.set | text.texts for text in texts))
    return frozenset(name for name in names if not is_special(name))


def _of_torch() -> Iterator[tuple[str, Any]]:
    """Settings of the process by which gradients are computed."""
    for function in (
        torch.get_default_dtype, torch.get_float32_matmul_precision, torch.are_deterministic_algorithms_enabled,
        torch.get_num_threads,
    ):  # fmt: skip
        yield f"torch.{function.__name__}()", function()


def _of_python() -> Iterator[tuple[str, Any]]:
    """Settings of the process, and of this thread, that no object holds of which the script has a variable."""
    yield "sys.getrecursionlimit()", sys.getrecursionlimit()
    if (decimal := sys.modules.get("decimal")) is not None:
        context = decimal.getcontext()
        for name in ("prec", "rounding", "Emin", "Emax"):  # not the flags, which each calculation sets
            yield f"decimal.getcontext().{name}", getattr(context, name)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        yield "os.umask()", next(line for line in lines if line.startswith("Umask:")).split()[1]


def _of_environment() -> Iterator[tuple[str, Any]]:
    """Those that this process has set. A text may be a secret, and is not shown."""
    for name, value in list(os.environ.items()):
        if _AT_START.get(name) != value and not name.startswith(_OF_THE_WORLD):
            is_number = value.removeprefix("-").replace(".", "", 1).isdigit()
            yield f"os.environ[{name!r}]", value if is_number else frozenset((value,))


def _others(frame: types.FrameType | None, beyond: list[str]) -> list[types.ModuleType]:
    """The script's modules that no variable around the loop is, and whose functions do not run."""
    known = {id(value) for scope in scopes(frame) for _, value in scope.variables}
    while frame is not None:
        known.add(id(sys.modules.get(frame.f_globals.get("__name__", ""))))
        frame = frame.f_back
    others = [
        module for name, module in list(sys.modules.items()) if _is_of_user(name, module) and id(module) not in known
    ]
    if len(others) > MOST_MODULES:
        beyond.append(f"the globals of more than {MOST_MODULES} modules")
    return others[:MOST_MODULES]


def _is_of_user(name: str, module: types.ModuleType) -> bool:
    judged = _judged.get(name)
    if judged is None or judged[0] != id(module):
        file = getattr(module, "__file__", None) or ""
        of_user = name.partition(".")[0] not in OURS and os.path.isabs(file) and is_script(file)
        judged = _judged[name] = id(module), of_user
    return judged[1]


def _of_modules(others: list[types.ModuleType]) -> Iterator[tuple[str, Any]]:
    stored = frozenset[str]().union(*(_text_of(module).stored for module in others))
    seen = set[int]()
    for module in others:
        for key, value in public(vars(module)):
            name = f"{module.__name__}.{key}"
            if key in stored or (may_change(value) and id(value) not in seen):
                seen.add(id(value))
                yield name, value
            elif isinstance(value, type) and value.__module__ == module.__name__ and is_own(value):
                yield from ((f"{name}.{part}", inner) for part, inner in _attributes(vars(value)))


def _of_made(texts: list[tuple[Mapping[str, Any], _Text]]) -> Iterator[tuple[str, Any]]:
    """Of modules that no file has, which the script has put into `sys.modules` and imports."""
    for name in sorted(frozenset[str]().union(*(text.read for _, text in texts)) & sys.modules.keys()):
        module = sys.modules[name]
        if type(module) is types.ModuleType and not (hasattr(module, "__file__") or getattr(module, "__spec__", None)):
            yield from ((f"{name}.{key}", value) for key, value in public(vars(module)))


def _attributes(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Those of a class that are no methods."""
    for key, value in list(variables.items()):
        if not is_special(key) and not callable(value) and not hasattr(type(value), "__get__"):
            yield key, value


def _texts(frame: types.FrameType | None, others: list[types.ModuleType]) -> list[tuple[Mapping[str, Any], _Text]]:
    """Of the script's functions that run and of its other modules, each with the variables of its module."""
    texts: list[tuple[Mapping[str, Any], _Text]] = [(vars(module), _text_of(module)) for module in others]
    while frame is not None:
        if is_script(frame.f_code.co_filename):
            texts.append((frame.f_globals, _text_in(frame.f_code)))
        frame = frame.f_back
    return texts


def _of_libraries(texts: list[tuple[Mapping[str, Any], _Text]]) -> Iterator[tuple[str, Any]]:
    """What the script has set on modules, classes and functions of libraries: `torch.nn.functional.calls`, a function
    in place of a method. Its text names them, and the attribute that it binds."""
    attributes = frozenset[str]().union(*(text.set for _, text in texts))
    owners = dict[int, Any]()
    for variables, text in texts:
        waiting = [(variables[name], 0) for name in text.read if name in variables]
        while waiting:
            owner, level = waiting.pop()
            if not isinstance(owner, _OWNERS) or id(owner) in owners or is_own(getattr(owner, "__class__", object)):
                continue
            owners[id(owner)] = owner
            inner = vars(owner)
            waiting += [(inner[name], level + 1) for name in text.read if name in inner] if level < _LEVELS else []
    for owner in owners.values():
        where = [getattr(owner, "__module__", None), getattr(owner, "__qualname__", owner.__name__)]
        for name in attributes & vars(owner).keys():
            value = vars(owner)[name]
            full = ".".join([*filter(None, where), name])
            # Those of Python's own that are no numbers change without a meaning: `sys.modules`.
            kinds = _NUMBERS if full.partition(".")[0] in sys.stdlib_module_names else _VALUES
            if isinstance(value, kinds) or _is_of_script(value):
                yield full, value


def _is_of_script(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        return is_script(value.__code__.co_filename)
    return not isinstance(value, type | types.ModuleType) and is_own(type(value))


class _Text(NamedTuple):
    """`stored`: the names that functions bind outside of themselves. `set`: those that are set on an object. `read`:
    the globals and attributes that are read. `texts`: those that stand in it and may be keys or names."""

    stored: frozenset[str]
    set: frozenset[str]
    read: frozenset[str]
    texts: frozenset[str] = frozenset()


@functools.lru_cache(maxsize=2 * MOST_MODULES)
def _text_of(module: types.ModuleType) -> _Text:
    """Of all functions of a module. Where its text is not known, each of its names may be bound."""
    try:
        return _text_in(module.__loader__.get_code(module.__name__))  # type: ignore[union-attr]
    except Exception:  # a loader of the script's own may raise anything
        return _Text(frozenset(vars(module)), frozenset(), frozenset())


@functools.lru_cache(maxsize=2 * MOST_MODULES)
def _text_in(code: types.CodeType) -> _Text:
    waiting, stored, attributes, read, texts = [code], set[str](), set[str](), set[str](), set[str]()
    while waiting:
        part = waiting.pop()
        waiting += [inner for inner in part.co_consts if isinstance(inner, types.CodeType)]
        read.update(part.co_names)
        plain = [value for inner in part.co_consts for value in (inner if type(inner) is tuple else (inner,))]
        texts.update(value for value in plain if isinstance(value, str) and value.isidentifier())
        prefix = 0
        for operation, argument in zip(part.co_code[::2], part.co_code[1::2], strict=True):
            number, prefix = argument | prefix, 0
            if operation == _PREFIX:
                prefix = number << 8
            elif operation in _STORES and part is not code:
                stored.add(part.co_names[number])
            if operation == _SETS:
                attributes.add(part.co_names[number])
        if not {"globals", "setattr"}.isdisjoint(part.co_names):
            stored.update(inner for inner in part.co_consts if isinstance(inner, str))
            attributes.update(inner for inner in part.co_consts if isinstance(inner, str))
    return _Text(frozenset(stored), frozenset(attributes), frozenset(read), frozenset(texts))
