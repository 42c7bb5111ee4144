"""What the values of expressions come from, for `carried`: a set of names, and of a few marks.

A name is a variable's as the step before left it; "?name" one that holds a constant which is made once. The marks: "*"
comes from data, parameters or random numbers and is another one in each step; "#" is a function of the step's number;
"@groups" are an optimizer's groups of parameters, "@parameters" are parameters.
"""

from __future__ import annotations

import ast
import builtins
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

BUDGET = 30_000  # nodes that are looked at, of a script with all its calls
Taint = frozenset[str]
Arguments = list[tuple[ast.expr, Taint]]
NONE: Taint = frozenset()
VARYING: Taint = frozenset({"*"})
NUMBER: Taint = frozenset({"#"})
GROUPS, PARAMETERS = frozenset({"@groups"}), frozenset({"@parameters", "*"})
_SHAPES = frozenset({
    "shape", "size", "device", "dtype", "ndim", "numel", "dim", "completed", "new_zeros", "new_ones", "new_empty",
    "zeros_like", "ones_like", "empty_like", "isinstance", "hasattr", "len", "type", "id", "callable", "world_size",
})  # fmt: skip
_DRAWS = ("rand", "normal", "uniform", "choice", "shuffle", "sample", "bernoulli", "multinomial", "deepcopy", "clone")
_MUTATE = frozenset({
    "append", "appendleft", "extend", "add", "update", "insert", "pop", "popleft", "remove", "clear", "setdefault",
    "discard", "popitem", "rotate", "sort", "reverse",
})  # fmt: skip
_LEAVE = frozenset({"sys.exit", "exit", "quit", "os._exit"})
SAVED = "what is saved"
ENDS = "whether the loop ends"
RETURNED = "what is returned"
STEPS = "Optimizer"  # the kind of all that moves training by its `step`: optimizers, schedules, scalers


class Script:
    """A file of the script's. `kind(name)`: the name of the class of what `name` ("best", "self.best") is before the
    loop; None if there is no such thing. `decided(test)`: what a test says that only constants are in, as far as can be
    told."""

    def __init__(
        self,
        tree: ast.Module,
        kind: Callable[[str], str | None],
        decided: Callable[[str], Any] = lambda _: ...,
    ) -> None:
        self.functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        self.classes = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
        self.asked = set(_asked(tree))
        self._assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign)]
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        self.known = (
            {a.asname or a.name for n in imports for a in n.names} | self.classes.keys() | vars(builtins).keys()
        )
        self.kind = kind
        self.decided = decided

    def source(self, e: ast.expr) -> ast.expr:
        """What a name stands for that is assigned once in the file; else itself."""
        found = [n.value for n in self._assigned if isinstance(e, ast.Name) and e.id in map(path_of, n.targets)]
        return found[0] if len(found) == 1 else e

    def method(self, kind: str | None, name: str) -> ast.FunctionDef | None:
        """Of a class of the file, or of the first of its bases there that has it."""
        held, seen = self.classes.get(kind or ""), set[str]()
        while held is not None and held.name not in seen:
            seen.add(held.name)
            for n in held.body:
                if isinstance(n, ast.FunctionDef) and n.name == name:
                    return None if any(path_of(d) in ("staticmethod", "classmethod") for d in n.decorator_list) else n
            held = next((self.classes[b] for b in map(path_of, held.bases) if b in self.classes), None)
        return None


@dataclass(slots=True)
class Scope:
    """Of a function that is walked through: the names under which the loop knows its variables."""

    names: dict[str, str] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    returned: Taint = NONE
    loops: int = 0  # of its own, around the statement in hand
    inner: bool = False  # a call's, not the loop's own


class Spent(Exception):
    """The script is too large to be looked at."""


