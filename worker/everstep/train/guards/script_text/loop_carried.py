"""Finds loop-carried variables in a script's text: plain variables whose values go from one step to the next and affect
training.

A number, a list or a flag that the loop changes and reads again in the next step is in no checkpoint: a new process has
its value from before the loop. This walks through the body of the loop as it would run, once for each branch, with the
functions and methods of the same file that it calls. It notes for each name from which variables of the step before its
value comes. It reports only variables that affect the gradients, a hyperparameter, the parameters, a schedule, the end
of the loop, or what the script itself saves. It does not report values that are only printed or summed up for a log,
constants made in the first step, and variables that each step binds again before it reads them.

It is pure: it turns a syntax tree into findings. It skips what it does not understand, because a finding has to be
nearly certain.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from everstep.train.guards.script_text.caches import Caches
from everstep.train.guards.script_text.calls import Calls
from everstep.train.guards.script_text.changes import Change, behind, states_of
from everstep.train.guards.script_text.scripts import Called, Script, parameters_of
from everstep.train.guards.script_text.syntax_patterns import or_itself, path_of
from everstep.train.guards.script_text.value_origins import (
    DATA,
    DRAWN,
    ENDS,
    FORWARD,
    ITERATORS,
    NONE,
    NUMBER,
    RETURNED,
    VARYING,
    Scope,
    Spent,
    Taint,
)

# Kinds of values with which the loop begins. Tensors, modules and their containers are watched while they train
# (`untracked_state`).
PLAIN = frozenset({
    "int", "float", "bool", "str", "NoneType", "list", "tuple", "dict", "set", "deque", "defaultdict", "Counter",
})  # fmt: skip
_HARM = (
    "the gradients",
    "the parameters",
    "load_state_dict",
    "a hyperparameter",
    FORWARD,
    DRAWN,
    "step",
    "whether",
    RETURNED,
)


@dataclass(frozen=True, slots=True)
class LoopCarried:
    """The loop changes `name` in `line`, and `use` in line `at` depends on the value from the step before. `bound`: the
    loop gives the name to another object. `counts`: it is the index of an enumeration of steps."""

    name: str
    line: int
    use: str
    at: int
    bound: bool = True
    counts: bool = False
    file: str = ""  # the file of `line`, if it is not the loop's
    at_file: str = ""
    own: bool = False  # it comes from data, and each rank has its own
    hidden: bool = False  # no line that the loop is seen to reach changes it


def loop_carried(
    script: Script,
    loop: ast.stmt,
    begin: Mapping[str, Taint] | None = None,
    also: Collection[tuple[ast.FunctionDef, str]] = (),
) -> list[LoopCarried]:
    """The findings for a loop over steps, or for a function that takes one step, in the order of names. `begin`: what
    else is known. `also`: functions that are called between two steps, and for methods the name of their object."""
    walk = _Walk(script, begin or {}, (), frozenset())
    try:
        walk.run(loop, also)
        names = {n for n in walk.changes if _is_plain(script, n)} | walk.counts
        flags: frozenset[str] = frozenset()
        for _ in range(2):
            walk = _Walk(script, begin or {}, names, flags)
            walk.run(loop, also)
            flags = frozenset(names - states_of(walk.changes) - walk.counts)
    except (Spent, RecursionError):
        return [] if script.alone else loop_carried(script.without_others(), loop, begin, also)
    told = {script.known.moved(name) for name in walk.changes}  # a line may change it under another name
    hidden = {name for name in walk.moved if script.known.moved(name) not in told}
    names |= hidden
    found: dict[str, LoopCarried] = {}
    for taint, use, at, file in sorted(walk.uses, key=lambda u: harm(u[1])):
        for name in sorted(behind(taint, walk.changes) & names):
            change = walk.changes.get(name, Change(at, file))
            if not change.made:
                counts = name in walk.counts
                one = LoopCarried(
                    name, change.line, use, at, change.bound or name in hidden, counts, change.file, file,
                    "*" in change.kept, name in hidden,
                )  # fmt: skip
                found.setdefault(name, one)
    return sorted(found.values(), key=lambda f: (harm(f.use), f.name))


def _is_plain(script: Script, name: str) -> bool:
    """Whether it is a plain value, an element that a dictionary of plain values does not have yet, or a missing
    attribute of a function."""
    kind = script.kind(name)
    owner, dot, _ = name.rpartition(".")
    if kind is None and name.endswith("]"):
        kind = script.kind(name[: name.rindex("[")])
    elif kind is None and dot and script.kind(owner) == "function":
        return True
    return kind in PLAIN | ITERATORS


def harm(use: str) -> int:
    """The harm of a finding: effects on gradients or parameters are lost for good, but what the script saves can be
    saved again."""
    return next((i for i, what in enumerate(_HARM) if what in use), len(_HARM))


class _Walk(Calls, Caches):
    """The walk. `names`: the variables that the loop changes. `flags`: those of them that hold a constant, made
    once."""

    def __init__(self, script: Script, begin: Mapping[str, Taint], names: Iterable[str], flags: frozenset[str]) -> None:
        super().__init__(script)
        self._flags = flags
        self.env |= begin
        self.env |= {n: frozenset({f"?{n}" if n in flags else n}) for n in names}
        self.elements |= {n for n in names if n.endswith("]")}
        self.changes: dict[str, Change] = {}
        self.counts = set[str]()  # indices of an enumeration of steps
        self._calls = []
        self._attributes: dict[str, tuple[str, int, str]] = {}  # of modules and datasets, read elsewhere
        self._inside = False  # whether the walk is inside a step, whose batch was read before

    def run(self, loop: ast.stmt, also: Iterable[tuple[ast.FunctionDef, str]]) -> None:
        match loop:
            case ast.For():
                self._loop_target(loop)
                self._block(loop.body)
            case ast.While():
                self._block(loop.body)
            case ast.FunctionDef():
                self._inside = True
                self._scopes.append(Scope(inner=True))
                self._bind_locals(loop)
                for parameter in parameters_of(loop):
                    if parameter != "self":
                        self._write(self._scopes[-1].names[parameter], VARYING, loop.lineno)
                self._block(loop.body)
                self._scopes.pop()
        for function, owner in also:
            self._enter(Called(function, owner), [], dict.fromkeys(parameters_of(function), VARYING))
        for key, use in self._attributes.items():  # with their values at the next step
            self.uses.append((self.env.get(key, NONE), *use))

    def _loop_target(self, loop: ast.For) -> None:
        call, target = loop.iter, loop.target
        if isinstance(call, ast.Call) and path_of(call.func) == "enumerate" and isinstance(target, ast.Tuple):
            index, target = target.elts
            if isinstance(index, ast.Name):
                self.counts.add(index.id)
                self.env[index.id] = frozenset({index.id})
        nested = isinstance(call, ast.Call) and (path_of(call.func) or "").endswith("epochs")
        self._assign(target, NUMBER if nested else VARYING, None)

    # Statements.

    def _block(self, body: Iterable[ast.stmt]) -> None:
        before = self._control
        for statement in body:
            self._statement(statement)
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Continue | ast.Return):
                self._control |= self._left_by(statement)
        self._control = before

    def _left_by(self, s: ast.If) -> Taint:
        """The origins of the decision whether the rest of the block is reached."""
        return NONE if self._decided(s.test) is not None else self._test(s.test)

    def _statement(self, s: ast.stmt) -> None:  # noqa: PLR0912
        self._spend()
        match s:
            case ast.Expr():
                self._value(s.value)
            case ast.Assign():
                for target in s.targets:
                    self._assign_to(target, s.value)
            case ast.AnnAssign(value=ast.expr() as source):
                self._assign_to(s.target, source)
            case ast.AugAssign():
                self._augment(s)
            case ast.If():
                self._branches(s)
            case ast.For():
                self._for(s)
            case ast.While():
                with self._under(self._test(s.test)), self._in_loop():
                    self._twice(s.body)
            case ast.With():
                for item in s.items:
                    value = self._value(item.context_expr)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, value, None)
                before, self._inside = self._inside, True
                self._block(s.body)
                self._inside = before
            case ast.Try():
                self._block(s.body)
                for handler in s.handlers:
                    self._either(NONE, handler.body, [])
                self._block((*s.orelse, *s.finalbody))
            case ast.Match():
                test = self._test(s.subject)
                for case in s.cases:
                    self._either(test, case.body, [])
            case ast.Break() if not self._scopes[-1].inner and not self._scopes[-1].loops:
                self._use(self._control, ENDS, s.lineno)
            case ast.Return():
                self._return(s)
            case ast.FunctionDef():
                self._scopes[-1].functions[s.name] = s
            case _:
                pass

    def _return(self, s: ast.Return) -> None:
        value = self._value(s.value)
        scope = self._scopes[-1]
        scope.returned |= value | self._control
        if not scope.inner:
            self._use(self._control, ENDS, s.lineno)
        elif not self._calls:
            self._use(value | self._control, RETURNED, s.lineno)

    def _for(self, s: ast.For) -> None:
        """Walk a loop as if it ran once at least: an empty one is rare, and all of its variables would seem to be
        carried."""
        of = path_of(s.iter.func) if isinstance(s.iter, ast.Call) else path_of(s.iter)
        value = self._value(s.iter)
        for part in ast.walk(s.iter):
            if isinstance(part, ast.Name | ast.Attribute):
                self._advance(part)
        if not value and of != "range" and self.script.kind(of or "") not in ("list", "tuple", "dict"):
            value = VARYING
        if (of or "").endswith(".steps"):
            self._loop_target(s)
        else:
            self._assign(s.target, value, None)
        with self._in_loop():
            self._twice(s.body)
        self._block(s.orelse)

    def _twice(self, body: list[ast.stmt]) -> None:
        self._block(body)
        self._block(body)

    def _branches(self, s: ast.If) -> None:
        test = self._test(s.test)
        said = self._decided(s.test)
        if said is not None or self._is_of_current(s):
            self._block(s.orelse if said is False else s.body)
        else:
            self._either(test, s.body, s.orelse)

    def _either(self, test: Taint, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        before = dict(self.env)
        with self._under(test):
            self._block(body)
            taken, self.env = self.env, before
            self._block(orelse)
        for name in taken.keys() | self.env.keys():
            self.env[name] = taken.get(name, NONE) | self.env.get(name, NONE)

    @contextmanager
    def _under(self, test: Taint) -> Iterator[None]:
        before = self._control
        self._control = before | test
        yield
        self._control = before

    @contextmanager
    def _in_loop(self) -> Iterator[None]:
        self._scopes[-1].loops += 1
        yield
        self._scopes[-1].loops -= 1

    # Changes of variables.

    def _assign_to(self, target: ast.expr, value: ast.expr) -> None:
        if (
            isinstance(target, ast.Tuple | ast.List)
            and isinstance(value, ast.Tuple | ast.List)
            and len(target.elts) == len(value.elts)
        ):
            taints = [self._value(v) for v in value.elts]
            for t, taint, v in zip(target.elts, taints, value.elts, strict=True):
                self._assign(t, taint, v)
        else:
            self._assign(target, self._value(value), value)

    def _augment(self, s: ast.AugAssign) -> None:
        target = s.target
        held = ast.Name(target.id, ast.Load()) if isinstance(target, ast.Name) else target
        value = self._value(held) | self._value(s.value)
        self._assign(target, value, None)
        if (key := self._key(target)) is not None and key in self.changes:
            self.changes[key].state = True

    def _assign(self, target: ast.expr, value: Taint, source: ast.AST | None) -> None:
        match target:
            case ast.Tuple() | ast.List():
                for t in target.elts:
                    self._assign(t, value, None)
            case ast.Starred():
                self._assign(target.value, value, None)
            case ast.Name():
                self._write(self._scopes[-1].names.get(target.id, target.id), value, target.lineno, source)
            case ast.Attribute() if (key := self._key(target)) is not None:
                if "@parameters" in self._value(target.value):
                    self._use(value | self._control, "the parameters", target.lineno)
                self._write(key, value, target.lineno, source)
                self._set_of_module(target, key, value)
            case ast.Subscript():
                held = self._value(target.value)
                if "@groups" in held:
                    if value or not self._is_once(value):
                        self._use(value | self._control, "a hyperparameter", target.lineno)
                elif "@parameters" in held:
                    self._use(value | self._control, "the parameters", target.lineno)
                elif (key := self._key(target)) is not None:
                    self._write(key, value, target.lineno, source)
                elif (root := self._root(target)) is not None and not self._is_memo(target, source):
                    self._mutate(root, value | self._value(target.slice), target.lineno)

    def _set_of_module(self, target: ast.Attribute, key: str, value: Taint) -> None:
        """Attributes of a module: its switches are part of the state. `check_modules` looks at attributes that the
        module sets itself."""
        own = isinstance(target.value, ast.Name) and target.value.id == "self"
        if (own and any(name.endswith(".forward") for name in self._calls)) or target.attr in (
            "training",
            "requires_grad",
        ):
            return
        holder = self._key(target.value) or ""
        if self.script.known.gives_by(holder, target.attr):
            self._attributes[key] = DATA, target.lineno, self._file
            if self._inside and (value or self._control):
                self.uses.append((frozenset({key}), *self._attributes[key]))
            return
        if self.script.known.computes_with(holder, target.attr):
            self._attributes.setdefault(key, (FORWARD, target.lineno, self._file))
        elif "@modules" not in self._value(target.value):
            return
        self._use(value | self._control, FORWARD, target.lineno)

    def _write(self, key: str, value: Taint, line: int, source: ast.AST | None = None) -> None:
        """Note a change of a variable. A constant that is made once in the first step does not depend on what decided
        to make it."""
        change = self._change(key, value - {key, f"?{key}"} if or_itself(source, key) else value, line)
        change.bound |= source is not None
        change.made |= isinstance(source, ast.Call) and (path_of(source.func) or "").rpartition(".")[2][:1].isupper()
        self.env[key] = value if self._is_once(value) else value | self._control
        if key.endswith("]"):
            self.elements.add(key)
        for part in [k for k in self.env if k.startswith((f"{key}.", f"{key}["))]:
            del self.env[part]

    def _is_once(self, value: Taint) -> bool:
        return not value & VARYING and all(t in self._flags or t == "#" for t in self._control)

    def _mutate(self, key: str, value: Taint, line: int) -> None:
        self._change(key, value, line).state = True
        for part in (key, *(k for k in self.env if k.startswith(f"{key}["))):
            self.env[part] = self.env.get(part, NONE) | value | self._control

    def _change(self, key: str, value: Taint, line: int) -> Change:
        change = self.changes.setdefault(key, Change(line, self._file))
        change.kept |= frozenset(t.lstrip("?") for t in value if t[0] not in "#@")
        change.control |= frozenset(t for t in self._control if t[0] not in "#@")
        return change

    def _is_changed(self, key: str) -> bool:
        return key in self.changes
