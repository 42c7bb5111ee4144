"""Walks through functions that a loop calls, with their arguments, closures and defaults."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Iterable, Mapping

from everstep.train.guards.script_text.scripts import Called, defaults_of, parameters_of
from everstep.train.guards.script_text.value_origins import NONE, Arguments, Scope, Taint, Values

DEPTH = 8  # levels of nested calls
_MADE = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.Call


class Calls(Values):
    """Handles calls of functions at the present place of the walk."""

    _calls: list[str]
    _made = 0

    @abstractmethod
    def _block(self, body: Iterable[ast.stmt]) -> None: ...

    def _enter(self, called: Called, arguments: Arguments, keywords: Mapping[str | None, Taint]) -> Taint:
        given = frozenset[str]().union(*(taint for _, taint in arguments), *keywords.values())
        function = called.function
        name = f"{called.module}.{function.name}"
        if len(self._calls) >= DEPTH or name in self._calls:
            return given
        # A closure belongs to the file that contains it.
        scope = Scope(inner=True, of=called if called.module or called.name else self._scopes[-1].of)
        scope.names |= called.names
        self._scopes.append(scope)
        self._calls.append(name)
        self._bind(called, arguments, keywords)
        self._block(function.body)
        self._calls.pop()
        self._scopes.pop()
        return scope.returned

    def _bind(self, called: Called, arguments: Arguments, keywords: Mapping[str | None, Taint]) -> None:
        function, scope = called.function, self._scopes[-1]
        caller = self._scopes[-2]
        keys = [self._key_in(caller, a) for a, _ in arguments]
        bound = self._bind_locals(function)
        names = parameters_of(function)
        missing = set(names)
        self._bind_self(called, len(arguments), names, missing)
        for name, of in called.given.items():
            if name in missing and name not in bound:
                scope.names[name] = of
                missing.discard(name)
                names.remove(name)
        rest = keywords.get(None, NONE)
        for i, (key, (argument, taint)) in enumerate(zip(keys, arguments, strict=True)):
            if isinstance(argument, ast.Starred) or i >= len(names):
                rest |= taint
                continue
            missing.discard(names[i])
            if key is not None and names[i] not in bound:
                scope.names[names[i]] = key
            else:
                self.env[scope.names[names[i]]] = taint
        kept = scope.names[function.args.kwarg.arg] if function.args.kwarg is not None else None
        for keyword, taint in keywords.items():
            if keyword in missing:
                missing.discard(keyword)
                self.env[scope.names[keyword]] = taint
            elif kept is not None and keyword is not None:
                self.env[f"{kept}[{keyword!r}]"] = taint
                self.elements.add(f"{kept}[{keyword!r}]")
        others = (function.args.vararg, function.args.kwarg)
        for name in (*(other.arg for other in others if other is not None), *(missing if rest else ())):
            self.env[scope.names[name]] = rest
        self._bind_defaults(called, missing, bound)

    def _bind_self(self, called: Called, passed: int, names: list[str], missing: set[str]) -> None:
        """Take the object of a method call from the `names` to which the arguments are bound."""
        scope = self._scopes[-1]
        if called.owner and names:
            missing.discard(names[0])
            scope.names[names.pop(0)] = called.owner
        elif names and names[0] == "self":  # the object has no name here
            scope.names["self"] = f"{called.function.name}#{self._made}.self"
            if passed < len(names):  # otherwise it is passed: `Class.method(object, …)`
                missing.discard(names.pop(0))

    def _bind_defaults(self, called: Called, missing: set[str], bound: set[str]) -> None:
        """Bind defaults. A list or dictionary as default is made once, with the function; another variable stands for
        itself."""
        scope = self._scopes[-1]
        for name, default in defaults_of(called.function):
            if name not in missing or name in bound:
                continue
            if isinstance(default, _MADE) and called.name:
                scope.names[name] = f"{called.name}.{name}"
            elif (key := self._key_in(self._scopes[0], default)) is not None and not called.module:
                scope.names[name] = key

    def _key_in(self, scope: Scope, e: ast.expr) -> str | None:
        """The variable's name in the loop, or in the function of `scope`."""
        self._scopes.append(scope)
        key = self._key(e)
        self._scopes.pop()
        return key

    def _bind_locals(self, function: ast.FunctionDef) -> set[str]:
        """Bind the function's own variables, which each call has for itself."""
        self._made += 1
        shared = {n for node in ast.walk(function) if isinstance(node, ast.Global | ast.Nonlocal) for n in node.names}
        bound = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        a = function.args
        own = {*parameters_of(function), *(other.arg for other in (a.vararg, a.kwarg) if other is not None)}
        for name in (bound | own) - shared - {"self"}:
            self._scopes[-1].names[name] = f"{function.name}#{self._made}.{name}"
        return bound
