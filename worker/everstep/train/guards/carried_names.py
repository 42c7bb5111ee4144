"""Finds the names that a loop binds in one step and reads again in a later one: a new process begins without them.

The reader walks through the text of the loop's body, and of the script's functions that it calls, as one step would
run them. It notes which names are bound, and which are read before each way through the step has bound them anew. What
is both is carried. It does not judge whether a value matters. An attribute of an object that outlives the step counts
as read at the step's end, because other code may read it there. An attribute of a class is named by the class, also
where a method binds it by `type(self)` or `cls`.

Where it cannot follow (a library's function, a registry of callbacks, `exec`), it sees neither; `comparison` and
`everstep rehearse` see the values. Invariants: none of the script's code is called, at most `MOST` parts of the text
are visited, and no object of the script is kept alive.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch

from everstep.checkpoint.state.modules import bare
from everstep.torch_private.modules import children_of, tables_of
from everstep.train.guards.script_objects import MISSING, UNCHANGEABLE, Name, is_changed_by, is_own, value_of
from everstep.train.guards.sources import Function, code_of, definition, own_names, tree_of

MOST = 200_000
ELEMENTS = 8  # of a container whose methods or functions are followed in a loop over it
_LOCAL: Name = ("",)  # a variable of a called function, which ends with the call
_ELEMENT = "[*]"  # any element of a container, or parameter of a module
_PAIRS = frozenset({"items", "named_parameters", "named_buffers"})
_VIEWS = _PAIRS | {"parameters", "buffers", "values", "state_dict"}
_FUNCTIONS = (types.FunctionType, types.MethodType)


@dataclass(frozen=True, slots=True)
class Carried:
    """A name, and where it is bound. `rebound`: it gets another object, and is not only changed in place."""

    parts: Name
    file: str
    line: int
    rebound: bool

    @property
    def name(self) -> str:
        return "".join(self.parts)


class TooLarge(Exception):
    """Raised if the text has more than `MOST` parts."""


@dataclass(slots=True)
class _Scope:
    """The names of a running function. `names`: what is local, or another name for something of the caller's."""

    file: str
    names: Mapping[str, Name] = field(default_factory=dict)
    outer: _Scope | None = None
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    module: Name = ()  # of its global variables; empty: the loop's
    owner: Name | None = None  # of a method: the object or class that it is called of
    kind: type | None = None  # of a method that calls `super()`: the class in whose text it stands
    ends: list[set[Name]] = field(default_factory=list)  # what is bound where the function returns


