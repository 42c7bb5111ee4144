"""Reads what the script holds beside what is tracked, by name, so that it can be compared with what another process
holds, and a refusal can name what a new process lacks.

Numbers and texts are read as they are. What has no names inside of it (a set, a queue, a long list, a generator, an
iterator) is read as what it is and a digest of its content, and so are tensors and arrays. Of a tracked module the
attributes are read that the script gives it, because no `state_dict` has them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from everstep.checkpoint.state import layouts
from everstep.recovery.errors import LoopError
from everstep.torch_private.modules import buffers_of, parameters_of
from everstep.train.guards.containers import MISSING, as_container, as_plain, length_of
from everstep.train.guards.contents import (
    DIGEST,
    FUNCTIONS,
    PRINTED,
    STATEFUL,
    Beyond,
    Contents,
    Full,
    bound_to,
    digest_of,
    is_iterator,
    name_of,
    shape_of,
)
from everstep.train.guards.holders import parts_of_holder
from everstep.train.guards.remedies import of_tensors
from everstep.train.guards.script_objects import (
    FEW,
    Name,
    NamedValue,
    attributes,
    children,
    given_to,
    is_open,
    is_own,
    is_script,
    is_special,
    scopes,
    set_by_script,
    unsaved_buffers,
    value_of,
    walk,
)
from everstep.train.guards.untracked.covered import Covered

log = logging.getLogger("everstep.train")

Values = dict[str, str]

VISITS = 2000  # objects that are looked at: other ranks wait meanwhile
MOST = 4000  # values
LONG = 60  # characters of a value
DIGITS = 4096  # bits of a number that is written out: Python refuses to write long ones
MOST_NAMED = 8  # variables in a text for a person
MOST_TENSORS = 256  # of those that are carried, and of the others
MOST_BYTES = 2**26  # of all of these
DEEPEST = 24  # level of a tensor: a library's model has more of them than other objects
# What to do about them.
TRACK = (
    "Track what steps change (`run.track(name=value)` before the loop; a number inside of a dictionary), or let it be "
    "computed anew in each step from run.step"
)
_SHORT = frozenset({bool, float, complex, type(None)})  # whose texts are
_CUT = re.compile(r"[.\[]")
_CONSTANT = (int, float, complex, str, bytes, type(None), types.ModuleType, type)
_OF_CLASSES = (property, types.MemberDescriptorType, types.GetSetDescriptorType)  # what stands there beside methods
_unread = set[str]()  # that a warning has named


class Roots:
    """Where a search for the script's values begins. `own`: values beside its variables, by name; `closed`: objects
    that are not looked into; `far`: values to which nothing of these leads, by name. `values`: the script's variables.
    `kept`: what it has set on tracked modules. `sets`: the names of attributes that the script's text sets on objects;
    on a library's object those with private names count that are among them."""

    def __init__(
        self, frame: types.FrameType | None, state: Mapping[str, object] = MappingProxyType({}),
        own: Iterable[tuple[str, object]] = (), closed: Iterable[object] = (), far: Iterable[tuple[str, object]] = (),
        sets: Callable[[], frozenset[str]] = frozenset,
    ) -> None:  # fmt: skip
        self.own, self.closed, self.far = list(own), list(closed), list(far)
        known = {id(value) for value in self.closed}
        self.state = dict(state)
        self.values, self.hidden = dict[str, Any](), dict[str, Any]()
        self.running = set[str]()  # functions whose variables these are
        self._read(frame)
        tracked = {id(value) for value in self.state.values()} - known
        named = [*self.values.items(), *self.hidden.items()]
        names = {id(value): name for name, value in reversed(named)}
        self._tracked = {name for name, value in named if id(value) in tracked}
        self.kept = dict[str, Any]()
        sets = functools.cache(sets)
        for key, target in self.state.items():
            for path, value in _own_parts(target):
                if id(value) not in known:
                    self.closed.append(value)
                    # The script has not chosen the key of a run's loader: one of its variables may be called so.
                    outer = names.get(id(target)) or (_LOADER if _is_loader(target) else key)
                    name = names.get(id(value)) or ".".join(filter(None, (outer, path)))
                    parts = {part.name: part.value for part in _set_by_script(name, value, sets)}
                    # A dataset is looked at under the name of its variable, if it has one.
                    self.kept |= {k: v for k, v in parts.items() if not (_is_loader(target) and id(v) in names)}

    def _read(self, frame: types.FrameType | None) -> None:
        """The nearest variable has its bare name. Another one of this name has its function's or module's before it."""
        outer = set[str]()
        for scope in scopes(frame):
            self.running.add(scope.owner)
            for name, value in scope.variables:
                if not name.isidentifier():
                    continue
                if name not in self.values:
                    self.values[name] = value
                # An object is read once; equal numbers are one variable only where an inner function has it too.
                elif self.values[name] is not value or (as_plain(value) is value and name not in outer):
                    self.hidden.setdefault(f"{scope.owner}.{name}", value)
            outer.update(scope.outer)

    def all(self) -> list[tuple[str, Any]]:
        return [*self.own, *self.kept.items(), *self.values.items(), *self.hidden.items(), *self.far]

    @functools.cached_property
    def covered(self) -> Covered:
        try:
            return Covered(self.state)
        except LoopError:  # a container of modules, which a session refuses and a Checkpointer takes
            nested = [(key, parts) for key, parts in self.state.items() if isinstance(parts, Mapping)]
            return Covered(self.state | {f"{key}.{name}": part for key, parts in nested for name, part in parts.items()}
                           | {key: None for key, _ in nested})  # fmt: skip

    def is_tracked(self, name: str) -> bool:
        """Whether the name is that of a tracked variable, or of what it holds and saves."""
        cuts = [*(cut.start() for cut in _CUT.finditer(name)), len(name)]
        ways = [name[:cut] for cut in cuts]
        return any(way in self._tracked for way in ways) and not any(way in self.kept for way in ways)


