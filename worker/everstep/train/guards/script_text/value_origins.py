"""Finds the origins of the values of expressions, for `loop_carried`: a set of names and of a few marks.

A name stands for a variable with its value from the step before; "?name" for one with a constant that is made once. The
marks: "*" comes from data, parameters or random numbers, and differs in each step. "#" is a function of the step's
number. "@groups" are an optimizer's groups of parameters, "@parameters" are parameters, and "@modules" are modules.
"""

from __future__ import annotations

import ast
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from everstep.train.guards.script_text.scripts import Called, Script
from everstep.train.guards.script_text.syntax_patterns import is_property, path_of, root_of

BUDGET = 30_000  # most nodes that are looked at, in a script with all its calls
Taint = frozenset[str]
Arguments = list[tuple[ast.expr, Taint]]
NONE: Taint = frozenset()
VARYING: Taint = frozenset({"*"})
NUMBER: Taint = frozenset({"#"})
GROUPS, PARAMETERS = frozenset({"@groups"}), frozenset({"@parameters", "*"})
MODULES = frozenset({"@modules"})
# Kinds of objects that `next` advances and no checkpoint holds.
ITERATORS = frozenset({
    "count", "cycle", "chain", "islice", "accumulate", "pairwise", "starmap", "takewhile", "zip_longest", "enumerate",
    "zip", "map", "filter", "generator", "list_iterator", "tuple_iterator", "range_iterator", "list_reverseiterator",
})  # fmt: skip
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
_SAVES = ("save", "save_pretrained", "save_checkpoint", "save_model", "save_state", "save_weights")
_COPIES = ("copy", "copy2", "copyfile", "move", "rename", "replace", "link", "symlink")  # of files
ENDS = "whether the loop ends"
FORWARD = "the forward pass"
DATA = "what the dataset gives, where it is read in this process (num_workers=0)"
DRAWN = "what is drawn at random"
_SEEDS = frozenset({"manual_seed", "manual_seed_all", "seed", "seed_all", "set_seed", "seed_everything"})
_ASKS = ("get_", "is_")  # names in torch.distributed for which no other rank has to answer
RETURNED = "what is returned"
STEPS = "Optimizer"  # the kind of all objects whose `step` changes the training: optimizers, schedules, scalers


@dataclass(slots=True)
class Scope:
    """The scope of a function in the walk: the names under which the loop knows its variables."""

    names: dict[str, str] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    of: Called | None = None
    returned: Taint = NONE
    loops: int = 0  # its own loops around the present statement
    inner: bool = False  # whether it is the scope of a call, and not the loop's own


class Spent(Exception):
    """Raised if the script is too large to be looked at."""


