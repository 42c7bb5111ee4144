"""Finds the objects of a training script, under the names by which the script would write them: `ema.shadow['weight']`.

The search begins with the variables of the running functions, from the training loop outwards, and the globals of their
modules. It goes on breadth first, so that each object has its shortest name. Objects of libraries are left out, except
those in which training loops keep state. Attributes are read, but the script's code is never called. Invariants: at
most `VISITS` objects are looked at. No reference to the script's objects outlives the caller's.
"""

from __future__ import annotations

import ast
import functools
import inspect
import random
import re
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import Parameter

from everstep.contract.library_files import is_library
from everstep.torch_private.loaders import DATASET
from everstep.torch_private.modules import (
    TABLES,
    buffers_of,
    children_of,
    is_normalization,
    parameters_of,
    tables_of,
    unsaved_of,
)
from everstep.torch_private.tensors import hooks_of
from everstep.train.guards.containers import MISSING, Nth, as_container, as_plain, steady_key
from everstep.train.guards.holders import parts_of_holder

VISITS = 20_000
DEPTH = 7
WIDE = 4096  # largest number of elements of a container of tensors or modules
NARROW = 512  # of another container
FEW = 16  # of one that begins with plain values alone
FRAMES = 64

Name = tuple[str, ...]  # `state.best['loss']` is ("state", ".best", "['loss']")
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

_PLAIN = (int, float, complex, str, bytes, bytearray, type(None), type, range, torch.dtype, torch.device, torch.Size)
UNCHANGEABLE = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
# A method that the unchangeable relatives of a container have too only reads.
_READERS = frozenset({*dir(tuple), *dir(frozenset), *dir(types.MappingProxyType)})
_OURS = str(Path(__file__).parents[2])  # the folder of the package everstep
# Objects of these libraries hold no training state, or much that changes without a meaning.
_CLOSED = frozenset(sys.stdlib_module_names) | {
    "everstep", "everstep_horovod", "everstep_sources", "numpy", "torch", "tensorboard", "wandb", "mlflow", "tqdm",
    "PIL", "pandas", "matplotlib", "rich", "pytest", "_pytest", "pluggy", "hydra", "omegaconf",
}  # fmt: skip
_OPEN_KINDS = frozenset({
    ("types", "SimpleNamespace"), ("argparse", "Namespace"), ("collections", "UserDict"), ("collections", "UserList"),
    ("collections", "ChainMap"), ("optparse", "Values"), ("logging", "LoggerAdapter"),
})  # fmt: skip
_OPEN = (
    "torch.utils.data", "torch.optim", "torch.amp", "torch.cuda.amp", "torch.distributions",
    "torch.distributed.algorithms",
)  # fmt: skip
MODULE_PARTS = frozenset(vars(torch.nn.Module()))  # attributes of a module that are read in another way
SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
PREFIXES = ("gi", "cr", "ag")  # of the attributes of generators, coroutines and both
_ABSTRACT = ("abc", "builtins", "typing")  # modules of bases that have no attributes of their own
_HEAP = 1 << 9  # flag of a class that is made while the program runs
_OPTIMIZER_PARTS = frozenset({"state", "param_groups", "defaults"})


@dataclass(frozen=True, slots=True)
class NamedValue:
    """`value` under `name`. `owner`: the name of what holds it, empty for a variable of the script's."""

    name: str
    value: Any
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Scope:
    """The variables of a function that runs, or of a module. `outer`: the names that it has of an outer function."""

    owner: str
    variables: list[tuple[str, Any]]
    outer: tuple[str, ...] = ()


def variables(frame: types.FrameType | None) -> Iterator[tuple[str, Any]]:
    """The script's variables that `frame` and its callers can read, the nearest first."""
    for scope in scopes(frame):
        yield from scope.variables


