"""The plain attributes and small tensors of a script's own objects, which are part of a framework's state."""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from types import FunctionType
from typing import Any

import numpy as np
import torch

from everstep.checkpoint.state import layouts
from everstep.torch_private.tensors import version
from everstep.train.adapters.script_state.values import (
    ARRAY,
    DEVICE,
    MOST,
    SCALAR,
    SCALARS,
    TENSOR,
    copied,
    differs,
    plain,
    put,
    same_values,
)

log = logging.getLogger("everstep.train")

LIBRARIES = (
    "torch", "transformers", "everstep", "lightning", "pytorch_lightning", "accelerate", "torchmetrics", "peft", "trl",
    "timm", "builtins",
)  # fmt: skip
FEW = 64  # elements of a collection that is not kept, by which a change of it is seen
ONCE = "flags set once"
_COLLECTIONS = (list, tuple, dict, set, deque)


class ScriptAttributes:
    """The attributes with plain values of `objects`, as far as a script's own classes set them, and the small tensors
    of those that are no modules.

    Only attributes that steps have changed are returned and restored. The others are each process's own:

    - a path, or its rank, which hooks set anew when a pass begins;
    - the length for which a tensor beside it was made, if that tensor is not returned: a new process has none yet;
    - a flag that was set once: it says that this process has opened its log or unfrozen a layer, and another process
      has to do that itself.

    An attribute that steps change and that is too large, or of another kind, is named in a warning.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self._objects: dict[str, tuple[object, frozenset[str], tuple[_Method, ...]]] = {}
        self._marks: dict[tuple[str, str], _Mark] = {}  # of what is not compared by its value, at the last look
        self._copies: dict[tuple[str, str], dict[str, Any]] = {}  # of tensors
        self._warned: set[tuple[str, str]] = set()
        numbers = Counter[str]()  # of each class, because rank 0 may have callbacks that others do not have
        for each in objects:
            if methods := _methods_of_script(type(each)):  # type: ignore[arg-type]  # mypy does not see the hash
                name = type(each).__qualname__
                self._objects[f"{name} {numbers[name]}"] = (
                    each,
                    attributes_set_by_script(type(each)),
                    methods,
                )
                numbers[name] += 1
        self._ids = {id(each) for each, *_ in self._objects.values()}  # which are kept alive here
        self._first = {key: self._kept_values(key) for key in self._objects}
        self._last = dict(self._first)
        self._changes = {key: Counter[str]() for key in self._objects}

    def now(self) -> dict[str, dict[str, Any]]:
        """By object: the attributes that have changed; and the names of flags among them that were set once. Call it in
        each step, so that it sees each change of a flag."""
        changed: dict[str, dict[str, Any]] = {}
        flags: dict[str, list[str]] = {}
        for key, changes in self._changes.items():
            current, was = self._kept_values(key, warns=True), self._last[key]
            changes.update(n for n, value in current.items() if n not in was or differs(was[n], value))
            self._last[key] = current
            beside = self._beside_tensors(key)
            changed[key] = {n: value for n, value in current.items() if changes[n] and n not in beside}
            flags[key] = [n for n, value in changed[key].items() if type(value) is bool and changes[n] == 1]
        return {**changed, ONCE: flags}

    def put_back(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the attributes to the values in `saved`, which `now` returned here or in another process. Called before
        the first step of a pass. If `saved` has other objects only, it comes from a rank without this one."""
        for key, (each, *_) in self._objects.items():
            changes, first = self._changes[key], self._first[key]
            then, once = saved.get(key, {}), saved.get(ONCE, {}).get(key, ())
            if key in saved or not saved:
                for name in {n for n in self._kept_values(key) if changes[n]} - then.keys() - self._beside_tensors(key):
                    if name in first:
                        put(each, name, first[name])
                    else:
                        delattr(each, name)
            for name, value in then.items():
                if name not in once or changes[name]:
                    changes[name] = max(changes[name], 1 if name in once else 2)
                    put(each, name, value)
                elif getattr(each, name, None) != value:
                    self._name_flag(key, name, value)
            # The hooks of this pass have set the others: those are changed by what changes them from now on.
            current = self._kept_values(key)
            begun = {name: value for name, value in current.items() if not changes[name]}
            self._first[key] = begun | {name: value for name, value in first.items() if changes[name]}
            self._last[key] = current

    def _kept_values(self, key: str, *, warns: bool = False) -> dict[str, Any]:
        """Copies of what is kept. `warns`: of the others, those that have changed since the last look are named."""
        each, names, _ = self._objects[key]
        there = getattr(each, "__dict__", {})
        values: dict[str, Any] = {}
        for name in names:
            value = there.get(name, self)
            if type(value) in SCALARS:
                values[name] = value
            elif isinstance(value, torch.Tensor):
                if _is_small(each, value):
                    values[name] = self._copy_of(key, name, value)
                elif not isinstance(each, torch.nn.Module):
                    self._look_at(key, name, value, warns=warns)
            elif isinstance(value, np.ndarray | np.generic):
                if value.size <= MOST and value.dtype.kind in "biufc":
                    values[name] = {TENSOR: np.array(value), DEVICE: SCALAR if value.shape == () else ARRAY}
            elif isinstance(value, _COLLECTIONS):
                if plain(value):
                    values[name] = copied(value)
                elif value and (len(value) > MOST or not isinstance(each, torch.nn.Module)):
                    self._look_at(key, name, value, warns=warns)
            elif self._is_unknown(value):
                self._look_at(key, name, value, warns=warns)
        return values

    def _copy_of(self, key: str, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        """The same copy as long as the tensor is the same. On an accelerator, which comparing values would wait for, a
        change through `.data` is not seen."""
        mark, known = self._marks.get((key, name)), self._copies.get((key, name))
        if tensor.device.type == "cpu":
            same = known is not None and same_values(known[TENSOR], tensor)
        else:
            same = mark is not None and mark.is_of(tensor) and not tensor.is_inference()  # that counts no changes
        if known is None or not same:
            self._marks[key, name] = _Mark.of(tensor)
            known = self._copies[key, name] = {TENSOR: tensor.detach().clone(), DEVICE: tensor.device.type}
        return known

    def _is_unknown(self, value: Any) -> bool:
        """Whether it is an object of the script's that nobody else looks after."""
        kept = isinstance(value, torch.nn.Module | torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler)
        return not kept and id(value) not in self._ids and bool(_methods_of_script(type(value)))  # type: ignore[arg-type]  # as above

    def _name_flag(self, key: str, name: str, value: bool) -> None:
        if (key, name) in self._warned:
            return
        self._warned.add((key, name))
        log.warning(
            "%s.%s was set to %s once, and this new process does not take it over: such a flag often says what a "
            "process has done (opened a log, unfrozen a layer). If training depends on it, keep a number in its place",
            key.rpartition(" ")[0], name, value,
        )  # fmt: skip

    def _look_at(self, key: str, name: str, value: Any, *, warns: bool) -> None:
        mark = self._marks.get((key, name))
        if mark is not None and mark.is_of(value):
            return
        self._marks[key, name] = _Mark.of(value)
        if mark is None or not warns or (key, name) in self._warned:
            return
        self._warned.add((key, name))
        log.warning(
            "%s.%s is changed in the steps, and is not kept: a process that replaces a lost one, or a run that goes on "
            "from a commit, begins with its own. If training depends on it, keep it in numbers, texts, lists, tuples "
            "and dictionaries of up to %d values in attributes of the object itself, a callback's in tensors of as "
            "many; larger ones belong to the model (register_buffer)",
            key.rpartition(" ")[0], name, MOST,
        )  # fmt: skip

    def _beside_tensors(self, key: str) -> set[str]:
        """The attributes that a method sets together with one that holds tensors now, and is not kept. Not a count
        (`+=`)."""
        if not self._changes[key]:
            return set()
        each, _, methods = self._objects[key]
        there = getattr(each, "__dict__", {})
        made = [
            m for m in methods if m.replaces and (m.buffers or any(_holds_tensors(each, there.get(n)) for n in m.sets))
        ]
        return {name for method in made for name in method.replaces}


@dataclass(frozen=True, slots=True)
class _Mark:
    """By which another value, or another content of the same, is seen. A tensor is not kept alive by it."""

    value: Any  # a weak reference to a tensor, or the id of a collection or of an object of the script's
    state: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> _Mark:
        if isinstance(value, torch.Tensor):
            return cls(weakref.ref(value), (version(value),))
        if not isinstance(value, _COLLECTIONS):
            return cls(id(value), tuple(hash(v) for v in vars(value).values() if type(v) in SCALARS))
        inside = islice(value.values() if isinstance(value, dict) else value, FEW)
        of_each = (part for v in inside for part in (id(v), version(v) if isinstance(v, torch.Tensor) else 0))
        return cls(id(value), (len(value), *of_each))

    def is_of(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return isinstance(self.value, weakref.ref) and self.value() is value and self.state == (version(value),)
        return self == _Mark.of(value)


@dataclass(frozen=True, slots=True)
class _Method:
    """One of a script's own classes. `sets`: the attributes to which it gives values. `replaces`: those of them to
    which it does not add; none in `__init__`. `buffers`: it registers some."""

    sets: frozenset[str]
    replaces: frozenset[str]
    buffers: bool


def attributes_set_by_script(kind: type) -> frozenset[str]:
    """The attributes to which methods of the script's own classes, among the bases of `kind`, give values."""
    return frozenset[str]().union(*(method.sets for method in _methods_of_script(kind)))


@functools.lru_cache(maxsize=1024)
def _methods_of_script(kind: type) -> tuple[_Method, ...]:
    """The methods that set attributes, of the script's own classes among the bases of `kind`."""
    own = (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in LIBRARIES)
    functions = (inspect.unwrap(f) for base in own for f in vars(base).values() if isinstance(f, FunctionType))
    return tuple(method for f in functions if (method := _read(f)).sets)


def _read(function: FunctionType) -> _Method:
    instructions = list(dis.get_instructions(function))
    stores = [(i.argval, before.opname == "SWAP") for before, i in pairwise(instructions) if i.opname == "STORE_ATTR"]
    names = frozenset(name for name, _ in stores)
    if function.__name__ == "__init__":
        return _Method(names, frozenset(), buffers=False)
    added = {name for name, adds in stores if adds}  # `self.count += 1` puts the sum below its object
    return _Method(names, names - added, buffers=any(i.argval == "register_buffer" for i in instructions))


def _holds_tensors(each: object, value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    tensors = [item for item in islice(inside, 4) if isinstance(item, torch.Tensor)]
    return any(tensor is not value or not _is_small(each, tensor) for tensor in tensors)


def _is_small(each: object, tensor: torch.Tensor) -> bool:
    """Whether the object's tensor is kept. A module's is a mask or a cache: what it trains with is a buffer."""
    kept = layouts.is_dense(tensor) and tensor.numel() <= MOST
    return kept and not isinstance(each, torch.nn.Module) and not isinstance(tensor, torch.nn.Parameter)