_LOADER = "run.loader(…)"
_GIVEN = torch.optim.Optimizer | torch.optim.lr_scheduler.LRScheduler | torch.Tensor


def _own_parts(target: object) -> Iterator[tuple[str, object]]:
    """A tracked object that may have attributes of the script's, which nothing saves; of a module all in it."""
    if isinstance(target, torch.nn.Module):
        yield from torch.nn.Module.named_modules(target)
    elif isinstance(target, _GIVEN) or is_own(type(target)) or _is_loader(target):
        yield "", target


def _is_loader(target: object) -> bool:
    """Whether it is one of ours, which a run tracks for its position."""
    return type(target).__module__.startswith("everstep.data")


def _set_by_script(name: str, value: object, sets: Callable[[], frozenset[str]]) -> Iterator[NamedValue]:
    """The attributes that the script gives a tracked object, and the parameters and buffers of a module."""
    kind = type(value)
    yield from (NamedValue(f"{name}.{key}", part, name) for key, part in set_by_script(value, sets))
    yield from (NamedValue(f"{name}{path}", part, name) for path, part in given_to(value))
    if isinstance(value, torch.nn.Module):
        yield from (NamedValue(f"{name}.{key}", buffer, name) for key, buffer in unsaved_buffers(value))
        for key, tensor in (*parameters_of(value).items(), *buffers_of(value).items()):
            if tensor is not None:
                yield from (NamedValue(f"{name}.{key}.{inner}", part) for inner, part in set_by_script(tensor))
                yield from (NamedValue(f"{name}.{key}{path}", part) for path, part in given_to(tensor))
    yield from _of_classes(kind)


