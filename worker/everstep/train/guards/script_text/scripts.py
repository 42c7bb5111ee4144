"""A file of the script's for `loop_carried` to walk through, and what can be asked of its variables. Pure."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from everstep.train.guards.script_text.syntax_patterns import asked_for, path_of


@dataclass(frozen=True, slots=True)
class Called:
    """A function of a script's, and the names under which the loop knows its free variables. `owner`: of a method, what
    it is called on. `name`: what it is called by, if that lives longer than the loop; its defaults live with it.
    `module`: of another file, whose globals have this in front of their names; `file` is the file's name."""

    function: ast.FunctionDef
    owner: str = ""
    name: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    module: str = ""
    file: str = ""
    functions: Mapping[str, ast.FunctionDef] = field(default_factory=dict)  # of that file
    given: Mapping[str, str] = field(default_factory=dict)  # parameters that it was bound with before (`partial`)

    def sibling(self, name: str) -> Called | None:
        """A function of the same other file."""
        found = self.functions.get(name)
        if found is None:
            return None
        names = globals_of(found, self.module)
        return Called(found, "", f"{self.module}.{name}", names, self.module, self.file, self.functions)


class Unknown:
    """What is known of the script's variables: nothing."""

    def called(self, name: str, method: str = "") -> Called | None:
        """What runs when `name` is called, or its method: a function that the text of the file does not tell."""
        del name, method
        return None

    def is_frozen(self, name: str) -> bool:
        """Whether `name` is a module that computes the same in all steps."""
        del name
        return False

    def computes_with(self, name: str, attribute: str) -> bool:
        """Whether `name` is a module whose forward pass may depend on this plain attribute."""
        del name, attribute
        return False

    def gives_by(self, name: str, attribute: str) -> bool:
        """Whether `name` is a dataset that is trained on, whose samples may depend on this plain attribute."""
        del name, attribute
        return False


class Script:
    """A file of the script's. `kind(name)`: the name of the class of what `name` ("best", "self.best") is before the
    loop; None if there is no such thing. `decided(test)`: what a test says that only constants are in, as far as can be
    told."""

    def __init__(
        self,
        tree: ast.Module,
        kind: Callable[[str], str | None],
        decided: Callable[[str], object] = lambda _: ...,
        known: Unknown | None = None,
    ) -> None:
        self._tree = tree
        self.functions = functions_of(tree)
        self.classes = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
        self.asked = set(asked_for(tree))
        self._assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign)]
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        self.imported = (
            {a.asname or a.name for n in imports for a in n.names} | self.classes.keys() | vars(builtins).keys()
        )
        self.kind = kind
        self.decided = decided
        self.known = known or Unknown()

    @property
    def alone(self) -> bool:
        return type(self.known) is Unknown

    def without_others(self) -> Script:
        """The file alone, where there is too much to be looked at."""
        return Script(self._tree, self.kind, self.decided)

    def source(self, e: ast.expr) -> ast.expr:
        """What a name stands for that is assigned once in the file; else itself."""
        found = [n.value for n in self._assigned if isinstance(e, ast.Name) and e.id in map(path_of, n.targets)]
        return found[0] if len(found) == 1 else e

    def method(self, owner: str, name: str) -> Called | None:
        """Of a class of the file, or of the first of its bases there that has it; or as far as is known otherwise."""
        held, seen = self.classes.get(self.kind(owner) or ""), set[str]()
        while held is not None and held.name not in seen:
            seen.add(held.name)
            for n in held.body:
                if isinstance(n, ast.FunctionDef) and n.name == name:
                    return None if is_static(n) else Called(n, owner, f"{owner}.{name}")
            held = next((self.classes[b] for b in map(path_of, held.bases) if b in self.classes), None)
        return self.known.called(owner, name)


def functions_of(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}


def is_static(function: ast.FunctionDef) -> bool:
    return any(path_of(d) in ("staticmethod", "classmethod") for d in function.decorator_list)


def globals_of(function: ast.FunctionDef, module: str) -> dict[str, str]:
    """What a function of another file reads and does not bind, with its module in front."""
    names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    return {name: f"{module}.{name}" for name in names - vars(builtins).keys()}


def parameters_of(function: ast.FunctionDef) -> list[str]:
    a = function.args
    return [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]


def defaults_of(function: ast.FunctionDef) -> Iterable[tuple[str, ast.expr]]:
    """Parameters, and what they are where nothing is given for them."""
    a = function.args
    positional = [p.arg for p in (*a.posonlyargs, *a.args)]
    yield from zip(positional[len(positional) - len(a.defaults) :], a.defaults, strict=True)
    yield from ((p.arg, d) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None)