class Values:
    """Of expressions, where the walk stands."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.env: dict[str, Taint] = {}
        self.elements = set[str]()  # names in it that end with a constant key
        self.uses: list[tuple[Taint, str, int]] = []
        self._control: Taint = NONE  # what decides whether the statement in hand is reached
        self._scopes = [Scope()]
        self._spent = 0

    @abstractmethod
    def _assign(self, target: ast.expr, value: Taint, source: ast.AST | None) -> None: ...

    @abstractmethod
    def _mutate(self, key: str, value: Taint, line: int) -> None: ...

    @abstractmethod
    def _is_changed(self, key: str) -> bool: ...

    @abstractmethod
    def _enter(
        self, function: ast.FunctionDef, arguments: Arguments, keywords: Mapping[str | None, Taint], owner: str
    ) -> Taint: ...

    def _use(self, taint: Taint, what: str, line: int) -> None:
        plain = frozenset(t for t in taint if t[0] not in "?*#@")
        if plain:
            self.uses.append((plain, what, line))

    def _test(self, e: ast.expr) -> Taint:
        """What decides a branch: there a flag counts for what it says."""
        return frozenset(t.lstrip("?") for t in self._value(e) if t[0] != "@")

    def _value(self, e: ast.AST | None) -> Taint:
        self._spend()
        match e:
            case None | ast.Constant():
                return NONE
            case ast.Name():
                return self._whole(self._scopes[-1].names.get(e.id, e.id))
            case ast.Attribute():
                return self._attribute(e)
            case ast.Subscript() if (key := self._key(e)) is not None and key in self.env:
                return self._whole(key)
            case ast.Call():
                return self._call(e)
            case ast.Lambda():
                return self._value(e.body)
            case ast.IfExp():
                return self._test(e.test) | self._value(e.body) | self._value(e.orelse)
            case ast.NamedExpr():
                value = self._value(e.value)
                self._assign(e.target, value, e.value)
                return value
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for part in e.generators:
                    self._assign(part.target, self._value(part.iter), None)
                parts = (e.key, e.value) if isinstance(e, ast.DictComp) else (e.elt,)
                return self._all((*parts, *(test for part in e.generators for test in part.ifs)))
            case ast.Compare():
                exact = any(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in e.ops)
                value = self._all((e.left, *e.comparators))
                return value | VARYING if exact and "#" in value else value
            case ast.BinOp():
                value = self._value(e.left) | self._value(e.right)
                return value | VARYING if isinstance(e.op, ast.Mod) and "#" in value else value
        return self._all(ast.iter_child_nodes(e))

    def _whole(self, key: str) -> Taint:
        """With its elements that were written to by a constant key."""
        value = self.env.get(key, NONE)
        for k in self.elements:
            if k.startswith(f"{key}["):
                value |= self.env.get(k, NONE)
        return value

    def _all(self, parts: Iterable[ast.AST | None]) -> Taint:
        return frozenset[str]().union(*(self._value(part) for part in parts))

    def _attribute(self, e: ast.Attribute) -> Taint:
        if e.attr in _SHAPES:
            return NONE
        if e.attr == "param_groups":
            return GROUPS
        key = self._key(e)
        if key is not None and key in self.env:
            return self._whole(key)
        if e.attr in ("number", "step"):
            return NUMBER
        if (owner := self._key(e.value)) is not None and (method := self._method_of(owner, e.attr)) is not None:
            return self._enter(method, [], {}, owner) if _is_property(method) else NONE
        return self._value(e.value)

    def _call(self, e: ast.Call) -> Taint:
        path = path_of(e.func) or ""
        arguments = [(a, self._value(a)) for a in e.args]
        keywords = {k.arg: self._value(k.value) for k in e.keywords}
        given = frozenset[str]().union(*(taint for _, taint in arguments), *keywords.values())
        for argument in (*e.args, *(k.value for k in e.keywords)):  # a closure that is called there
            if isinstance(argument, ast.Name) and (inner := self._function(argument.id)) is not None:
                given |= self._enter(inner, [], {}, "")
        if path in _LEAVE:
            self._use(self._control, ENDS, e.lineno)
        if isinstance(e.func, ast.Attribute):
            return self._method(e, e.func, given, arguments, keywords)
        if not isinstance(e.func, ast.Name):
            return given | self._value(e.func)
        name = e.func.id
        if (function := self._function(name)) is not None:
            return self._enter(function, arguments, keywords, "")
        if (called := self._called(e.func)) is not None:
            return self._enter(called[1], arguments, keywords, called[0])
        if name in _SHAPES:
            return NONE
        if name.endswith("_") and "@parameters" in given:
            self._use(given | self._control, "the parameters", e.lineno)
        varies = name not in self.script.known or name.startswith((*_DRAWS, "next"))
        return given | self._value(e.func) | (VARYING if varies else NONE)

    def _method(
        self,
        e: ast.Call,
        func: ast.Attribute,
        given: Taint,
        arguments: Arguments,
        keywords: Mapping[str | None, Taint],
    ) -> Taint:
        name, owner = func.attr, self._key(func.value)
        if owner is not None and (method := self._method_of(owner, name)) is not None:
            return self._enter(method, arguments, keywords, owner)
        if (called := self._called(func)) is not None:
            return self._enter(called[1], arguments, keywords, called[0])
        receiver = self._value(func.value)
        if name in _SHAPES:
            return NONE
        if name in ("parameters", "named_parameters"):
            return PARAMETERS
        self._reach(name, receiver, given, path_of(func.value) or "", e.lineno)
        # What is frozen or thawed is part of the state (`switches`).
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if in_place and "@parameters" in receiver | given:
            self._use(given | self._control, "the parameters", e.lineno)
        elif (in_place or name in _MUTATE) and (root := self._root(func.value)) is not None:
            self._mutate(root, given, e.lineno)
        varies = name.startswith(_DRAWS) or name in ("state_dict", "item") or owner == "self"
        return receiver | given | (VARYING if varies else NONE)

    def _called(self, func: ast.expr) -> tuple[str, ast.FunctionDef] | None:
        """An object of a class of the file, and what runs when it is called."""
        owner = self._key(func)
        for name in ("__call__", "forward") if owner is not None else ():
            if owner is not None and (method := self._method_of(owner, name)) is not None:
                return owner, method
        return None

    def _reach(self, name: str, receiver: Taint, given: Taint, path: str, line: int) -> None:
        """What is trained is moved by this call, if its name says so."""
        if name == "backward":
            self._use(receiver | given | self._control, "the gradients", line)
        elif name == "update" and "@groups" in receiver:
            self._use(given | self._control, "a hyperparameter", line)
        elif name == "load_state_dict":
            self._use(given | self._control, f"{path}.load_state_dict", line)
        elif name in ("save", "save_pretrained", "save_checkpoint"):
            self._use(self._control, SAVED, line)
        elif path in ("dist", "torch.distributed"):
            self._use(self._control, f"whether {path}.{name} is called", line)
        elif name == "step" and (self._key_kind(path) or STEPS) == STEPS:
            self._use(given | self._control, f"{path}.step()", line)

    def _decided(self, e: ast.expr) -> bool | None:
        """What a test says in all steps, if nothing that it asks for is changed by the loop."""
        match e:
            case ast.BoolOp():
                said = {self._decided(v) for v in e.values}
                short = isinstance(e.op, ast.Or)
                return short if short in said else None if None in said else not short
            case ast.UnaryOp(op=ast.Not()):
                inner = self._decided(e.operand)
                return None if inner is None else not inner
            case ast.Compare(ops=[op], comparators=[right]):
                a, b = self._constant(e.left), self._constant(right)
                if a is ... or b is ...:
                    return None
                match op:
                    case ast.Eq() | ast.Is():
                        return bool(a == b)
                    case ast.NotEq() | ast.IsNot():
                        return bool(a != b)
                    case ast.In() | ast.NotIn() if isinstance(a, str) and isinstance(b, str):
                        return (a in b) == isinstance(op, ast.In)
                return None
        value = self._constant(e)
        return None if value is ... else bool(value)

    def _constant(self, e: ast.expr) -> object:
        if isinstance(e, ast.Constant):
            return e.value
        key = self._key(e)
        if key is None or "#" in key or self.env.get(key) or self._is_changed(key):
            return ...
        return self.script.decided(key)

    def _is_memo(self, target: ast.Subscript, source: ast.AST | None) -> bool:
        """Whether it keeps, behind `if key not in kept:`, what follows from the key: a new process makes it again."""
        asked = (ast.unparse(target.slice), ast.unparse(target.value))
        if asked not in self.script.asked or not isinstance(source, ast.expr):
            return False
        source = self.script.source(source)
        parts = {ast.unparse(n) for n in ast.walk(source) if isinstance(n, ast.expr)}
        if asked[0] not in parts or asked[1] in parts:
            return False  # that it is there says something by itself; or it follows from what was there
        before = dict(self.env)
        for part in ast.walk(target.slice):
            if isinstance(part, ast.expr) and (key := self._key(part)) is not None:
                self.env[key] = NONE
        follows = not self._value(source)
        self.env = before
        return follows

    def _function(self, name: str) -> ast.FunctionDef | None:
        """Of the same file, or of the function that is walked through."""
        found = (s.functions[name] for s in reversed(self._scopes) if name in s.functions)
        return next(found, self.script.functions.get(name))

    def _key_kind(self, path: str) -> str | None:
        first = re.split(r"[.\[]", path, maxsplit=1)[0]
        return self.script.kind(self._scopes[-1].names.get(first, first) + path[len(first) :]) if path else None

    def _method_of(self, owner: str, name: str) -> ast.FunctionDef | None:
        return self.script.method(self.script.kind(owner), name) if "#" not in owner else None

    def _key(self, e: ast.expr) -> str | None:
        """The name under which the loop would write it."""
        path = path_of(e)
        if path is None:
            return None
        first = re.split(r"[.\[]", path, maxsplit=1)[0]
        return self._scopes[-1].names.get(first, first) + path[len(first) :]

    def _root(self, e: ast.expr) -> str | None:
        while isinstance(e, ast.Subscript) and self._key(e) is None:
            e = e.value
        return self._key(e)

    def _spend(self) -> None:
        self._spent += 1
        if self._spent > BUDGET:
            raise Spent


def _asked(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Keys and containers, as written, where a file finds out whether the key is there."""
    for n in ast.walk(tree):
        match n:
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[container]):
                yield ast.unparse(key), ast.unparse(container)
            case ast.Call(func=ast.Attribute(value=container, attr="get"), args=[key, *_]):
                yield ast.unparse(key), ast.unparse(container)
            case ast.Try(handlers=[ast.ExceptHandler(type=ast.Name(id="KeyError"))]):
                reads = (part for s in n.body for part in ast.walk(s) if isinstance(part, ast.Subscript))
                yield from ((ast.unparse(part.slice), ast.unparse(part.value)) for part in reads)


def _is_property(method: ast.FunctionDef) -> bool:
    return any((path_of(d) or "").endswith("property") for d in method.decorator_list)


def or_itself(source: ast.AST | None, key: str) -> bool:
    """Whether it is what it was, or something else: `x = x or 1`."""
    match source:
        case ast.BoolOp(values=operands):
            pass
        case ast.IfExp():
            operands = [source.body, source.orelse]
        case _:
            return False
    others = [o for o in operands if path_of(o) != key]
    return len(others) < len(operands) and not any(path_of(n) == key for o in others for n in ast.walk(o))


def path_of(e: ast.AST) -> str | None:
    """ "a.b['c']", if it is written so."""
    match e:
        case ast.Name():
            return e.id
        case ast.Attribute():
            owner = path_of(e.value)
            return None if owner is None else f"{owner}.{e.attr}"
        case ast.Subscript(slice=ast.Constant(value=str() | int() as key)):
            owner = path_of(e.value)
            return None if owner is None else f"{owner}[{key!r}]"
    return None
