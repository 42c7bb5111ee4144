"""What is checked and kept of the script's own objects in a run whose loop belongs to a framework.

`Uncounted` is the untracked-state check of such a run: there is none. Part of the state are plain values that
callbacks, trainers and modules of the script's own classes keep in their attributes, such as a factor of the learning
rate or a count of bad evaluations, and callbacks' small tensors: `ScriptAttributes`. It warns of an attribute that it
cannot keep. Weights that a callback keeps and changes, such as an average of the model's, are in no commit and in no
new process. They are refused: `CallbackWeights`.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from types import FunctionType
from typing import Any

import numpy as np
import torch

from everstep.recovery.errors import LoopError
from everstep.recovery.rollback.snapshots import version, write
from everstep.train.guards.untracked.untracked_state import UntrackedStateCheck

log = logging.getLogger("everstep.train")


class Uncounted(UntrackedStateCheck):
    """Finds nothing: all that training changes belongs to the framework, and is tracked."""

    def __init__(self) -> None:
        super().__init__({})

    def start(self) -> None: ...
    def begins(self) -> None: ...
    def over(self) -> None: ...
    def moved(self) -> None: ...
    def completed(self, world_size: int, same: Callable[[int], bool]) -> None: ...


LIBRARIES = (
    "torch", "transformers", "everstep", "lightning", "pytorch_lightning", "accelerate", "torchmetrics", "peft", "trl",
    "timm", "builtins",
)  # fmt: skip
MOST = 2000  # values in an attribute
FEW = 64  # elements of a collection that is not kept, by which a change of it is seen
ONCE = "flags set once"
_SCALARS = frozenset({bool, int, float, str, type(None)})
_TENSOR, _DEVICE = "everstep tensor", "device"  # the keys of a tensor, or of numpy's array, that is told
_ARRAY, _SCALAR = "numpy array", "numpy scalar"  # the devices of numpy's
_COLLECTIONS = (list, tuple, dict, set, deque)


class ScriptAttributes:
    """The attributes with plain values of `objects`, as far as a script's own classes set them, and the small tensors
    of those that are no modules.

    Only those are told and put back that steps have changed. Others are each process's own:

    - a path, or its rank, which hooks set anew when a pass begins;
    - what says for which length a tensor beside it was made, if that tensor is not told: a new process has none yet;
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
                    frozenset[str]().union(*(m.sets for m in methods)),
                    methods,
                )
                numbers[name] += 1
        self._first = {key: self._held(key) for key in self._objects}
        self._last = dict(self._first)
        self._changes = {key: Counter[str]() for key in self._objects}

    def now(self) -> dict[str, dict[str, Any]]:
        """By object: the attributes that have changed; and the names of flags among them that were set once. Call it in
        each step, so that it sees each change of a flag."""
        told: dict[str, dict[str, Any]] = {}
        flags: dict[str, list[str]] = {}
        for key, changes in self._changes.items():
            held, was = self._held(key, warns=True), self._last[key]
            changes.update(n for n, value in held.items() if n not in was or _differs(was[n], value))
            self._last[key] = held
            beside = self._beside_tensors(key)
            told[key] = {n: value for n, value in held.items() if changes[n] and n not in beside}
            flags[key] = [n for n, value in told[key].items() if type(value) is bool and changes[n] == 1]
        return {**told, ONCE: flags}

    def put_back(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Bring them to what `now` told, here or in another process. Called before the first step of a pass. If `told`
        has other objects only, it comes from a rank without this one."""
        for key, (each, *_) in self._objects.items():
            changes, first = self._changes[key], self._first[key]
            then, once = told.get(key, {}), told.get(ONCE, {}).get(key, ())
            if key in told or not told:
                for name in {n for n in self._held(key) if changes[n]} - then.keys() - self._beside_tensors(key):
                    if name in first:
                        _put(each, name, first[name])
                    else:
                        delattr(each, name)
            for name, value in then.items():
                if name not in once or changes[name]:
                    changes[name] = max(changes[name], 1 if name in once else 2)
                    _put(each, name, value)
            # The hooks of this pass have set the others: those are changed by what changes them from now on.
            held = self._held(key)
            begun = {name: value for name, value in held.items() if not changes[name]}
            self._first[key] = begun | {name: value for name, value in first.items() if changes[name]}
            self._last[key] = held

    def _held(self, key: str, *, warns: bool = False) -> dict[str, Any]:
        """Copies of what is kept. `warns`: of the others, those that have changed since the last look are named."""
        each, names, _ = self._objects[key]
        there = getattr(each, "__dict__", {})
        found: dict[str, Any] = {}
        for name in names:
            value = there.get(name, self)
            if type(value) in _SCALARS:
                found[name] = value
            elif isinstance(value, torch.Tensor):
                if _is_small(each, value):
                    found[name] = self._copy_of(key, name, value)
                elif not isinstance(each, torch.nn.Module):
                    self._look_at(key, name, value, warns=warns)
            elif isinstance(value, np.ndarray | np.generic):
                if value.size <= MOST and value.dtype.kind in "biufc":
                    found[name] = {_TENSOR: np.array(value), _DEVICE: _SCALAR if value.shape == () else _ARRAY}
            elif isinstance(value, _COLLECTIONS):
                if _plain(value):
                    found[name] = _copied(value)
                elif value and (len(value) > MOST or not isinstance(each, torch.nn.Module)):
                    self._look_at(key, name, value, warns=warns)
        return found

    def _copy_of(self, key: str, name: str, tensor: torch.Tensor) -> dict[str, Any]:
        """The same copy as long as the tensor is the same. On an accelerator, which comparing values would wait for, a
        change through `.data` is not seen."""
        mark, copied = self._marks.get((key, name)), self._copies.get((key, name))
        if tensor.device.type == "cpu":
            same = copied is not None and _same_values(copied[_TENSOR], tensor)
        else:
            same = mark is not None and mark.is_of(tensor) and not tensor.is_inference()  # that counts no changes
        if copied is None or not same:
            self._marks[key, name] = _Mark.of(tensor)
            copied = self._copies[key, name] = {_TENSOR: tensor.detach().clone(), _DEVICE: tensor.device.type}
        return copied

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
            "and dictionaries of up to %d values, a callback's in tensors of as many; larger ones belong to the model "
            "(register_buffer)",
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

    value: Any  # a weak reference to a tensor, or the id of a collection
    state: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> _Mark:
        if isinstance(value, torch.Tensor):
            return cls(weakref.ref(value), (version(value),))
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


@functools.lru_cache(maxsize=1024)
def _methods_of_script(kind: type) -> tuple[_Method, ...]:
    """The methods that set attributes, of the script's own classes among the bases of `kind`."""
    own = (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in LIBRARIES)
    functions = (inspect.unwrap(f) for base in own for f in vars(base).values() if isinstance(f, FunctionType))
    return tuple(method for f in functions if (method := _read(f)).sets)


def _read(function: FunctionType) -> _Method:
    found = list(dis.get_instructions(function))
    stores = [(i.argval, before.opname == "SWAP") for before, i in pairwise(found) if i.opname == "STORE_ATTR"]
    names = frozenset(name for name, _ in stores)
    if function.__name__ == "__init__":
        return _Method(names, frozenset(), buffers=False)
    added = {name for name, adds in stores if adds}  # `self.count += 1` puts the sum below its object
    return _Method(names, names - added, buffers=any(i.argval == "register_buffer" for i in found))


def _holds_tensors(each: object, value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    found = [one for one in islice(inside, 4) if isinstance(one, torch.Tensor)]
    return any(one is not value or not _is_small(each, one) for one in found)


def _is_small(each: object, tensor: torch.Tensor) -> bool:
    """Whether the object's tensor is kept. A module's is a mask or a cache: what it trains with is a buffer."""
    kept = tensor.layout is torch.strided and tensor.numel() <= MOST
    return kept and not isinstance(each, torch.nn.Module) and not isinstance(tensor, torch.nn.Parameter)


def _plain(value: Any) -> bool:
    return 0 <= _size(value) <= MOST


def _size(value: Any) -> int:
    """How many values it holds, or -1 if some is not plain."""
    if type(value) in _SCALARS:
        return 1
    if type(value) is dict and not all(type(key) in (str, int) for key in value):
        return -1
    if type(value) not in (list, tuple, dict) or len(value) > MOST:
        return -1
    inside = value.values() if type(value) is dict else value
    if _SCALARS.issuperset(map(type, inside)):
        return 1 + len(value)
    sizes = [_size(each) for each in inside]
    return -1 if -1 in sizes else 1 + sum(sizes)


def _copied(value: Any) -> Any:
    inside = value.values() if type(value) is dict else value
    return copy.copy(value) if _SCALARS.issuperset(map(type, inside)) else copy.deepcopy(value)


def _differs(was: Any, value: Any) -> bool:
    """Copies of a tensor are the same object as long as it has not changed."""
    if was is value:
        return False
    if not (_is_tensor(was) and _is_tensor(value)):
        return _is_tensor(was) or _is_tensor(value) or bool(was != value)
    arrays = isinstance(was[_TENSOR], np.ndarray) and isinstance(value[_TENSOR], np.ndarray)
    return not (arrays and _same_bits(was[_TENSOR], value[_TENSOR]))


def _same_bits(was: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> bool:
    return (was.shape, was.dtype) == (value.shape, value.dtype) and was.tobytes() == value.tobytes()


def _same_values(was: Any, tensor: torch.Tensor) -> bool:
    alike = isinstance(was, torch.Tensor) and (was.shape, was.dtype) == (tensor.shape, tensor.dtype)
    return alike and was.device == tensor.device and torch.equal(was, tensor.detach())


def _is_tensor(told: Any) -> bool:
    return type(told) is dict and _TENSOR in told


def _put(each: object, name: str, value: Any) -> None:
    """Into the list or dictionary that is there, because others may hold it too."""
    there = getattr(each, "__dict__", {}).get(name)
    if _is_tensor(value):
        _put_tensor(each, name, there, value)
        return
    if type(there) is type(value) and there == value:
        return
    value = copy.deepcopy(value)
    if type(there) is list and type(value) is list:
        there[:] = value
    elif type(there) is dict and type(value) is dict:
        there.clear()
        there.update(value)
    else:
        setattr(each, name, value)


def _put_tensor(each: object, name: str, there: Any, told: Mapping[str, Any]) -> None:
    value, device = told[_TENSOR], told[_DEVICE]
    if device == _SCALAR:
        setattr(each, name, value[()])
    elif type(there) is not type(value) or (there.shape, there.dtype) != (value.shape, value.dtype):
        setattr(each, name, value.copy() if device == _ARRAY else value.clone().to(device))
    elif device == _ARRAY:
        there[...] = value
    elif there.requires_grad or there.is_inference():
        setattr(each, name, value.clone().to(device))
    else:
        write(there, value)


class CallbackWeights:
    """Finds weights that a callback keeps for itself and changes in each step: an average of the model's, a probe.

    `model`: its tensors are in the state, whoever else refers to them. A copy that is renewed now and then, such as the
    best weights so far, is let through.
    """

    def __init__(self, callbacks: Iterable[object], model: torch.nn.Module) -> None:
        self._callbacks = list(callbacks)
        self._own = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._modules = {id(m) for m in model.modules()}
        self._shapes = [p.shape for p in model.parameters()]
        self._before: dict[str, tuple[object, list[tuple[int, int]]]] = {}
        self._moved: set[str] = set()  # in the step before

    def check(self) -> None:
        """Look at the end of a step. Raises `LoopError` for weights that this step and the one before it changed."""
        now = {
            f"{type(callback).__name__}.{name}": (callback, [(id(t), t._version) for t in found])
            for callback in self._callbacks
            for name, value in getattr(callback, "__dict__", {}).items()
            if (found := [t for t in self._weights(value) if id(t) not in self._own])
        }
        moved = {name for name, seen in now.items() if name in self._before and self._before[name][1] != seen[1]}
        for name in sorted(moved & self._moved):
            if not _tells_tensors(now[name][0]):
                raise LoopError(
                    f"the callback's attribute {name} holds weights that each step changes, and that no commit and no "
                    "new process has. Keep them in the model: make the module an attribute of it (with "
                    "requires_grad_(False) if it is an average), or register tensors with model.register_buffer, and "
                    "let the callback change them there. With Lightning the callback's own state_dict() and "
                    "load_state_dict() do as well"
                )
        self._before, self._moved = now, moved

    def _weights(self, value: Any, deep: bool = True) -> Iterator[torch.Tensor]:
        """Those of a module; or of a collection whose tensors have the shapes of half of the model's parameters, since
        another one is no copy of it; or those of an object of the script's that holds such."""
        if id(value) in self._modules:
            return  # many callbacks refer to the model, and walking it costs time in each step
        if isinstance(value, torch.nn.Module):
            yield from value.parameters()
        elif isinstance(value, dict | list | tuple):
            if len(value) > max(MOST, 8 * len(self._shapes)):
                return  # a list of losses that grows, which each step would read whole
            found = value.values() if isinstance(value, dict) else value
            alike = [t for t in found if isinstance(t, torch.Tensor) and t.dim() and t.shape in self._shapes]
            yield from alike if 2 * len(alike) >= len(self._shapes) else ()
        elif deep and type(value).__module__.partition(".")[0] not in LIBRARIES:
            for each in getattr(value, "__dict__", {}).values():
                yield from self._weights(each, deep=False)


def _tells_tensors(callback: Any) -> bool:
    """Whether the state that the callback gives to checkpoints, and to ours, has tensors."""
    tell = getattr(callback, "state_dict", None)
    return tell is not None and any(isinstance(leaf, torch.Tensor) for leaf in _leaves(tell()))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(each)
    else:
        yield value
