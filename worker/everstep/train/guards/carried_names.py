"""Finds the names that a loop binds in one step and reads again in a later one: a new process begins without them.

The reader walks through the text of the loop's body, and of the script's functions that it calls, as one step would
run them. It notes which names are bound, and which are read before each way through the step has bound them anew. What
is both is carried. It does not judge whether a value matters. An attribute of an object that outlives the step counts
as read at the step's end, because other code may read it there.

It knows what the text writes as a name, an attribute or a key, and follows functions, methods and modules that such a
name stands for before the loop. Where it cannot follow (what runs where an object is made, a library's function, a
registry of callbacks, `exec`), it sees neither; `comparison` and `everstep rehearse` see the values. Invariants: none
of the script's code is called, at most `MOST` parts of the text are visited, and no object of the script is kept alive.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch

from everstep.checkpoint.state.modules import bare
from everstep.torch_private.modules import children_of, tables_of
from everstep.train.guards.containers import MISSING
from everstep.train.guards.script_objects import UNCHANGEABLE, Name, is_changed_by, is_own, value_of
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
    ends: list[set[Name]] = field(default_factory=list)  # what is bound where the function returns


class Reader:
    """Of one loop. `values`: the variables that can be read before it. Each method that reads raises `TooLarge`."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self._values = values
        self._scope = self._root = _Scope(file)
        self._bound: dict[Name, Carried] = {}
        self._reads = set[tuple[Name, frozenset[Name]]]()  # each with what was bound of it before
        # Names of the loop's file, with their nodes, where the step may read what was bound before it.
        self.early = list[tuple[str, ast.AST]]()
        self._done: set[Name] | None = set()  # bound on each way to the present line; None: no way leads here
        self._ends: list[set[Name]] = []
        self._running: list[ast.AST] = []
        self._breaks: list[list[set[Name]]] = []  # of the loops in the step that run, innermost last
        self._visited = 0

    def loop(self, loop: ast.For | ast.AsyncFor | ast.While) -> None:
        """Walk through one step of a loop over steps."""
        if isinstance(loop, ast.While):
            self._visit(loop.test)
        else:
            self._target(loop.target)
            self._done = (self._done or set()) - self._positions(loop)
        self._block(loop.body)

    def _positions(self, loop: ast.For | ast.AsyncFor) -> set[Name | None]:
        """The variables that each pass binds beside its step, or batch, to what an earlier process has counted:
        `for i, step in enumerate(…)`."""
        targets = loop.target.elts if isinstance(loop.target, ast.Tuple | ast.List) else []
        items = [item.context_expr for n in ast.walk(loop) if isinstance(n, ast.With) for item in n.items]
        beside = {self._name(target) for target in targets} - {self._name(item) for item in items}
        if len(beside) < len(targets):
            return beside
        counts = any(isinstance(n, ast.Name) and n.id == "enumerate" for n in ast.walk(loop.iter))
        return {self._name(targets[0])} if targets and counts else set()

    def function(self, function: Any, name: str, *, always: bool = True) -> None:
        """Walk through a function that is called in each step. `always`: and not behind some steps only."""
        self._done, before = set(self._done or ()), set(self._done or ())
        self._enter_value(function, (name,), None)
        self._done = self._done if always else before

    def carried(self) -> list[Carried]:
        """What the loop carries, in the order of its text."""
        self._join([*self._ends, self._done])
        self._done = self._done or set()
        made = {name for name, bound in self._bound.items() if bound.rebound}
        for name in self._bound:  # attributes of what outlives the step
            if name[-1].startswith(".") and not any(name[:i] in made for i in range(1, len(name))):
                self._read(name)
        carried = [bound for name, bound in self._bound.items() if any(_reaches(*read, name) for read in self._reads)]
        return sorted(carried, key=lambda bound: (bound.file, bound.line, bound.parts))

    @property
    def always(self) -> set[str]:
        """The names that each step binds. Behind `carried`."""
        return {"".join(name) for name in self._done or ()}

    @property
    def bound(self) -> set[str]:
        """All names that the loop binds."""
        return {bound.name for bound in self._bound.values()}

    # What is read and bound.

    def _read(self, name: Name | None, node: ast.AST | None = None) -> None:
        if not name or not name[0] or _ELEMENT in name or self._done is None or _has(self._done, name):
            return
        self._reads.add((name, frozenset(bound for bound in self._done if bound[: len(name)] == name)))
        is_alias = len(name) == 1 and isinstance(node, ast.Name) and node.id in self._scope.names
        if node is not None and not is_alias and self._scope.file == self._root.file:
            self.early.append(("".join(name), node))

    def _bind(self, name: Name | None, node: ast.AST, *, rebound: bool = True, lasts: bool = True) -> None:
        """Note that the name gets another object, or, without `rebound`, changes in place. `lasts`: until the step's
        end."""
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

    def _name(self, e: ast.AST) -> Name | None:
        match e:
            case ast.Name():
                return self._scope.names.get(e.id, (e.id,))
            case ast.Attribute():
                owner = self._name(e.value)
                return None if owner is None else (*owner, f".{e.attr}")
            case ast.Subscript(slice=ast.Constant(value=str() | int() as key)):
                owner = self._name(e.value)
                return None if owner is None else (*owner, f"[{key!r}]")
        return None

    def _target(self, target: ast.AST | None) -> None:
        match target:
            case None:
                pass
            case ast.Tuple() | ast.List():
                for element in target.elts:
                    self._target(element)
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
            case ast.Try() | ast.TryStar():
                self._try(n)
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

    def _try(self, n: ast.Try | ast.TryStar) -> None:
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
                self._target(n.optional_vars)
            case ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
                self._block([n.value] if n.value is not None else [])
                for target in n.targets if isinstance(n, ast.Assign) else [n.target if n.value is not None else None]:
                    self._target(target)
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
        if isinstance(n, ast.If) and self._is_first_micro(n.test):
            self._block(n.body)  # at the beginning of each step; what follows runs with its later batches
            with self._perhaps():
                self._block(n.orelse)
            return
        tests, arms, last = [n.test], [n.body], n.orelse
        while isinstance(last, list) and len(last) == 1 and isinstance(further := last[0], ast.If):
            tests, arms, last = [*tests, further.test], [*arms, further.body], further.orelse
        self._branches(*(arm if isinstance(arm, list) else [arm] for arm in (*arms, last)), tests=tests)

    def _is_first_micro(self, test: ast.AST) -> bool:
        """`run.micro == 0`: the batch is the first of its step."""
        match test:
            case ast.Compare(ast.Attribute(attr="micro") as micro, [ast.Eq()], [ast.Constant(value=0)]):
                owner = self._value(self._name(micro.value))
                return type(owner).__module__.startswith("everstep.")
        return False

    def _while(self, n: ast.While) -> None:
        self._visit(n.test)
        with self._perhaps(loop=True) as breaks:
            self._block(n.body)
        if isinstance(n.test, ast.Constant) and n.test.value:  # its body runs, and a break ends it
            self._join(breaks)
        self._block(n.orelse)

    def _branches(self, *branches: Sequence[ast.AST], tests: Sequence[ast.AST] = ()) -> None:
        """One of them runs. `tests`: run one after the other, until one of them chooses the branch at its position."""
        ends = list[set[Name] | None]()
        for branch, test in zip_longest(branches, tests):
            self._block([test] if test is not None else [])
            before = set(self._done or ())
            self._block(branch)
            ends.append(self._done)
            self._done = before
        self._join(ends)

    def _join(self, ends: Sequence[set[Name] | None]) -> None:
        """One of these ways has led here."""
        ways = [end for end in ends if end is not None]
        self._done = set.intersection(*ways) if ways else None

    @contextmanager
    def _perhaps(
        self, names: Mapping[str, Name] = MappingProxyType({}), *, loop: bool = False
    ) -> Iterator[list[set[Name]]]:
        """A context whose code may not run; with `loop`, or several times. `names`: its own. Yields what is bound where
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
        name, container, own = self._name(n.iter), self._value(self._name(n.iter)), list[Name]()
        if name is not None and isinstance(n.target, ast.Name) and type(container) in (list, tuple):
            first = enumerate(container[:ELEMENTS])
            kinds = {i if type(part) in _FUNCTIONS else type(part): i for i, part in first}
            own = [(*name, f"[{i}]") for kind, i in kinds.items() if isinstance(kind, int) or is_own(kind)]
        for element in own or (None,):
            known = {n.target.id: element} if element is not None and isinstance(n.target, ast.Name) else {}
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
                return {k: v for part, inner in pairs for k, v in self._elements(part, inner).items()}
            case ast.Tuple(elts=[_, part]), ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
                return self._elements(part, inner)
            case ast.Tuple(elts=[_, part]), ast.Call(func=ast.Attribute(value=inner, attr=view)) if view in _PAIRS:
                return self._elements(part, inner)
            case ast.Name(), ast.Call(func=ast.Attribute(value=inner, attr=view)) if view in _VIEWS:
                return self._elements(target, inner)
            case ast.Name(id=own), ast.Name() | ast.Attribute() | ast.Subscript():
                name = self._name(of)
                return {own: (*name, _ELEMENT)} if name and name[0] else {}
        return {}

    def _leave(self, n: ast.Continue | ast.Break | ast.Return | ast.Raise) -> None:
        self._block(list(ast.iter_child_nodes(n)))
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
        own = (name.id for part in n.generators for name in ast.walk(part.target) if isinstance(name, ast.Name))
        with self._perhaps(dict.fromkeys(own, _LOCAL)):
            for part in n.generators:
                self._block([*([part.iter] if part is not first else []), *part.ifs])
            self._block([n.key, n.value] if isinstance(n, ast.DictComp) else [n.elt])

    # The expressions.

    def _load(self, n: ast.AST) -> None:
        name = self._name(n)
        if name is None:
            self._block([part for part in ast.iter_child_nodes(n) if not isinstance(part, ast.expr_context)])
            return
        self._read(name, n)
        value, inner = self._value(name), self._inner(n)
        if inner is not None or isinstance(value, types.FunctionType):  # given to others, who may call it
            with self._perhaps():
                self._enter(*inner, {}) if inner else self._enter_value(value, name, None)
        elif isinstance(value, property):
            self._enter_value(value.fget, name, None, name[:-1])

    def _call(self, n: ast.Call, *, used: bool) -> None:
        self._block([*n.args, *n.keywords])
        if (inner := self._inner(n.func)) is not None:
            self._enter(*inner, self._given(inner[0], n, None))
            return
        name = self._name(n.func)
        if name is None:
            self._visit(n.func)
            return
        value = self._value(name)
        if not isinstance(n.func, ast.Attribute):
            self._read(name, n.func)
            if name == ("next",) and n.args:
                self._bind(self._name(n.args[0]), n, rebound=False)
            self._enter_value(value, name, n)
            return
        owner, attribute = self._value(name[:-1]), n.func.attr
        inside = isinstance(owner, type) or attribute in getattr(owner, "__dict__", {})
        inside = inside or attribute in tables_of(owner)[0]
        if changes := is_changed_by(owner, attribute):
            self._bind(name[:-1], n, rebound=False)
            if attribute == "clear" and self._done is not None:  # nothing of an earlier step is left in it
                self._done.add(name[:-1])
        if isinstance(owner, types.ModuleType) and attribute.endswith("_") and n.args:  # by torch's convention
            self._bind(self._name(n.args[0]), n, rebound=False)
        if used or not changes:  # of the script's own objects only the attributes are read
            self._read(name if inside or is_own(type(owner)) else name[:-1], n.func.value)
        self._enter_value(value, name, n, None if inside else name[:-1])

    # The functions.

    def _value(self, name: Name | None) -> Any:
        return _value_in(self._values, name) if name and name[0] else MISSING

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
        if isinstance(value, types.MethodType):
            own = (variable for variable, known in self._values.items() if known is value.__self__)
            value, owner = value.__func__, (next(own, ""),)
        elif isinstance(value, staticmethod | classmethod):
            owner = name[:-1] if isinstance(value, classmethod) and isinstance(self._value(name[:-1]), type) else None
            value = value.__func__
        elif value is not MISSING and not isinstance(value, types.FunctionType | type) and is_own(type(value)):
            value, owner = inspect.getattr_static(type(value), "__call__", None), name
        code = code_of(value) if isinstance(value, types.FunctionType) else None
        tree = tree_of(code.co_filename) if code is not None else None
        node = definition(tree, code) if tree is not None and code is not None else None
        if code is None or node is None:
            return
        names, known = dict[str, Name](), inspect.unwrap(value).__globals__
        if known.get("__name__") != self._values.get("__name__", "__main__"):  # another file's
            used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & known.keys()
            names = {variable: (str(known["__name__"]), f".{variable}") for variable in used}
        self._enter(node, _Scope(code.co_filename, names, self._root), self._given(node, call, owner))

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
        given = [*([owner] if owner is not None else []), *(self._name(argument) or _LOCAL for argument in arguments)]
        parameters = [p.arg for p in (*node.args.posonlyargs, *node.args.args)]
        keywords = {k.arg: self._name(k.value) or _LOCAL for k in (call.keywords if call else []) if k.arg}
        return {**dict(zip(parameters, given, strict=False)), **keywords}

    def _enter(self, node: Function, outer: _Scope, given: Mapping[str, Name]) -> None:
        if any(node is running for running in self._running) or self._done is None:
            return
        here, breaks = self._scope, self._breaks
        names = {**outer.names, **dict.fromkeys(own_names(node), _LOCAL), **given}
        self._scope, self._breaks = _Scope(outer.file, names, outer), []
        self._running.append(node)
        self._block(node.body if isinstance(node.body, list) else [node.body])
        self._running.pop()
        self._join([*self._scope.ends, self._done])
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