def scopes(frame: types.FrameType | None) -> Iterator[Scope]:
    """The same, by the function or the module that has them."""
    modules: list[Mapping[str, Any]] = []
    done: list[Mapping[str, Any]] = []
    for _ in range(FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if is_script(code.co_filename):
            is_module = frame.f_locals is frame.f_globals
            if is_module:
                done.append(frame.f_globals)
            owner = str(frame.f_globals.get("__name__", "")) if is_module else code.co_qualname
            yield Scope(owner, locals_of(frame), code.co_freevars)
            if not any(frame.f_globals is module for module in modules):
                modules.append(frame.f_globals)
        elif code.co_filename.startswith(_OURS):
            # A function of the script that our loop calls.
            functions = ((k, v) for k, v in locals_of(frame) if isinstance(v, types.FunctionType))
            yield Scope(code.co_qualname, [(k, v) for k, v in functions if is_script(v.__code__.co_filename)])
        frame = frame.f_back
    for module in modules:
        if not any(module is known for known in done):
            yield Scope(str(module.get("__name__", "")), public(module))


def value_of(values: Mapping[str, Any], name: Name) -> Any:
    """What stands under the name; `MISSING` if nothing does."""
    module = sys.modules.get(name[0])
    is_ours = is_script(getattr(module, "__file__", None) or "<none>", named=True)
    value = values.get(name[0], module if is_ours else MISSING)
    for part in name[1:]:
        tables = [_own(value), *tables_of(value)]
        key = part[1:] if part.startswith(".") else ast.literal_eval(part[1:-1])
        if not part.startswith("."):
            tables = [value if type(value) in (dict, list, tuple) else {str(k): v for k, v in tables[1].items()}]
            key = key if tables[0] is value else str(key)
        else:
            kinds = [*value.__mro__] if isinstance(value, type) else []
            tables += [vars(kind) for kind in (*kinds, *type(value).__mro__) if value is not MISSING]
        for table in tables:
            try:
                value = table[key]
                break
            except (LookupError, TypeError):
                continue
        else:
            return MISSING
    return value


def _own(value: Any) -> Mapping[str, Any]:
    """The object's own attributes, without a call of its class's `__getattr__`."""
    try:
        own: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own


def is_changed_by(owner: Any, method: str) -> bool:
    """Whether the method of a container, an iterator or a tensor changes it."""
    if isinstance(owner, torch.Tensor):
        return method.endswith("_") and not method.endswith("__")  # torch's convention
    kind = type(owner)
    holds = hasattr(kind, "__len__") or hasattr(kind, "__next__")
    known = holds and kind.__module__ in ("builtins", "collections", "itertools") and kind not in UNCHANGEABLE
    return known and method not in _READERS


def walk(
    roots: Iterable[tuple[str, Any]],
    closed: Iterable[object] = (),
    parts: Callable[[NamedValue], Iterable[NamedValue]] | None = None,
    ends: Callable[[NamedValue], None] = lambda _: None,
    deepest: int = DEPTH,
) -> Iterator[NamedValue]:
    """All objects that `roots` hold, each once, under its shortest name; but for those that are `closed`, and what only
    these hold. A parameter has the name of the module or list that holds it: a variable of the script that is the same
    parameter, left over from `for p in ema.parameters():`, is not what the script would track. `parts`: what an object
    holds; `children` of it, where nothing else is given. `ends`: is given what is `deepest`, and not looked into."""
    parts = parts or children
    waiting, loose = deque[tuple[NamedValue, int]](), deque[tuple[NamedValue, int]]()
    for name, value in roots:
        (loose if isinstance(value, torch.nn.Parameter) else waiting).append((NamedValue(name, value), 0))
    seen = {id(value) for value in closed}
    most = VISITS + len(seen)
    while (waiting and len(seen) < most) or loose:
        named, depth = waiting.popleft() if waiting and len(seen) < most else loose.popleft()
        if isinstance(named.value, _PLAIN) or id(named.value) in seen:
            continue
        seen.add(id(named.value))
        yield named
        if depth < deepest:
            waiting.extend((child, depth + 1) for child in parts(named))
        else:
            ends(named)


def children(named: NamedValue) -> Iterator[NamedValue]:
    """What an object holds, whatever methods its class has; and what functions and generators keep."""
    name, value = named.name, named.value
    kind = type(value)
    match value:
        case torch.Tensor() | np.ndarray():
            parts = ((f".{k}", v) for k, v in set_by_script(value))
            yield from (NamedValue(f"{name}{k}", v, name) for k, v in (*parts, *given_to(value)))
        case torch.nn.Module():
            yield from _of_module(name, value)
            yield from (NamedValue(f"{name}{k}", v, name) for k, v in given_to(value))
        case _ if (parts_of := parts_of_holder(value)) is not None:
            own = ((f".{k}", v) for k, v in attributes(value) if is_own(kind))
            yield from (NamedValue(f"{name}{k}", v, name) for k, v in (*parts_of.items(), *own))
        case _ if (inner := as_container(value, WIDE)) is not None:
            yield from (NamedValue(f"{name}[{key!r}]", v, name) for key, v in _elements(inner))
            if inner is not value:
                yield from (NamedValue(f"{name}.{k}", v, name) for k, v in attributes(value))
        case types.FunctionType() | types.MethodType() | functools.partial():
            yield from _of_function(name, value)
        case types.GeneratorType() | types.CoroutineType() | types.AsyncGeneratorType():
            for key, part in locals_of_suspended(value)[1] or ():
                yield NamedValue(f"{name}.gi_frame.f_locals[{key!r}]", part, name)
        case types.ModuleType():
            is_made = not (hasattr(value, "__file__") or getattr(value, "__spec__", None))  # by a call of its class
            if is_made or is_script(getattr(value, "__file__", None) or "<built-in>", named=True):
                yield from (NamedValue(f"{name}.{k}", v, name) for k, v in public(vars(value)))
        case _ if is_open(kind) and not isinstance(value, Generator):
            yield from (NamedValue(f"{name}.{k}", v, name) for k, v in attributes(value))
        case _ if not kind.__module__.startswith("everstep"):
            yield from (NamedValue(f"{name}{k}", v, name) for k, v in given_to(value))


def _elements(container: Any) -> list[tuple[Any, Any]]:
    """The first elements of one of Python's own containers, with their keys or positions: of tensors and modules many,
    of plain ones a few, where the script would write them so."""
    pairs = list(islice(container.items() if isinstance(container, dict) else enumerate(container), WIDE))
    pairs = [(steady_key(key, i), value) for i, (key, value) in enumerate(pairs)]
    first = [value for _, value in pairs[:8]]
    if all(isinstance(value, _PLAIN) for value in first):
        is_written = isinstance(container, dict | list | tuple)
        return [(key, value) for key, value in pairs[:FEW] if is_written and (as_plain(key) is key or type(key) is Nth)]
    return pairs[: WIDE if any(isinstance(value, torch.Tensor | torch.nn.Module) for value in first) else NARROW]


def _of_function(name: str, value: Any) -> Iterator[NamedValue]:
    match value:
        case types.FunctionType():
            for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if cell != types.CellType():  # nothing is in it yet
                    yield NamedValue(variable, cell.cell_contents, name)
            kept = state_of_function(value).items()
            yield from (NamedValue(f"{name}{key}", part, name) for key, part in kept if key.startswith("."))
        case types.MethodType():
            yield NamedValue(name.rpartition(".")[0] or name, value.__self__)
        case _:
            yield from (NamedValue(f"{name}.args[{i}]", v, name) for i, v in enumerate(value.args))
            yield from (NamedValue(f"{name}.keywords[{k!r}]", v, name) for k, v in value.keywords.items())


def _of_module(name: str, module: torch.nn.Module) -> Iterator[NamedValue]:
    yield from (NamedValue(f"{name}.{k}", v, name) for k, v in children_of(module).items())
    yield from (NamedValue(f"{name}.{k}", v, name) for k, v in parameters_of(module).items())
    # Normalisation does not read its running statistics in training: only an evaluation needs them.
    if not is_normalization(module):
        yield from (NamedValue(f"{name}.{k}", v, name) for k, v in buffers_of(module).items())
    if type(module).__module__.startswith("torch."):
        extra = set_by_script(module)
    else:
        extra = ((k, v) for k, v in list(vars(module).items()) if k not in MODULE_PARTS)
    yield from (NamedValue(f"{name}.{k}", v, name) for k, v in extra)


def set_by_script(value: Any, named: Callable[[], Container[str]] = tuple) -> Iterator[tuple[str, Any]]:
    """The attributes that the script sets on an object. A library sets attributes of its own on objects of its classes,
    and fills them in each process. So of these classes, and of those that are derived from them, an attribute counts
    that the script's methods mention, or that the library's do not. One of the library's with a private name may come
    from another place in it; on a plain module of torch only the script sets such ones, elsewhere those count that are
    `named`: the script's text sets them on some object."""
    kind = type(value)
    if kind in _TENSORS or issubclass(kind, torch.Tensor | np.ndarray):
        yield from list(_own(value).items()) if kind in _TENSORS or is_own(kind) else ()
        return
    if issubclass(kind, torch.nn.Module):  # a loop sets them, as it anneals a dropout; a library does not
        yield from ((k, v) for k, v in list(_own(value).items()) if type(v) is float or k == "p")
        if isinstance(value, torch.jit.ScriptModule):
            yield from ((k, getattr(value, k)) for k in _compiled_names(value))
    if (known := _known.get(kind)) is None:
        known = _known[kind] = _of_others(kind)
    parts, others, private = known
    if others is None:
        yield from ((k, v) for k, v in attributes(value) if k not in parts)
    elif not parts or not _own(value).keys() <= parts:  # a module has no slots
        mine = {key for base in kind.__mro__ if is_own(base) for key in _names_in(base)}
        for k, v in attributes(value):
            is_theirs = k in others or not (private or not k.startswith("_") or k in named())
            if k not in parts and (k in mine or not is_theirs):
                yield k, v


def _compiled_names(module: torch.jit.ScriptModule) -> list[str]:
    """The names in the text of a module of TorchScript that have neither modules nor tensors nor methods: only its
    compiled code sees what they have."""
    if module not in _compiled:
        texts = [getattr(method, "code", "") for method in _own(module).values()]
        names = {name for text in texts if isinstance(text, str) for name in _OF_SELF.findall(text)}
        kinds = (torch.Tensor, torch.nn.Module)
        _compiled[module] = sorted(
            name for name in names
            if not (isinstance(value := getattr(module, name), kinds) or callable(value))
        )  # fmt: skip
    return _compiled[module]


_OF_SELF = re.compile(r"\bself\.(\w+)")
_compiled = weakref.WeakKeyDictionary[torch.jit.ScriptModule, list[str]]()


def _of_others(kind: type) -> tuple[frozenset[str], frozenset[str] | None, bool]:
    """The names that never count; those that the library's methods mention, None where no library's class is among the
    bases; and whether others may be private."""
    is_module = issubclass(kind, torch.nn.Module)
    theirs = [base for base in kind.__mro__ if not is_own(base) and base.__module__ not in _ABSTRACT]
    theirs = [base for base in theirs if base is not torch.nn.Module]
    parts = MODULE_PARTS if is_module else frozenset[str]()
    if not theirs:
        return parts, None if is_own(kind) else frozenset(), True
    others = frozenset(key for base in theirs for key in _names_in(base))
    if is_module and kind is theirs[0]:
        parts, others = parts | others, frozenset()
    return parts, others, is_module and all(base.__module__.startswith("torch.nn.modules.") for base in theirs)


_TENSORS = frozenset({torch.Tensor, Parameter, np.ndarray})
_known = weakref.WeakKeyDictionary[type, tuple[frozenset[str], frozenset[str] | None, bool]]()


def _names_in(kind: type) -> Iterator[str]:
    """The names that a class and the texts of its methods mention."""
    yield from vars(kind)
    yield from vars(kind).get("__annotations__", ())
    for member in list(vars(kind).values()):
        for function in (member.fget, member.fset) if isinstance(member, property) else (member,):
            plain = function.__func__ if isinstance(function, staticmethod | classmethod) else function
            while isinstance(plain, types.FunctionType):
                yield from _names_in_code(plain.__code__)
                plain = vars(plain).get("__wrapped__")  # of one that is decorated


def _names_in_code(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant  # of `setattr(self, "name", …)`
        elif isinstance(constant, types.CodeType):
            yield from _names_in_code(constant)


def unsaved_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own buffers that no `state_dict` has, by name, but for large ones: masks and tables, which are made
    anew."""
    for key in sorted(unsaved_of(module)):
        buffer = buffers_of(module).get(key)
        if buffer is not None and buffer.numel() <= NARROW:
            yield key, buffer


def given_to(value: Any) -> Iterator[tuple[str, Any]]:
    """Functions and objects of the script's that an object of a library has been given and keeps: hooks, a dataset, a
    collate function. Each by what stands behind the object's name."""
    if isinstance(value, torch.Tensor):
        for table, hooks in zip(("._backward_hooks", "._post_accumulate_grad_hooks"), hooks_of(value), strict=True):
            yield from _given(table, hooks, 1)
    elif not isinstance(value, type):
        for key, part in list(_own(value).items()):
            if part is not None and key not in _TABLES:
                is_data = key == DATASET and is_open(type(part))
                yield from [(f".{key}", part)] if is_data else _given(f".{key}", part, 2)


def _given(name: str, value: Any, levels: int) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind in _CONTAINERS:
        pairs = list(value.items()) if kind in _TABLED else enumerate(value)
        # The numbers that torch gives hooks differ between processes.
        for i, (key, part) in enumerate(islice(pairs, NARROW if levels else 0)):
            yield from _given(f"{name}[{(key if type(key) is str else i)!r}]", part, levels - 1)
    elif kind in _CALLED:
        code = code_behind(value)
        if (code is not None and is_script(code.co_filename)) or is_own(type(getattr(value, "__self__", None))):
            yield name, value
    elif kind.__module__.startswith("everstep.data"):  # it wraps what a loader is given
        for key, part in list(_own(value).items()) if levels else ():
            yield from _given(f"{name}.{key}", part, levels - 1)
    elif is_own(kind) and not isinstance(value, torch.nn.Module | torch.Tensor | type):
        yield name, value


_TABLED = (dict, OrderedDict)
_CONTAINERS = frozenset({*_TABLED, list, tuple, deque})
_CALLED = frozenset({types.FunctionType, types.MethodType, functools.partial})
_TABLES = frozenset(TABLES) | _OPTIMIZER_PARTS


def code_behind(function: Any) -> types.CodeType | None:
    """The text that runs where a function or an object is called, without what decorates it; None for a library's."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))  # `@torch.no_grad()`
    called = function if hasattr(function, "__code__") else inspect.getattr_static(type(function), "__call__", None)
    return getattr(called, "__code__", None)


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """An object's own, also those in slots, by name."""
    skipped: frozenset[str] = _OPTIMIZER_PARTS if isinstance(value, torch.optim.Optimizer) else frozenset()
    for k, v in list(_own(value).items()):
        if k not in skipped:
            yield k, v
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for k in (_mangled(kind, k) for k in ((slots,) if isinstance(slots, str) else slots)):
            member = kind.__dict__.get(k)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield k, member.__get__(value)
                except AttributeError:  # not set
                    continue


def _mangled(kind: type, name: str) -> str:
    """The name that a class gives to a private one that stands in its text."""
    owner = kind.__name__.lstrip("_")
    return f"_{owner}{name}" if owner and name.startswith("__") and not name.endswith("__") else name


def locals_of(frame: types.FrameType) -> list[tuple[str, Any]]:
    """The variables of a running or suspended function."""
    own = frame.f_locals
    variables = public(own)
    # The frame keeps this copy, and with it each tensor that the step releases. Two references are the frame's and
    # ours, and one is the call's. A script that has called `locals()` holds another.
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(own) == 3:
        own.clear()
    return variables


def locals_of_suspended(value: Any) -> tuple[types.CodeType, list[tuple[str, Any]] | None]:
    """The text of a generator or coroutine, and its variables; None for one of a library, one that runs, whose frame is
    read as the script's own are, and one that has ended."""
    prefix = next(letters for letters in PREFIXES if hasattr(value, f"{letters}_frame"))
    code, frame = getattr(value, f"{prefix}_code"), getattr(value, f"{prefix}_frame")
    own = frame is not None and is_script(code.co_filename) and not getattr(value, f"{prefix}_running")
    return code, locals_of(frame) if own else None


def state_of_function(function: types.FunctionType) -> dict[str, Any]:
    """What a function of the script keeps from call to call, by the names by which it can be read: defaults,
    attributes, and its variables outside of it."""
    if not is_script(function.__code__.co_filename):
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {
        **{f".__defaults__[{i}]": value for i, value in enumerate(function.__defaults__ or ())},
        **{f".__kwdefaults__[{key!r}]": value for key, value in (function.__kwdefaults__ or {}).items()},
        **{f".{key}": value for key, value in function.__dict__.items() if key != "__wrapped__"},
        **{name: cell.cell_contents for name, cell in cells if cell != types.CellType()},
    }


def public(scope: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Without what Python itself sets."""
    return [(k, v) for k, v in list(scope.items()) if not is_special(k)]


def is_special(name: str) -> bool:
    """Whether a name is one of Python's own, such as `__doc__`."""
    return name.startswith("__") and name.endswith("__")


def is_open(kind: type) -> bool:
    """Whether objects of this class may hold state of the script."""
    module = kind.__module__ or ""
    is_known = (module, kind.__qualname__) in _OPEN_KINDS or module.startswith(_OPEN)
    return is_known or module.partition(".")[0] not in _CLOSED or _is_made_by_call(kind)


def _is_made_by_call(kind: type) -> bool:
    """Whether it is a class that names another module than the script's: `dataclasses.make_dataclass` and
    `types.new_class` name their own, and `exec` without a name for its module names `builtins`."""
    made = (kind.__module__ == "types" and vars(types).get(kind.__qualname__) is not kind) or (
        kind.__module__ == "builtins" and "__module__" in vars(kind)
    )
    return made and bool(kind.__flags__ & _HEAP)


def is_own(kind: type) -> bool:
    """Whether the class is the user's own."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return is_open(kind) and (file is None or is_script(file) or _is_made_by_call(kind))


@functools.lru_cache(maxsize=4096)
def is_script(path: str, *, named: bool = False) -> bool:
    """Whether the file is the user's own. `named`: it has to be a real file."""
    if path.startswith("<"):
        return not (named or path.startswith("<frozen"))
    return not (is_library(path) or path.startswith(_OURS))
