"""A file of the script for `loop_carried` to walk through, with questions about its variables. Pure."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from everstep.train.guards.script_text.syntax_patterns import asked_for, path_of


@dataclass(frozen=True, slots=True)
class Called:
    """A function of a script, and the names under which the loop knows its free variables. `owner`: the object on which
    a method is called. `name`: the function's name, if that lives longer than the loop; its defaults live as long.
    `module`: the prefix of globals of another file, and `file` is that file's name."""

    function: ast.FunctionDef
    owner: str = ""
    name: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    module: str = ""
    file: str = ""
    functions: Mapping[str, ast.FunctionDef] = field(default_factory=dict)  # of that file
    given: Mapping[str, str] = field(default_factory=dict)  # parameters that were bound before (`partial`)

    def sibling(self, name: str) -> Called | None:
        """A function of the same file, if that is not the loop's."""
        found = self.functions.get(name)
        if found is None:
            return None
        names = globals_of(found, self.module)
        return Called(found, "", f"{self.module}.{name}", names, self.module, self.file, self.functions)


class Unknown:
    """Knows nothing of the script's variables."""

    def called(self, name: str, method: str = "") -> Called | None:
        """The function that runs when `name` or its method is called, if the text of the file does not show it."""
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

    def moved(self, name: str) -> object:
        """What is known to change from step to step under this name, by values; None if nothing is."""
        del name
        return None

    def gives_by(self, name: str, attribute: str) -> bool:
        """Whether `name` is a dataset that is trained on, whose samples may depend on this plain attribute."""
        del name, attribute
        return False


class Script:
    """A file of the script. `kind(name)`: the name of the class of `name` ("best", "self.best") before the loop; None
    if there is no such variable. `decided(test)`: the result of a test with constants only, as far as it is known."""

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
        """The file alone, if the script is too large to be looked at with its other files."""
        return Script(self._tree, self.kind, self.decided)

    def source(self, e: ast.expr) -> ast.expr:
        """The value of a name that is assigned once in the file; otherwise the name."""
        found = [n.value for n in self._assigned if isinstance(e, ast.Name) and e.id in map(path_of, n.targets)]
        return found[0] if len(found) == 1 else e

    def method(self, owner: str, name: str) -> Called | None:
        """The method of a class of the file, of its first base there that has it, or from what else is known."""
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
    """The names that a function of another file reads and does not bind, with its module as prefix."""
    names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    return {name: f"{module}.{name}" for name in names - vars(builtins).keys()}


def parameters_of(function: ast.FunctionDef) -> list[str]:
    a = function.args
    return [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]


def defaults_of(function: ast.FunctionDef) -> Iterable[tuple[str, ast.expr]]:
    """The parameters with their defaults."""
    a = function.args
    positional = [p.arg for p in (*a.posonlyargs, *a.args)]
    yield from zip(positional[len(positional) - len(a.defaults) :], a.defaults, strict=True)
    yield from ((p.arg, d) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None)