class Values:
    """Finds the origins of expressions at the present place of the walk."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.env: dict[str, Taint] = {}
        self.elements = set[str]()  # names that end with a constant key
        self.uses: list[tuple[Taint, str, int, str]] = []  # each with the line and, if it is another one, the file
        self.moved = set[str]()  # names that were read, and change by calls that the text does not show
        self._control: Taint = NONE  # the origins of the decision to reach the present statement
        self._scopes = [Scope()]
        self._spent = 0

    @abstractmethod
    def _assign(self, target: ast.expr, value: Taint, source: ast.AST | None) -> None: ...

    @abstractmethod
    def _mutate(self, key: str, value: Taint, line: int) -> None: ...

    @abstractmethod
    def _is_changed(self, key: str) -> bool: ...

    @abstractmethod
    def _enter(self, called: Called, arguments: Arguments, keywords: Mapping[str | None, Taint]) -> Taint: ...

    def _use(self, taint: Taint, what: str, line: int) -> None:
        plain = frozenset(t for t in taint if t[0] not in "?*#@")
        if plain:
            self.uses.append((plain, what, line, self._file))

    @property
    def _file(self) -> str:
        """The file of the present statement, if it is not the loop's."""
        of = self._scopes[-1].of
        return of.file if of is not None else ""

    def _test(self, e: ast.expr) -> Taint:
        """The origins of the test of a branch. There a flag counts with its value."""
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
            case ast.Subscript() if (key := self._key(e)) is not None and self._is_known(key):
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
        """The origins of a container with its elements that were written by a constant key."""
        value = self.env.get(key, NONE)
        if key not in self.env and self.script.known.moved(key) is not None:
            self.moved.add(key)
            value = frozenset({key})
        for k in self.elements:
            if k.startswith(f"{key}["):
                value |= self.env.get(k, NONE)
        return value

    def _is_known(self, key: str) -> bool:
        return key in self.env or self.script.known.moved(key) is not None

    def _all(self, parts: Iterable[ast.AST | None]) -> Taint:
        return frozenset[str]().union(*(self._value(part) for part in parts))

    def _attribute(self, e: ast.Attribute) -> Taint:
        if e.attr in _SHAPES:
            return NONE
        if e.attr == "param_groups":
            return GROUPS
        key = self._key(e)
        if key is not None and self._is_known(key):
            return self._whole(key)
        if e.attr in ("number", "step"):
            return NUMBER
        if (owner := self._key(e.value)) is not None and (method := self._method_of(owner, e.attr)) is not None:
            return self._enter(method, [], {}) if is_property(method.function) else NONE
        return self._value(e.value)

    def _call(self, e: ast.Call) -> Taint:
        path = path_of(e.func) or ""
        arguments = [(a, self._value(a)) for a in e.args]
        keywords = self._keywords(e)
        given = frozenset[str]().union(*(taint for _, taint in arguments), *keywords.values())
        for argument in (*e.args, *(k.value for k in e.keywords)):  # a closure may be called there
            if isinstance(argument, ast.Name) and (inner := self._function(argument.id)) is not None:
                given |= self._enter(inner, [], {})
        if path in _LEAVE:
            self._use(self._control, ENDS, e.lineno)
        if isinstance(e.func, ast.Attribute):
            return self._method(e, e.func, given, arguments, keywords)
        if not isinstance(e.func, ast.Name):
            return given | self._value(e.func)
        name = e.func.id
        if (called := self._function(name) or self._called(e.func)) is not None:
            return self._enter(called, arguments, keywords)
        if name == "len":  # the length of a tensor is a part of its shape; a list grows
            return frozenset(t for t in given if t[0] not in "*#@")
        if name in _SHAPES:
            return NONE
        if name == "getattr" and len(arguments) > 1 and isinstance(e.args[1], ast.Constant):
            source = ast.Attribute(e.args[0], str(e.args[1].value), ast.Load())
            return self._value(ast.copy_location(source, e)) | arguments[-1][1]
        given |= self._builtin(name, e, arguments, given)
        if name.endswith("_") and "@parameters" in given:
            self._use(given | self._control, "the parameters", e.lineno)
        varies = name not in self.script.imported or name.startswith((*_DRAWS, "next"))
        return given | self._value(e.func) | (VARYING if varies else NONE)

    def _builtin(self, name: str, e: ast.Call, arguments: Arguments, given: Taint) -> Taint:
        if name in _SEEDS:
            self._use(given | self._control, DRAWN, e.lineno)
        if name == "next" and arguments:
            self._advance(e.args[0])
            return self._value(e.args[0])
        if name == "setattr" and len(arguments) == 3 and isinstance(e.args[1], ast.Constant):
            target = ast.Attribute(e.args[0], str(e.args[1].value), ast.Store())
            self._assign(ast.copy_location(target, e), arguments[2][1], e.args[2])
        return NONE

    def _method(
        self,
        e: ast.Call,
        func: ast.Attribute,
        given: Taint,
        arguments: Arguments,
        keywords: Mapping[str | None, Taint],
    ) -> Taint:
        name, owner = func.attr, self._key(func.value)
        called = self._method_of(owner, name) if owner is not None else None
        if called is not None or (called := self._called(func)) is not None:
            return self._enter(called, arguments, keywords)
        if name in ("__next__", "send"):
            self._advance(func.value)
        receiver = self._value(func.value)
        if name in _SHAPES:
            return NONE
        if name in ("parameters", "named_parameters"):
            return PARAMETERS
        if name in ("modules", "named_modules", "children", "named_children"):
            return receiver | MODULES
        self._reach(name, receiver, given, path_of(func.value) or "", e.lineno)
        # Frozen and thawed parameters are part of the state (`switches`).
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if in_place and "@parameters" in receiver | given:
            self._use(given | self._control, "the parameters", e.lineno)
        elif (in_place or name in _MUTATE) and (root := self._root(func.value)) is not None:
            self._mutate(root, given, e.lineno)
        varies = name.startswith(_DRAWS) or name in ("state_dict", "item") or owner == "self"
        return receiver | given | (VARYING if varies else NONE)

    def _keywords(self, e: ast.Call) -> dict[str | None, Taint]:
        """The origins of keyword arguments. None stands for unknown elements of `**options`."""
        found: dict[str | None, Taint] = {}
        for k in e.keywords:
            value = self._value(k.value)
            key = self._key(k.value) if k.arg is None else None
            known = [n for n in self.elements if key is not None and n.startswith(f"{key}['")]
            found |= {n[len(f"{key}['") : -2]: self._whole(n) for n in known}
            if not known:
                found[k.arg] = found.get(k.arg, NONE) | value
        return found

    def _advance(self, e: ast.expr) -> None:
        key = self._key(e)
        if key is not None and self.script.kind(key) in ITERATORS:
            self._mutate(key, NONE, e.lineno)

    def _called(self, func: ast.expr) -> Called | None:
        """What runs in a call of an object of a class of the file, or of a function that the file does not show."""
        owner = self._key(func)
        if owner is None or "#" in owner:
            return None
        methods = (self._method_of(owner, name) for name in ("__call__", "forward"))
        return next((m for m in methods if m is not None), None) or self.script.known.called(owner)

    def _reach(self, name: str, receiver: Taint, given: Taint, path: str, line: int) -> None:
        """Note that this call changes what is trained, if its name says so."""
        if name in _SEEDS:
            self._use(given | self._control, DRAWN, line)
        elif name == "backward":
            self._use(receiver | given | self._control, "the gradients", line)
        elif name == "update" and "@groups" in receiver:
            self._use(given | self._control, "a hyperparameter", line)
        elif name == "load_state_dict":
            self._use(given | self._control, f"{path}.load_state_dict", line)
        elif name in _SAVES or (path in ("shutil", "os") and name in _COPIES):
            self._use(self._control, SAVED, line)
        elif path in ("dist", "torch.distributed") and not name.startswith(_ASKS):
            self._use(self._control, f"whether {path}.{name} is called", line)
        elif (name == "step" or name.startswith("step_")) and (self._key_kind(path) or STEPS) == STEPS:
            self._use(given | self._control, f"{path}.{name}()", line)

    def _decided(self, e: ast.expr) -> bool | None:
        """The result of a test in all steps, if the loop changes none of its variables."""
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
        if key is None or "#" in key or self.env.get(key) or self._is_changed(key) or self.script.known.moved(key):
            return ...
        return self.script.decided(key)

    def _function(self, name: str) -> Called | None:
        """A function of the same file, or of the function in the walk."""
        for scope in reversed(self._scopes):
            if name in scope.functions:
                # A closure of the function in the walk.
                return Called(scope.functions[name], names=self._scopes[-1].names)
        of = self._scopes[-1].of
        if of is not None and of.module:
            return of.sibling(name)
        found = self.script.functions.get(name)
        return Called(found, name=name) if found is not None else None

    def _key_kind(self, path: str) -> str | None:
        first = re.split(r"[.\[]", path, maxsplit=1)[0]
        return self.script.kind(self._scopes[-1].names.get(first, first) + path[len(first) :]) if path else None

    def _method_of(self, owner: str, name: str) -> Called | None:
        return self.script.method(owner, name) if "#" not in owner else None

    def _key(self, e: ast.expr) -> str | None:
        """The name under which the loop would write it."""
        path = path_of(e)
        if path is None:
            return None
        first = re.split(r"[.\[]", path, maxsplit=1)[0]
        return self._scopes[-1].names.get(first, first) + path[len(first) :]

    def _root(self, e: ast.expr) -> str | None:
        return self._key(root_of(e))

    def _spend(self) -> None:
        self._spent += 1
        if self._spent > BUDGET:
            raise Spent