def plain_values(
    roots: Roots | types.FrameType | None, beyond: list[str] | None = None,
    look: Callable[[NamedValue], None] = lambda _: None,
) -> Values:  # fmt: skip
    """The script's numbers, texts, names of functions, classes of objects, and contents of what has no names inside, by
    name. They only make a refusal clearer, so no error is raised. `beyond` gets the names of what is not read, and
    `look` each object that is looked at."""
    beyond = [] if beyond is None else beyond
    past = list[str]()
    try:
        roots = roots if isinstance(roots, Roots) else Roots(roots)
        reading = _Reading(roots, past, look)
        reading.read(roots)
        beyond += [name for name in past if not roots.is_tracked(name.partition(" (")[0])]
        return {name: text for name, text in reading.values.items() if not roots.is_tracked(name)}
    except Exception as e:  # the script's own classes may raise anything
        log.debug("the script's values could not be read", exc_info=True)
        beyond.append(f"the script's values ({type(e).__name__}: {e})")
        return {}


def may_change(value: Any) -> bool:
    """Whether it is an object that may hold state, or a function that keeps some."""
    if isinstance(value, types.FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return bool(value.__closure__ or vars(value)) or not all(isinstance(part, _CONSTANT) for part in defaults)
    return not isinstance(value, (*_CONSTANT, types.BuiltinFunctionType, *_OF_CLASSES))


class _Names:
    """Of one search. A closure's variable has its bare name, as the script writes it, and the object of a method the
    name of what holds the method; unless another variable or object has that name already: then what leads to it stands
    before it, `weights['consistency'].count`."""

    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._variables = dict(reversed(roots.all()))
        self._cells = dict[str, types.CellType]()  # by the bare names that are taken
        self._objects = dict[str, object]()  # by their names
        self._of_kinds = dict[type, list[NamedValue]]()
        self._followed = set[str]()  # globals of other modules

    def parts(self, named: NamedValue) -> Iterator[NamedValue]:
        """What an object holds."""
        value = named.value
        self._objects.setdefault(named.name, value)
        if isinstance(value, types.FunctionType):
            cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
            for part in children(named):
                is_bare = part.name not in cells or self._is_its(part.name, cells[part.name], value)
                yield part if is_bare else NamedValue(f"{named.name}.{part.name}", part.value, named.name)
            yield from self._globals_of(value)
        elif isinstance(value, types.MethodType):
            for part in children(named):
                known = self._objects.get(part.name, part.value)
                is_bare = known is part.value or known is value
                yield part if is_bare else NamedValue(f"{named.name}.__self__", part.value, named.name)
        else:
            yield from children(named)
            known = type(value) in self._of_kinds
            yield from (part for part in self.of_classes(type(value)) if may_change(part.value))
            for base in () if known else type(value).__mro__:
                methods = list(vars(base).values()) if is_own(base) else []
                for method in methods:
                    yield from self._globals_of(method) if isinstance(method, types.FunctionType) else ()

    def _globals_of(self, function: types.FunctionType) -> Iterator[NamedValue]:
        """What a function of another module than those that run names of its module, and so do those that it calls
        there: `losses.calls` behind `from losses import weigh`."""
        module, waiting = str(function.__globals__.get("__name__")), [function]
        if module in self._roots.running or not is_script(function.__code__.co_filename):
            return
        for followed in waiting:
            for key in followed.__code__.co_names:
                value = followed.__globals__.get(key, MISSING)
                name = f"{module}.{key}"
                if value is MISSING or isinstance(value, types.ModuleType) or name in self._followed:
                    continue
                self._followed.add(name)
                if isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
                    waiting.append(value)
                if not isinstance(value, types.FunctionType) or may_change(value):
                    yield NamedValue(name, value)

    def of_classes(self, kind: type) -> list[NamedValue]:
        """What stands in an object's classes: read once for all objects of the kind."""
        if kind not in self._of_kinds:
            self._of_kinds[kind] = list(_of_classes(kind))
        return self._of_kinds[kind]

    def _is_its(self, name: str, cell: types.CellType, function: types.FunctionType) -> bool:
        """Whether the name stands for this variable of the function's."""
        if name in self._variables:
            enclosing = function.__qualname__.split(".<locals>.")[:-1]
            outer = {".<locals>.".join(enclosing[:i]) for i in range(1, len(enclosing) + 1)}
            return self._variables[name] is cell.cell_contents and not outer.isdisjoint(self._roots.running)
        return self._cells.setdefault(name, cell) is cell


class _Reading:
    def __init__(self, roots: Roots, beyond: list[str], look: Callable[[NamedValue], None]) -> None:
        self.values, self._beyond, self._look_at = Values(), beyond, look
        self._covered = roots.covered
        self._names = _Names(roots)
        self._contents = Contents(map(id, (*roots.state.values(), *roots.closed)))

    def read(self, roots: Roots) -> None:
        named = roots.all()
        for name, value in named:
            self._add(name, value, by_script=True)
        parts = [part for name, value in named for part in _of_class(name, value)]
        for part in parts:
            self._add(part.name, part.value)
        more = [(part.name, part.value) for part in parts if may_change(part.value)]
        visited = sum(1 for _ in islice(walk([*named, *more], roots.closed, self._look, self._ends), VISITS))
        if visited == VISITS or len(self.values) > MOST:
            self._beyond.append(f"what is behind the first {visited} objects")

    def _look(self, named: NamedValue) -> list[NamedValue]:
        try:
            self._look_at(named)
            return self._parts_of(named)
        except Exception:  # a name that cannot be written; and as above
            self._beyond.append(named.name)
            return []

    def _parts_of(self, named: NamedValue) -> list[NamedValue]:
        """What an object holds, whose values are noted."""
        parts = list(self._names.parts(named))
        kind = type(named.value)
        is_library = issubclass(kind, torch.nn.Module) and kind.__module__.startswith("torch.")
        if len(self.values) <= MOST:
            by_script = is_library or (kind.__module__ != "builtins" and is_own(kind))
            inner = [*parts, *self._names.of_classes(kind)]
            if is_library:  # of what is its own, tensors alone change, and these are read as such
                inner = [NamedValue(f"{named.name}.{key}", part) for key, part in set_by_script(named.value)]
            for child in (*inner, *(part for holder in inner for part in _of_class(holder.name, holder.value))):
                self._add(child.name, child.value, by_script=by_script)
        return parts

    def _ends(self, named: NamedValue) -> None:
        """The walk does not go into it: what has names further inside has one digest here."""
        text = self.values.get(named.name, "")
        has_parts = length_of(named.value) is not None or parts_of_holder(named.value) is not None
        if text and DIGEST not in text and (has_parts or _is_own(type(named.value))):
            del self.values[named.name]
            self._note(named.name, named.value, lambda name, value: f"{text}{self._digest(name, value)}")

    def _add(self, name: str, value: object, *, by_script: bool = False) -> None:
        """`by_script`: it is a variable of the script's, or an attribute of one of its objects."""
        if name in self.values:
            return
        if type(value) in _SHORT:
            self.values[name] = repr(value)
        else:
            self._note(name, value, self._of_variable if by_script else self._text)

    def _note(self, name: str, value: object, read: Callable[[str, Any], str]) -> None:
        """Without a text where it cannot be read: another process may be able to."""
        try:
            if text := read(name, value):
                self.values[name] = text
        except Beyond as e:
            self._beyond.append(f"{name} ({e})")
        except Exception:  # the script's own classes may raise anything
            self._beyond.append(name)

    def _of_variable(self, name: str, value: Any) -> str:
        """Of other objects, too, that stand where nothing stood, or one of another class."""
        kind = type(value)
        is_named = not kind.__module__.startswith(("everstep", "builtins"))
        return self._text(name, value) or (kind.__name__ if is_named else "")

    def _text(self, name: str, value: Any) -> str:
        if (plain := as_plain(value)) is not MISSING:
            if type(plain) in (str, bytes):
                text, more = repr(plain[:LONG]), len(plain) > LONG
            elif type(plain) is int and plain.bit_length() > DIGITS:
                text, more = f"number of {plain.bit_length()} bits", True
            else:
                text, more = repr(plain), False
            return text[:LONG] + (self._digest(name, value) if more or len(text) > LONG else "")
        if (length := length_of(value)) is not None:
            kind, inner = type(value), as_container(value, FEW)
            own = _attributes(value) if kind is not type(inner) else ""
            if issubclass(kind, OrderedDict) and length <= FEW:
                value = list(inner)  # its order counts
            named = length <= FEW and _has_names(inner) and not issubclass(kind, OrderedDict)
            return f"{length} elements{own}{'' if named else self._digest(name, value)}"
        value = value.func if isinstance(value, functools.partial) else _without_binding(value)
        kind = type(value)
        if kind in PRINTED or issubclass(kind, np.generic):
            text = repr(value)
            return text[:LONG] + (self._digest(name, value) if len(text) > LONG else "")
        if issubclass(kind, FUNCTIONS):
            owner = bound_to(value)
            is_read = length_of(owner) is not None or (_has_state(type(owner), owner) and not self._is_saved(owner))
            return f"{name_of(value)}{_attributes(value)}{self._digest(name, owner) if is_read else ''}"
        if kind is torch.Tensor:  # what it holds may be on a device, and large
            return shape_of(value)
        if _has_state(kind, value):
            return f"{kind.__name__}{self._digest(name, value)}" if not self._is_saved(value) else ""
        return f"{kind.__qualname__}{_attributes(value)}" if _is_own(kind) else ""

    def _is_saved(self, value: object) -> bool:
        """As a loader's generator is, of which the loader saves what it needs."""
        return id(value) in self._covered.objects and id(value) not in self._covered.reached

    def _digest(self, name: str, value: object) -> str:
        """Nothing if the value itself is too much: then only what stands before it is compared."""
        try:
            return f"{DIGEST}{self._contents.digest(value)}"
        except Full:
            raise
        except Beyond as e:
            self._beyond.append(f"{name} ({e})")
            return ""


def _has_state(kind: type, value: Any) -> bool:
    """Whether it is read by its digest alone."""
    return issubclass(kind, STATEFUL) or is_iterator(kind) or (kind is np.ndarray and value.dtype.hasobject)


def _is_own(kind: type) -> bool:
    """Whether the attributes of its objects are the script's."""
    return is_own(kind) or (is_open(kind) and kind.__module__ in sys.stdlib_module_names)


def _attributes(value: object) -> str:
    """How many it has: of one that only another process has set there is nothing to compare."""
    count = 0 if isinstance(value, type) else sum(1 for _ in attributes(value))
    return f" with {count} attributes" if count else ""


def _of_classes(kind: type) -> Iterator[NamedValue]:
    """The attributes of a class of the script's, of those from which it is derived, and of its metaclass."""
    for base in (*kind.__mro__, type(kind)):
        yield from _of_class(base.__name__, base)


def _of_class(name: str, value: object) -> list[NamedValue]:
    """The attributes of a class of the script's."""
    own = isinstance(value, type) and is_own(value)
    parts = [(key, part) for key, part in list(vars(value).items()) if not is_special(key)] if own else []
    return [NamedValue(f"{name}.{key}", _without_binding(part), name) for key, part in parts]


def _without_binding(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _has_names(inner: Any) -> bool:
    """Whether each element has a name by which the script would write it."""
    return isinstance(inner, list | tuple) or (isinstance(inner, dict) and all(as_plain(key) is key for key in inner))


def untracked_values(
    frame: types.FrameType | None, state: Mapping[str, object], carried: Mapping[str, Name] = MappingProxyType({})
) -> Values:
    """The same, without what is tracked, and with digests of the tensors and arrays that are not saved. `carried`: the
    names that the loop carries from step to step. Their tensors come first, and a warning names those of them that are
    beyond a bound."""
    beyond, values = list[str](), Values()
    try:
        roots = Roots(frame, state)
        values = plain_values(roots, beyond)
        values |= _tensors(roots, carried, beyond)
        values = {name: text for name, text in values.items() if text}
    except Exception:  # as above
        log.warning("the script's tensors could not be read, and are not compared", exc_info=True)
    unread = list(dict.fromkeys(name for name in beyond if name.partition(" (")[0] in carried))
    if not _unread.issuperset(unread):
        _unread.update(unread)
        log.warning(
            "not compared with those of other processes, because together they are more than %d MiB or %d tensors, or "
            "one has more parts than are read: %s", MOST_BYTES >> 20, MOST_TENSORS, listed(unread),
        )  # fmt: skip
    return values


def _tensors(roots: Roots, carried: Mapping[str, Name], beyond: list[str]) -> Values:
    left, texts = MOST_BYTES, Values()
    carried_values = [(name, value_of(roots.values, parts)) for name, parts in carried.items()]
    for where in (carried_values, roots.all()):
        for position, (_, tensor) in enumerate(own_tensors(where, roots, VISITS)):
            if tensor.name in texts:
                continue
            size = tensor.value.nbytes if isinstance(tensor.value, np.ndarray) else layouts.size_of(tensor.value)
            with contextlib.suppress(Exception):  # a subclass of the script's may raise anything
                if position < MOST_TENSORS and size <= left:
                    left -= size
                    texts[tensor.name] = f"{shape_of(tensor.value)}{DIGEST}{digest_of(tensor.value)}"
                    continue
            beyond.append(tensor.name)
            if size <= MOST_BYTES:  # it may be read in another process, where those before it are smaller
                texts[tensor.name] = ""
    return texts


def own_tensors(where: Iterable[tuple[str, Any]], roots: Roots, visits: int) -> Iterator[tuple[str, NamedValue]]:
    """The tensors and arrays below `where` that nothing tracked holds, each with the name of the outermost container or
    module in which it stands."""
    outermost, covered = dict[str, str](), roots.covered
    closed = [*roots.state.values(), *roots.closed]
    for named in islice(walk(where, closed, _Names(roots).parts, deepest=DEEPEST), visits):
        value = named.value
        if length_of(value) is not None or (isinstance(value, torch.nn.Module) and not _saves(value, covered)):
            outermost[named.name] = outermost.get(named.owner, named.name)
        elif _is_compared(value, covered):
            yield outermost.get(named.owner, named.name), named


def _saves(module: torch.nn.Module, covered: Covered) -> bool:
    """Whether its parameters are tracked."""
    return id(module) in covered.objects or any(covered.holds(parameter) for parameter in module.parameters())


def _is_compared(value: object, covered: Covered) -> bool:
    if isinstance(value, np.ndarray):
        return not (value.dtype.hasobject or (id(value) in covered.objects and id(value) not in covered.reached))
    return isinstance(value, torch.Tensor) and not (value.is_meta or is_lazy(value) or covered.holds(value))


def differences(theirs: Values, mine: Values, leave_out: Callable[[str], bool] = lambda _: False) -> list[str]:
    """The values that both have and that differ, as `alpha (0.5 there, 1.0 here)`, with the shortest names first.
    `leave_out`: whether a name does not count."""
    names = [name for name, value in theirs.items() if name in mine and mine[name] != value and not leave_out(name)]
    return [f"{name} ({theirs[name]} there, {mine[name]} in the new process)" for name in sorted(names, key=_order)]


def remedy(differing: list[str]) -> str:
    """What to do about `differences`."""
    parts = (line.partition(" (tensor of") for line in differing)
    tensors = [name for name, tensor, _ in parts if tensor]
    more = of_tensors(tensors) if tensors else "" if differing else "`everstep rehearse` reads more, and names it"
    return f"{TRACK}. {more}" if more else TRACK


def listed(differing: list[str]) -> str:
    """The first few of `differences`, as text."""
    more = f", and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
    return f"{'; '.join(differing[:MOST_NAMED])}{more}"


def _order(name: str) -> tuple[int, int, str]:
    return name.count(".") + name.count("["), len(name), name
