"""Reads the values of a script's variables before its loop, and the text of the functions among them.

Invariant: none of the script's code is called.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import re
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everstep.train.guards.script_objects import is_script
from everstep.train.guards.script_text.hidden_attributes import Token
from everstep.train.guards.script_text.loop_carried import PLAIN
from everstep.train.guards.script_text.scripts import (
    Called,
    Unknown,
    functions_of,
    globals_of,
    is_static,
    parameters_of,
)
from everstep.train.guards.script_text.sources import code_of, definition, tree_of
from everstep.train.guards.script_text.syntax_patterns import counts_itself
from everstep.train.guards.script_text.value_origins import ITERATORS, STEPS

GIVE = ("__getitem__", "__getitems__", "__iter__")  # methods of a dataset that give samples
LOOKED_AT = 64  # elements of a container
MISSING = object()
PARTS = re.compile(r"\[(?:'(?:[^'\\]|\\.)*'|\"[^\"]*\"|-?\w+)\]|\.?[^.\[]+")  # of "a.b['c']"


def held(values: Mapping[str, Any], name: str) -> Any:
    """The value of a name with dots. The parts of a function are its closure and its defaults too."""
    first, *rest = PARTS.findall(name) or [""]
    value = values.get(first, MISSING)
    if value is MISSING:
        module = sys.modules.get(first)
        value = module if is_script(getattr(module, "__file__", None) or "<none>", named=True) else MISSING
    for part in rest:
        if not part.startswith("["):
            value = _attribute(value, part.lstrip("."))
        elif isinstance(value, dict):
            value = value.get(ast.literal_eval(part[1:-1]), MISSING)
        elif isinstance(value, list | tuple) and (index := ast.literal_eval(part[1:-1])) in range(
            -len(value), len(value)
        ):
            value = value[index]
        elif isinstance(value, torch.nn.Sequential | torch.nn.ModuleList | torch.nn.ModuleDict):
            value = value._modules.get(str(ast.literal_eval(part[1:-1])), MISSING)
        else:
            return MISSING
    return value


def _attribute(value: Any, name: str) -> Any:
    found = getattr(value, "__dict__", {}).get(name, MISSING)
    if isinstance(value, functools.partial) and name in ("args", "keywords"):
        return value.args if name == "args" else value.keywords
    if found is not MISSING:
        return found
    if isinstance(value, torch.nn.Module):
        found = value._modules.get(name, MISSING)
    if isinstance(value, types.MethodType | types.FunctionType):
        value = inspect.unwrap(value)
        value = value.__func__ if isinstance(value, types.MethodType) else value
    if isinstance(value, types.FunctionType):
        code = value.__code__
        positional = code.co_varnames[: code.co_argcount]
        inside = dict(zip(reversed(positional), reversed(value.__defaults__ or ()), strict=False))
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        inside |= {k: cell.cell_contents for k, cell in cells if cell != types.CellType()}
        return {**inside, **(value.__kwdefaults__ or {})}.get(name, MISSING)
    if found is MISSING and value is not MISSING:
        found = _of_class(value, name) or MISSING
    return found


def _of_class(value: Any, name: str) -> types.FunctionType | None:
    """A method of a class of the script."""
    found = next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), None)
    return found if isinstance(found, types.FunctionType) and is_script(found.__code__.co_filename) else None


def kind_of(value: Any) -> str | None:
    if value is MISSING:
        return None
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain.__name__
    kind = type(value)
    if hasattr(kind, "zero_grad") or hasattr(kind, "get_last_lr") or isinstance(value, torch.amp.GradScaler):
        return kind.__name__ if isinstance(value, torch.nn.Module) else STEPS
    if kind.__name__ in ITERATORS and kind.__module__ in ("builtins", "itertools"):
        return kind.__name__ if _is_position(value) else "object"
    if kind.__name__ not in PLAIN:
        return STEPS if _is_schedule(value) else kind.__name__
    if kind.__module__ not in ("builtins", "collections"):
        return "object"
    elements = value.values() if isinstance(value, Mapping) else value if isinstance(value, Collection) else ()
    # The untracked-state check looks at these while they train.
    heavy = any(isinstance(v, torch.Tensor | torch.nn.Module | np.ndarray) for v in islice(elements, LOOKED_AT))
    return "object" if heavy else kind.__name__


def constant(values: Mapping[str, Any], name: str) -> Any:
    value = held(values, name)
    return value if value is None or isinstance(value, bool | int | float | str) else ...


def _is_schedule(value: Any) -> bool:
    """Whether it is a schedule of a library such as timm."""
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or "<none>"
    moves = isinstance(getattr(value, "__dict__", {}).get("optimizer"), torch.optim.Optimizer)
    return moves and not is_script(file) and hasattr(type(value), "step")


def _is_position(value: Any) -> bool:
    """Whether its next value depends on the number of earlier calls. Reads of a DataLoader are found elsewhere
    (`byhand`)."""
    if _reads_loader(value):
        return False
    if not isinstance(value, types.GeneratorType):
        return True
    code = value.gi_code
    if value.gi_running or not is_script(code.co_filename):
        return False
    tree = tree_of(code.co_filename)
    function = definition(tree, code) if tree is not None else None
    return function is not None and counts_itself(function)


def _reads_loader(value: Any, depth: int = 0) -> bool:
    if (type(value).__module__ or "").startswith(("torch.utils.data", "everstep.")):
        return True
    inside: list[Any] = []
    if isinstance(value, types.GeneratorType):
        if value.gi_frame is not None:
            globals_ = value.gi_frame.f_globals
            inside = [*value.gi_frame.f_locals.values()]
            inside += [globals_[n] for n in value.gi_code.co_names if n in globals_]
    elif type(value).__name__ in ITERATORS:
        inside = gc.get_referents(value)
    return depth < 4 and any(_reads_loader(part, depth + 1) for part in inside)


class KnownValues(Unknown):
    """The known values, as the file called `file` sees them. `moving`: the ids of objects that training changes.
    `data`: the ids of the datasets that it reads. `moved`: what steps were seen to change (`hidden_attributes`)."""

    def __init__(
        self,
        values: Mapping[str, Any],
        file: str,
        moving: Collection[int],
        data: Collection[int] = (),
        moved: Collection[Token] = (),
    ) -> None:
        self._values = values
        self._file = file
        self._moving = moving
        self._data = data
        self._moved = moved

    def called(self, name: str, method: str = "") -> Called | None:
        owner = held(self._values, name)
        if isinstance(owner, functools.partial) and not method:
            return self._bound(owner, name)
        if owner is MISSING or (isinstance(owner, torch.nn.Module | type | types.ModuleType) and method):
            return None
        return self._of_function(_attribute(owner, method) if method else owner, name, method)

    def _bound(self, partial: functools.partial[Any], name: str) -> Called | None:
        found = self._of_function(partial.func, name, "")
        if found is None:
            return None
        names = parameters_of(found.function)
        given = {p: f"{name}.args[{i}]" for i, p in enumerate(names[: len(partial.args)])}
        given |= {p: f"{name}.keywords[{p!r}]" for p in partial.keywords}
        return replace(found, given=given)

    def _of_function(self, function: Any, name: str, method: str) -> Called | None:
        code = code_of(function) if isinstance(function, types.FunctionType) else None
        tree = tree_of(code.co_filename) if code is not None else None
        found = definition(tree, code) if code is not None and tree is not None else None
        if code is None or tree is None or found is None or (method and is_static(found)):
            return None
        name = f"{name}.{method}" if method else name
        closure = {variable: f"{name}.{variable}" for variable in code.co_freevars}
        if code.co_filename == self._file:
            return Called(found, _owner(name, method), name, closure)
        module = function.__module__
        file = Path(code.co_filename).name
        names = {**globals_of(found, module), **closure}
        return Called(found, _owner(name, method), name, names, module, file, functions_of(tree))

    def is_frozen(self, name: str) -> bool:
        module = held(self._values, name)
        if not isinstance(module, torch.nn.Module) or id(module) in self._moving:
            return False
        return not any(m.training for m in module.modules()) and not any(p.requires_grad for p in module.parameters())

    def computes_with(self, name: str, attribute: str) -> bool:
        module = held(self._values, name)
        if not isinstance(module, torch.nn.Module) or _saves_more(module):
            return False
        forward = code_of(type(module).forward)
        tree = tree_of(forward.co_filename) if forward is not None else None
        if tree is None:  # a library's
            return attribute in vars(module)
        return _reads(_with_methods(tree, type(module), "forward"), attribute)

    def moved(self, name: str) -> Token | None:
        if not self._moved or (value := held(self._values, name)) is MISSING:
            return None
        *front, last = PARTS.findall(name)
        owner = held(self._values, "".join(front)) if front else MISSING
        return next((t for t in (id(value), (id(owner), last.lstrip("."))) if t in self._moved), None)

    def gives_by(self, name: str, attribute: str) -> bool:
        dataset = held(self._values, name)
        if id(dataset) not in self._data:
            return False
        found = [f.__code__ for method in GIVE if (f := _of_class(dataset, method)) is not None]
        trees = [(code.co_name, tree) for code in found if (tree := tree_of(code.co_filename)) is not None]
        if not trees:  # a library's
            return attribute in getattr(dataset, "__dict__", {})
        return any(_reads(_with_methods(tree, type(dataset), method), attribute) for method, tree in trees)

    def leaves_out(self, name: str) -> bool:
        """Whether `name` is an attribute of an object whose `state_dict` does not return it."""
        *front, last = PARTS.findall(name)
        owner = held(self._values, "".join(front)) if front else MISSING
        function = None if owner is MISSING else _of_class(owner, "state_dict")
        if isinstance(owner, torch.nn.Module) or function is None or not last.startswith("."):
            return isinstance(owner, torch.nn.Module)  # it saves none of its plain attributes
        tree = tree_of(function.__code__.co_filename)
        text = definition(tree, function.__code__) if tree is not None else None
        if text is None:
            return False
        for n in ast.walk(text):
            match n:
                case ast.Attribute(attr=attr) if attr in (last[1:], "__dict__"):
                    return False
                case ast.Call(func=ast.Name("vars" | "super" | "asdict" | "getattr")):
                    return False
                case ast.Call(func=ast.Attribute(value=ast.Name("self"))):
                    return False
        return True


def _reads(functions: Iterable[ast.FunctionDef], attribute: str) -> bool:
    found = (n for f in functions for n in ast.walk(f) if isinstance(n, ast.Attribute))
    return any(isinstance(n.ctx, ast.Load) and n.attr == attribute for n in found)


def _with_methods(tree: ast.Module, kind: type, method: str) -> list[ast.FunctionDef]:
    """A method, and the methods that it calls."""
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == kind.__name__]
    methods = {n.name: n for c in classes for n in c.body if isinstance(n, ast.FunctionDef)}
    found = [methods[method]] if method in methods else []
    for one in found:
        names = [n.attr for n in ast.walk(one) if isinstance(n, ast.Attribute)]
        found += [methods[n] for n in dict.fromkeys(names) if n in methods and methods[n] not in found]
    return found


def _saves_more(module: torch.nn.Module) -> bool:
    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def _owner(name: str, method: str) -> str:
    return name.removesuffix(f".{method}") if method else ""