class Reader:
    """Of one loop. `values`: the variables that can be read before it. Each method that reads raises `TooLarge`."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self._values = values
        self._scope = self._root = _Scope(file)
        self._bound: dict[Name, Carried] = {}
        self._kinds = dict[Name, Name]()  # the classes of objects that are made in the step
        self._reads = set[tuple[Name, frozenset[Name]]]()  # each with what was bound of it before
        self._done: set[Name] | None = set()  # bound on each way to the present place; None: no way leads here
        self._ends: list[set[Name]] = []
        self._running: list[ast.AST] = []
        self._breaks: list[list[set[Name]]] = []  # of the loops in the step that run, innermost last
        self._visited = 0

    def loop(self, loop: ast.For | ast.AsyncFor | ast.While) -> None:
        """Walk through one step of a loop over steps."""
        if isinstance(loop, ast.While):
            self._visit(loop.test)
        elif isinstance(loop.target, ast.Tuple | ast.List):  # `for i, step in enumerate(…)`
            items = [item for n in ast.walk(loop) if isinstance(n, ast.With) for item in n.items]
            taken = {self._name(item.context_expr) for item in items}
            for one in loop.target.elts:
                self._bind(self._name(one), one, lasts=self._name(one) in taken)
        else:
            self._target(loop.target)
        self._block(loop.body)

    def function(self, function: Any, name: str, *, always: bool = True) -> None:
        """Walk through a function that is called in each step. `always`: and not behind some steps only."""
        self._done, before = set(self._done or ()), set(self._done or ())
        self._enter_value(function, (name,), None)
        self._done = self._done if always else before

    def carried(self) -> list[Carried]:
        """What the loop carries, in the order of its text."""
        self._meet([*self._ends, self._done])
        self._done = self._done or set()
        made = {name for name, one in self._bound.items() if one.rebound}
        for name in self._bound:  # attributes of what outlives the step
            if name[-1].startswith(".") and not any(name[:i] in made for i in range(1, len(name))):
                self._read(name)
        found = [one for name, one in self._bound.items() if any(_reaches(*read, name) for read in self._reads)]
        return sorted(found, key=lambda one: (one.file, one.line, one.parts))

    @property
    def always(self) -> set[str]:
        """The names that each step binds. Behind `carried`."""
        return {"".join(name) for name in self._done or ()}

    @property
    def bound(self) -> set[str]:
        """All names that the loop binds."""
        return {one.name for one in self._bound.values()}

    # What is read and bound.

    def _read(self, name: Name | None) -> None:
        if name and name[0] and _ELEMENT not in name and self._done is not None and not _has(self._done, name):
            self._reads.add((name, frozenset(one for one in self._done if one[: len(name)] == name)))

    def _bind(self, name: Name | None, node: ast.AST, *, rebound: bool = True, lasts: bool = True) -> None:
        """Note that the name gets another object, or, without `rebound`, changes in place. `lasts`: until the step's
        end."""
        name = self._shared(name, rebound) if name else None
        if not name or not name[0] or self._done is None:
            return
        if _ELEMENT in name:  # what an element gets under a name or key of its own is not looked at
            if rebound and name[-1] != ".data":
                return
            name, rebound = name[: name.index(_ELEMENT)], False
        if name not in self._bound or (rebound and not self._bound[name].rebound):
            self._bound[name] = Carried(name, self._scope.file, getattr(node, "lineno", 0), rebound)
        if rebound and lasts:
            self._done.add(name)

    def _shared(self, name: Name, rebound: bool) -> Name:
        """The name under which all objects of a class have what changes, where an object made in the step has it of
        its class."""
        for i in range(len(name) - 1 - rebound, 0, -1):
            kind = self._kinds.get(name[:i])
            if kind is not None and value_of(self._values, (*kind, name[i])) is not MISSING:
                return (*kind, *name[i:])
        return name

    def _name(self, e: ast.AST) -> Name | None:
        match e:
            case ast.Name():
                return self._scope.names.get(e.id, (e.id,))
            case ast.Attribute(attr="__class__"):
                return self._class_of(self._name(e.value))
            case ast.Attribute():
                owner = self._name(e.value)
                return None if owner is None else (*owner, f".{e.attr}")
            case ast.Subscript(slice=ast.Constant(value=str() | int() as key)):
                if (owner := self._attributes_of(e.value)) is not None:
                    return (*owner, f".{key}") if owner else (str(key),)
                owner = self._name(e.value)
                return None if owner is None else (*owner, f"[{key!r}]")
            case ast.Call(func=ast.Name(id="type"), args=[one], keywords=[]):
                return self._class_of(self._name(one))
            case ast.Call():
                kind = self._name(e.func)
                if kind is not None and isinstance(self._value(kind), type) and is_own(self._value(kind)):
                    self._kinds[made := ("", *kind)] = kind
                    return made
        return None

    def _attributes_of(self, e: ast.AST) -> Name | None:
        """Of `globals()`, `vars(x)` and `x.__dict__`: the name of what has the attributes; empty: the loop's file."""
        match e:
            case ast.Call(func=ast.Name(id="globals"), args=[]):
                return self._scope.module
            case ast.Call(func=ast.Name(id="vars"), args=[one]) | ast.Attribute(value=one, attr="__dict__"):
                return self._name(one)
        return None

    def _class_of(self, name: Name | None) -> Name | None:
        """The name of the class of what stands under the name, if it is the script's."""
        if name is not None and name in self._kinds:
            return self._kinds[name]
        kind = type(value) if (value := self._value(name)) is not MISSING else object
        if not is_own(kind):
            return None
        own: Iterator[Name] = ((one,) for one, known in self._values.items() if known is kind)
        return next(own, (kind.__module__, *(f".{part}" for part in kind.__qualname__.split("."))))

    def _target(self, target: ast.AST | None) -> None:
        match target:
            case None:
                pass
            case ast.Tuple() | ast.List():
                for one in target.elts:
                    self._target(one)
            case ast.Starred():
                self._target(target.value)
            case _:
                self._change(target, rebound=True)

    def _change(self, target: ast.AST, *, rebound: bool) -> None:
        """A target is assigned to. An element whose key is not written there is a change of its container."""
        name = self._name(target)
        while name is None and isinstance(target, ast.Subscript | ast.Attribute):
            if isinstance(target, ast.Subscript):
                self._visit(target.slice)
            target, rebound = target.value, False
            name = self._name(target)
        self._bind(name, target, rebound=rebound)

    # The statements.

    def _block(self, body: Sequence[ast.AST]) -> None:
        for statement in body:
            self._visit(statement)

    def _visit(self, n: ast.AST) -> None:
        if self._done is None:
            return
        self._visited += 1
        if self._visited > MOST:
            raise TooLarge
        match n:
            case ast.If() | ast.IfExp():
                self._if(n)
            case ast.Match():
                self._visit(n.subject)
                self._branches(*([*filter(None, [case.guard]), *case.body] for case in n.cases), [])
            case ast.For() | ast.AsyncFor():
                self._visit(n.iter)
                self._over(n)
            case ast.While():
                self._while(n)
            case ast.With() | ast.AsyncWith() | ast.Try() | ast.TryStar():
                self._around(n)
            case ast.Continue() | ast.Break() | ast.Return() | ast.Raise():
                self._leave(n)
            case ast.Expr(value=ast.Call() as call):
                self._call(call, used=False)
            case ast.Call():
                self._call(n, used=True)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                self._load(n)
            case _:
                self._define(n)

    def _around(self, n: ast.With | ast.AsyncWith | ast.Try | ast.TryStar) -> None:
        if isinstance(n, ast.With | ast.AsyncWith):
            self._block([*n.items, *n.body])
            for item in reversed(n.items):
                self._enter_method(self._name(item.context_expr), "__exit__", "__aexit__")
            return
        before = set(self._done or ())
        self._branches([*n.body, *n.orelse], *(handler.body for handler in n.handlers))
        leaves = self._done is None  # the last block runs all the same
        self._done = before if self._done is None else self._done
        self._block(n.finalbody)
        self._done = None if leaves else self._done

    def _define(self, n: ast.AST) -> None:
        match n:
            case ast.withitem():
                self._visit(n.context_expr)
                self._enter_method(self._name(n.context_expr), "__enter__", "__aenter__")
                self._target(n.optional_vars)
            case ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
                self._block([n.value] if n.value is not None else [])
                for target in n.targets if isinstance(n, ast.Assign) else [n.target if n.value is not None else None]:
                    self._target(target)
                    self._note_kind(target, n.value)
            case ast.AugAssign():
                self._visit(n.value)
                self._load(n.target)
                value = self._value(self._name(n.target))
                self._change(n.target, rebound=value is MISSING or isinstance(value, UNCHANGEABLE))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._scope.functions[n.name] = n
            case ast.Lambda():
                with self._perhaps():
                    self._enter(n, self._scope, {})
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._comprehension(n)
            case ast.ClassDef():
                pass
            case _:
                self._block(list(ast.iter_child_nodes(n)))

    def _if(self, n: ast.If | ast.IfExp) -> None:
        """One arm of `if` and its `elif`s runs: a long chain of them is a deep tree."""
        tests, arms, last = [n.test], [n.body], n.orelse
        while isinstance(last, list) and len(last) == 1 and isinstance(further := last[0], ast.If):
            tests, arms, last = [*tests, further.test], [*arms, further.body], further.orelse
        self._branches(*(arm if isinstance(arm, list) else [arm] for arm in (*arms, last)), tests=tests)

    def _while(self, n: ast.While) -> None:
        self._visit(n.test)
        with self._perhaps(loop=True) as breaks:
            self._block(n.body)
        if isinstance(n.test, ast.Constant) and n.test.value:  # its body runs, and a break ends it
            self._meet(breaks)
        self._block(n.orelse)

    def _branches(self, *branches: Sequence[ast.AST], tests: Sequence[ast.AST] = ()) -> None:
        """One of them runs. `tests`: run one after the other, until one of them chooses the branch of its place."""
        ends = list[set[Name] | None]()
        for branch, test in zip_longest(branches, tests):
            self._block([test] if test is not None else [])
            before = set(self._done or ())
            self._block(branch)
            ends.append(self._done)
            self._done = before
        self._meet(ends)

    def _meet(self, ends: Sequence[set[Name] | None]) -> None:
        """One of these ways has led here."""
        ways = [end for end in ends if end is not None]
        self._done = set.intersection(*ways) if ways else None

    @contextmanager
    def _perhaps(
        self, names: Mapping[str, Name] = MappingProxyType({}), *, loop: bool = False
    ) -> Iterator[list[set[Name]]]:
        """A context whose code may not run; with `loop`, or several times. `names`: its own. Gives what is bound where
        a `break` ends the loop."""
        scope, before, done = self._scope, self._scope.names, None if self._done is None else set(self._done)
        breaks, outer = list[set[Name]](), self._breaks
        self._breaks = [*outer, breaks] if loop else outer
        scope.names = {**before, **names}
        yield breaks
        self._breaks = outer
        scope.names, self._done = before, done

    def _over(self, n: ast.For | ast.AsyncFor) -> None:
        """A loop in the step. Over objects of the script its body runs with one of each class, over functions with
        each."""
        name, held, own = self._name(n.iter), self._value(self._name(n.iter)), list[Name]()
        if name is not None and isinstance(n.target, ast.Name) and type(held) in (list, tuple):
            kinds = {i if type(one) in _FUNCTIONS else type(one): i for i, one in enumerate(held[:ELEMENTS])}
            own = [(*name, f"[{i}]") for kind, i in kinds.items() if isinstance(kind, int) or is_own(kind)]
        for one in own or (None,):
            known = {n.target.id: one} if one is not None and isinstance(n.target, ast.Name) else {}
            with self._perhaps(known, loop=True):
                self._target(None if known else n.target)
                self._scope.names = {**self._scope.names, **({} if known else self._elements(n.target, n.iter))}
                self._block(n.body)
        self._block(n.orelse)

    def _elements(self, target: ast.AST, of: ast.AST) -> dict[str, Name]:
        """The variables of a loop `for target in of` that are elements of something with a name."""
        match target, of:
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=given):
                pairs = zip(targets, given, strict=False)
                return {k: v for part, one in pairs for k, v in self._elements(part, one).items()}
            case ast.Tuple(elts=[_, part]), ast.Call(func=ast.Name(id="enumerate"), args=[one, *_]):
                return self._elements(part, one)
            case ast.Tuple(elts=[_, part]), ast.Call(func=ast.Attribute(value=one, attr=view)) if view in _PAIRS:
                return self._elements(part, one)
            case ast.Name(), ast.Call(func=ast.Attribute(value=one, attr=view)) if view in _VIEWS:
                return self._elements(target, one)
            case ast.Name(id=own), ast.Name() | ast.Attribute() | ast.Subscript():
                name = self._name(of)
                return {own: (*name, _ELEMENT)} if name and name[0] else {}
        return {}

    def _leave(self, n: ast.Continue | ast.Break | ast.Return | ast.Raise) -> None:
        self._block(list(ast.iter_child_nodes(n)))
        name = self._name(n.exc) if isinstance(n, ast.Raise) and n.exc is not None else None
        if name is not None and isinstance(kind := self._value(name), type):  # `raise Skip` makes one
            self._enter_class(kind, name, None)
        if isinstance(n, ast.Return):
            self._scope.ends.append(self._done or set())
        elif isinstance(n, ast.Break) and self._breaks:
            self._breaks[-1].append(self._done or set())
        elif isinstance(n, ast.Continue) and not self._breaks and not self._running:
            self._ends.append(self._done or set())
        self._done = None

    def _comprehension(self, n: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        first = n.generators[0]
        self._visit(first.iter)  # outside of the scope
        own = (one.id for part in n.generators for one in ast.walk(part.target) if isinstance(one, ast.Name))
        with self._perhaps(dict.fromkeys(own, _LOCAL)):
            for part in n.generators:
                self._block([*([part.iter] if part is not first else []), *part.ifs])
            self._block([n.key, n.value] if isinstance(n, ast.DictComp) else [n.elt])

    # The expressions.

    def _load(self, n: ast.AST) -> None:
        name = self._name(n)
        if name is None:
            self._block([one for one in ast.iter_child_nodes(n) if not isinstance(one, ast.expr_context)])
            return
        self._visit_base(n)
        self._read(name)
        value, inner = self._value(name), self._inner(n)
        if inner is not None or isinstance(value, types.FunctionType):  # given to others, who may call it
            with self._perhaps():
                self._enter(*inner, {}) if inner else self._enter_value(value, name, None)
        elif isinstance(value, property):
            self._enter_value(value.fget, name, None, name[:-1])

    def _visit_base(self, n: ast.AST) -> None:
        """Walk through the call whose result has the attribute: of `Skip().n` the call."""
        while isinstance(n, ast.Attribute | ast.Subscript):
            n = n.value
        if isinstance(n, ast.Call):
            self._visit(n)

    def _note_kind(self, target: ast.AST | None, value: ast.AST | None) -> None:
        """A variable gets an object that is made of a class of the script."""
        made = self._name(value) if isinstance(value, ast.Call) and isinstance(target, ast.Name) else None
        if made not in self._kinds or made is None or not isinstance(target, ast.Name):
            return
        if self._name(target) == _LOCAL:
            self._scope.names = {**self._scope.names, target.id: made}
        else:
            self._kinds[(target.id,)] = self._kinds[made]

    def _call(self, n: ast.Call, *, used: bool) -> None:
        self._block([*n.args, *n.keywords])
        match n:
            case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=method)):
                self._enter_super(method, n)
                return
            case ast.Call(func=ast.Name(id="setattr"), args=[owned, ast.Constant(value=str() as key), _]):
                self._target(ast.copy_location(ast.Attribute(owned, key, ast.Store()), n))
                return
        if (inner := self._inner(n.func)) is not None:
            self._enter(*inner, self._given(inner[0], n, None))
            return
        name = self._name(n.func)
        if name is None:
            self._visit(n.func)
            return
        self._visit_base(n.func)
        value = self._value(name)
        if not isinstance(n.func, ast.Attribute):
            self._read(name)
            if name == ("next",) and n.args:
                self._bind(self._name(n.args[0]), n, rebound=False)
            self._enter_value(value, name, n)
            return
        owner, attribute = self._value(name[:-1]), n.func.attr
        inside = isinstance(owner, type) or attribute in getattr(owner, "__dict__", {})
        inside = inside or attribute in tables_of(owner)[0]
        if changes := is_changed_by(owner, attribute):
            self._bind(name[:-1], n, rebound=False)
        if isinstance(owner, types.ModuleType) and attribute.endswith("_") and n.args:  # by torch's convention
            self._bind(self._name(n.args[0]), n, rebound=False)
        if used or not changes:  # of the script's own objects only the attributes are read
            self._read(name if inside or is_own(type(owner)) else name[:-1])
        self._enter_value(value, name, n, None if inside else name[:-1])

    # The functions.

    def _value(self, name: Name | None) -> Any:
        if not name:
            return MISSING
        if name[0] and (value := _value_in(self._values, name)) is not MISSING:
            return value
        kinds = ((*self._kinds[name[:i]], *name[i:]) for i in range(1, len(name)) if name[:i] in self._kinds)
        return next((value_of(self._values, one) for one in kinds), MISSING)

    def _inner(self, n: ast.AST) -> tuple[Function, _Scope] | None:
        """A function that is defined in the loop, or in a function that it calls."""
        scope: _Scope | None = self._scope
        while scope is not None and isinstance(n, ast.Name):
            if n.id in scope.functions:
                return scope.functions[n.id], scope
            scope = scope.outer
        return None

    def _enter_value(self, value: Any, name: Name, call: ast.Call | None, owner: Name | None = None) -> None:
        """Walk through what runs in a call of the value, if that is the script's."""
        if isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, torch.nn.Module):
            self._enter_module(value, name, call)
            return
        if isinstance(value, type):
            self._enter_class(value, name, call)
            return
        if isinstance(value, types.MethodType):
            own = (one for one, held in self._values.items() if held is value.__self__)
            value, owner = value.__func__, (next(own, ""),)
        elif value is not MISSING and not isinstance(value, types.FunctionType | type) and is_own(type(value)):
            value, owner = inspect.getattr_static(type(value), "__call__", None), name
        if isinstance(value, staticmethod | classmethod):
            owner = (owner or name[:-1]) if isinstance(value, classmethod) else None
            owner = owner if isinstance(self._value(owner), type) else self._class_of(owner)
            value = value.__func__
        code = code_of(value) if isinstance(value, types.FunctionType) else None
        tree = tree_of(code.co_filename) if code is not None else None
        node = definition(tree, code) if tree is not None and code is not None else None
        if code is None or node is None:
            return
        function = inspect.unwrap(value)
        scope, known = _Scope(code.co_filename, {}, self._root, owner=owner), function.__globals__
        if known.get("__name__") != self._values.get("__name__", "__main__"):  # another file's
            scope.module = (str(known["__name__"]),)
            used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} & known.keys()
            scope.names = {one: (*scope.module, f".{one}") for one in used}
        if "__class__" in code.co_freevars:
            scope.kind = function.__closure__[code.co_freevars.index("__class__")].cell_contents
        self._enter(node, scope, self._given(node, call, owner))

    def _enter_class(self, kind: type, name: Name, call: ast.Call | None) -> None:
        """Walk through what runs where an object of the class is made."""
        self._kinds[made := ("", *name)] = name
        owners = ((type(kind), "__call__", name), (kind, "__new__", name), (kind, "__init__", made))
        for of, method, owner in (*owners, (kind, "__post_init__", made)):
            function = inspect.getattr_static(of, method, None)
            function = function.__func__ if isinstance(function, staticmethod) else function
            if isinstance(function, types.FunctionType):
                given = call if method != "__post_init__" else None
                self._enter_value(function, (*name, f".{method}"), given, owner)

    def _enter_method(self, name: Name | None, *methods: str) -> None:
        """Walk through the methods of an object that Python calls by themselves."""
        kind = self._value(self._class_of(name))
        for method in methods if isinstance(kind, type) else ():
            function = inspect.getattr_static(kind, method, None)
            if isinstance(function, types.FunctionType):
                self._enter_value(function, (f".{method}",), None, name)

    def _enter_super(self, method: str, call: ast.Call) -> None:
        """Walk through a method of the next class after the one in whose text the running method stands."""
        owner, here = self._scope.owner, self._scope.kind
        kind = self._value(owner)
        kind = kind if isinstance(kind, type) else self._value(self._class_of(owner))
        classes = kind.__mro__ if isinstance(kind, type) else ()
        for one in classes[classes.index(here) + 1 :] if here in classes else ():
            if method in vars(one):
                self._enter_value(vars(one)[method], (f".{method}",), call, owner)
                return

    def _enter_module(self, module: torch.nn.Module, name: Name, call: ast.Call | None) -> None:
        inner = bare(module)
        name = name if inner is module else (*name, ".module")
        if type(inner).__module__.startswith("torch."):  # its parts may be the script's own
            for key, part in children_of(inner).items():
                if part is not None:
                    self._enter_module(part, (*name, f"[{key}]" if key.isdigit() else f".{key}"), call)
        else:
            self._enter_value(getattr(type(inner), "forward", None), name, call, name)

    def _given(self, node: Function, call: ast.Call | None, owner: Name | None) -> dict[str, Name]:
        """The parameters that are another name for something of the caller's. `owner`: of the method."""
        arguments = call.args if call is not None else []
        given = [*([owner] if owner is not None else []), *(self._name(one) or _LOCAL for one in arguments)]
        parameters = [p.arg for p in (*node.args.posonlyargs, *node.args.args)]
        keywords = {k.arg: self._name(k.value) or _LOCAL for k in (call.keywords if call else []) if k.arg}
        return {**dict(zip(parameters, given, strict=False)), **keywords}

    def _enter(self, node: Function, outer: _Scope, given: Mapping[str, Name]) -> None:
        if any(node is one for one in self._running) or self._done is None:
            return
        here, breaks = self._scope, self._breaks
        names = {**outer.names, **dict.fromkeys(own_names(node), _LOCAL), **given}
        self._scope, self._breaks = replace(outer, names=names, outer=outer, functions={}, ends=[]), []
        self._running.append(node)
        self._block(node.body if isinstance(node.body, list) else [node.body])
        self._running.pop()
        self._meet([*self._scope.ends, self._done])
        self._scope, self._breaks = here, breaks


def _value_in(values: Mapping[str, Any], name: Name) -> Any:
    if _ELEMENT not in name:
        return value_of(values, name)
    at = name.index(_ELEMENT)
    holder, rest = value_of(values, name[:at]), name[at + 1 :]
    element = MISSING
    if isinstance(holder, torch.nn.Module):
        element = next(torch.nn.Module.parameters(holder), MISSING)
    elif type(holder) in (list, tuple, dict):
        element = next(iter(holder.values() if type(holder) is dict else holder), MISSING)
    return _value_in({"element": element}, ("element", *(rest[1:] if rest[:1] == (".data",) else rest)))


def _has(done: Collection[Name], name: Name) -> bool:
    return any(name[:i] in done for i in range(1, len(name) + 1))


def _reaches(read: Name, done: frozenset[Name], bound: Name) -> bool:
    """Whether a read of one name can read what was bound under another. `done`: what the same step has bound before."""
    shorter, longer = sorted((read, bound), key=len)
    return longer[: len(shorter)] == shorter and not _has(done, bound)
