"""Reads the text of the script's loop before its first step, and refuses a loop that a new process could not continue.

`loop_carried` finds the loop-carried variables. This module finds the loop among the running frames, and the present
values of its variables. It also finds a generator function that yields a step's batch from inside the step, and a rank
that was read from the environment before the loop. If there is no text (a prompt, a library's loop), it reports
nothing. Invariant: none of the script's code is called, and no object of the script is kept alive.
"""

from __future__ import annotations

import ast
import inspect
import logging
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from everstep.recovery.errors import LoopError
from everstep.train.guards.script_objects import is_script, variables
from everstep.train.guards.script_text.advice import Text, text_of
from everstep.train.guards.script_text.hidden_attributes import Token
from everstep.train.guards.script_text.known_values import PARTS, KnownValues, constant, held, kind_of
from everstep.train.guards.script_text.loop_carried import LoopCarried, loop_carried
from everstep.train.guards.script_text.read_ranks import bound, holds, read_ranks
from everstep.train.guards.script_text.scripts import Script
from everstep.train.guards.script_text.sources import code_of, definition, tree_of
from everstep.train.guards.script_text.syntax_patterns import path_of
from everstep.train.guards.script_text.value_origins import PARAMETERS, RETURNED, SAVED
from everstep.train.guards.untracked.covered import Covered, word

log = logging.getLogger("everstep.train")

UNREAD = "the text of the loop could not be read for variables that it carries"
MODULES = 10_000
_TALKS = frozenset({"print", "info", "debug", "warning", "log", "write", "set_postfix", "set_description"})


@dataclass(frozen=True, slots=True)
class _Place:
    """The loop over steps in `file`, or the function that takes one step, with the variables that it can read."""

    file: str
    tree: ast.Module
    loop: ast.stmt
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        return Path(self.file).name


def check_loop(
    frame: types.FrameType | None,
    function: Any,
    state: Mapping[str, Any],
    is_untracked: Callable[..., bool],
    evaluations: Collection[Any] = (),
    data: Collection[int] = (),
    *,
    changes: bool,
    nested: bool,
) -> None:
    """Raises `LoopError` for a mistake in the text of the loop from which `frame` is called, or of the `function` that
    takes a step. `evaluations`: functions that are called between two steps. `data`: the ids of the datasets that are
    trained on. `changes`: the world may change. `nested`: the loop is inside a loop over epochs."""
    with _never_in_the_way():
        for place in _of_function(function) if function is not None else _of_frame(frame):
            texts = [*map(Text, (*_texts_of_generator(place), *_texts_of_ranks(place)))] if changes else []
            texts += _texts_of_loop(place, state, is_untracked, evaluations, data, nested=nested)
            texts += [] if nested else _texts_of_modules(state, is_untracked)
            if texts:
                raise error_of(texts)


def check_hidden(
    frame: types.FrameType | None,
    function: Any,
    state: Mapping[str, Any],
    is_untracked: Callable[..., bool],
    moved: Collection[Token],
) -> None:
    """Raises `LoopError` if the loop over steps, or the `function` that takes one, trains by something that is among
    `moved`, and no line of it changes that."""
    with _never_in_the_way():
        for place in _of_function(function) if function is not None else _of_frame(frame):
            if texts := _texts_of_loop(place, state, is_untracked, (), (), nested=True, moved=moved):
                raise error_of(texts)


def check_modules(state: Mapping[str, Any], is_untracked: Callable[..., bool]) -> None:
    """Raises `LoopError` for plain attributes with which a tracked module's forward pass counts, or sets up its
    parameters."""
    with _never_in_the_way():
        if texts := _texts_of_modules(state, is_untracked):
            raise error_of(texts)


def error_of(texts: list[Text]) -> LoopError:
    """All texts, and a brief one of the first."""
    more = f". And {len(texts) - 1} more, in the log" if len(texts) > 1 else ""
    return LoopError(". ".join(one.whole for one in texts), brief=texts[0].brief + more)


@contextmanager
def _never_in_the_way() -> Iterator[None]:
    """A context that ignores unforeseen errors: a script that cannot be read trains as it would without this check."""
    try:
        yield
    except LoopError:
        raise
    except Exception:
        log.warning(UNREAD, exc_info=True)


# The place of the loop.


def _of_frame(frame: types.FrameType | None) -> Iterator[_Place]:
    """The script's frame that asks for the step. If that is a generator function, also the frames that ask it for
    one."""
    while frame is not None:
        if is_script(frame.f_code.co_filename):
            if (place := _of_script(frame)) is not None:
                yield place
            if not frame.f_code.co_flags & inspect.CO_GENERATOR:
                return
        frame = frame.f_back


def _of_script(frame: types.FrameType) -> _Place | None:
    tree, line = tree_of(frame.f_code.co_filename), frame.f_lineno
    nodes = list(ast.walk(tree)) if tree is not None else []
    loops = [n for n in nodes if isinstance(n, ast.For) and n.iter.lineno <= line <= _end(n.iter)]
    taken = [n for n in nodes if isinstance(n, ast.While) and n.lineno <= line <= _end(n) and _takes(n, line)]
    found = max((*loops, *taken), key=lambda n: n.lineno, default=None)
    if tree is None or found is None:
        return None
    values: dict[str, Any] = {}
    for name, value in variables(frame):
        values.setdefault(name, value)
    return _Place(frame.f_code.co_filename, tree, found, values)


def _of_function(function: Any) -> Iterator[_Place]:
    values: dict[str, Any] = {}
    if isinstance(function, types.MethodType):
        values["self"], function = function.__self__, function.__func__
    code = code_of(function)
    tree = tree_of(code.co_filename) if code is not None else None
    if code is None or tree is None:
        return
    if (found := definition(tree, code)) is not None:
        function = inspect.unwrap(function)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        values |= {k: cell.cell_contents for k, cell in cells if cell != types.CellType()}
        yield _Place(code.co_filename, tree, found, {**function.__globals__, **values})


def _between(place: _Place, functions: Collection[Any]) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Those of `functions` that are in the same file, each with the variable on which a method is called."""
    for function in functions:
        own = function.__self__ if isinstance(function, types.MethodType) else None
        owner = next((name for name, value in place.values.items() if value is own), "") if own is not None else ""
        code = code_of(function.__func__ if isinstance(function, types.MethodType) else function)
        if code is None or Path(code.co_filename).name != place.name or (own is not None and not owner):
            continue
        if (found := definition(place.tree, code)) is not None:
            yield found, owner


def _end(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def _takes(loop: ast.While, line: int) -> bool:
    """Whether the loop takes its steps by `next` there."""
    calls = (n for n in ast.walk(loop) if isinstance(n, ast.Call) and n.lineno <= line <= _end(n))
    return any((path_of(n.func) or "").rpartition(".")[2] in ("next", "__next__") for n in calls)


# The refusals.


def _texts_of_loop(
    place: _Place,
    state: Mapping[str, Any],
    is_untracked: Callable[..., bool],
    evaluations: Collection[Any],
    data: Collection[int],
    *,
    nested: bool,
    moved: Collection[Token] = (),
) -> list[Text]:
    covered, values = Covered(state), place.values
    known = KnownValues(values, place.file, covered.objects, data, moved)
    # A loader is tracked for its position, and not for the data that it reads.
    kept = covered.objects - (set(data) - {id(target) for target in state.values()})

    def is_tracked(name: str) -> bool:
        parts = PARTS.findall(name)
        if known.leaves_out(name):
            return False
        owners = (held(values, "".join(parts[: i + 1])) for i in range(len(parts)))
        return any(id(v) in kept for v in owners if not isinstance(v, bool | int | float | str | None))

    script = Script(place.tree, lambda n: kind_of(held(values, n)), lambda n: constant(values, n), known)
    texts = list[Text]()
    lost, saved = list[LoopCarried](), list[LoopCarried]()
    for found in loop_carried(script, place.loop, also=list(_between(place, evaluations))):
        if found.use == RETURNED or is_untracked(found.name) or (nested and _is_of_run(place, found.name)):
            continue
        if moved and not found.hidden:  # judged before the first step
            continue
        if not is_tracked(found.name):
            (saved if found.use == SAVED else lost).append(found)
        elif found.bound and found.name.isidentifier():
            texts.append(
                Text(
                    f"{found.name} is tracked, and line {found.line} of {place.name} gives the name to another object, "
                    f"which is not tracked; it affects {found.use} (line {found.at}). Change the "
                    f"tracked one in its place: `{found.name}[:] = …` of a list, `{found.name}.update(…)` of a dict, "
                    f"`{found.name}.copy_(…)` of a tensor"
                )
            )
    if saved:
        log.warning("%s", text_of(place.name, saved, values, state).whole)
    return [text_of(place.name, lost, values, state), *texts] if lost else texts


def _is_of_run(place: _Place, name: str) -> bool:
    """Whether the loop over epochs gives it a value from the run's own count of steps."""
    given = (value for target, value in bound(place.tree) if path_of(target) == name)
    return any(isinstance(part, ast.Attribute) and part.attr == "step" for value in given for part in ast.walk(value))


def _texts_of_generator(place: _Place) -> Iterator[str]:
    for block in ast.walk(place.loop):
        if not isinstance(block, ast.With) or not isinstance(place.loop, ast.For):
            continue
        taken = {path_of(item.context_expr) for item in block.items}
        steps = {n.id for n in ast.walk(place.loop.target) if isinstance(n, ast.Name)}
        found = next((n for n in ast.walk(block) if isinstance(n, ast.Yield | ast.YieldFrom)), None)
        if taken & steps and found is not None:
            yield (
                f"line {found.lineno} of {place.name} is in a generator function that yields from within `with step`: "
                "an error in the code that takes the batches (the loss of a peer, for example) would not reach the "
                "step. Yield the step, `for step in run.steps(…): yield step`, and write `with step as batch:` around "
                "the work"
            )


def _texts_of_ranks(place: _Place) -> Iterator[str]:
    """Refuse ranks in variables: a process keeps its variables when it gets another rank. Each variable is named
    once."""
    told = set[str]()
    names = read_ranks(place.tree, (place.loop.lineno, _end(place.loop)))
    runs = [part for body in _reached(place) for part in ast.walk(body)] if names else []
    quiet = {id(part) for n in runs if _only_talks(n) for part in ast.walk(n)}
    for n in runs:
        if not isinstance(n, ast.Name | ast.Attribute) or not isinstance(n.ctx, ast.Load) or id(n) in quiet:
            continue
        path = path_of(n)
        if path in names and path not in told and not _is_made_anew(place.loop, path, n.lineno):
            told.add(path)
            yield (
                f"{path} was read from the environment (RANK, WORLD_SIZE) before the loop (line {names[path]} of "
                f"{place.name}), and the loop uses it in line {n.lineno}: after the loss of a process both "
                f"may be others. Write run.rank or run.world_size in the loop in place of {path}, or compute it there"
            )


def _is_made_anew(loop: ast.stmt, path: str, line: int) -> bool:
    """Whether the loop gives the variable a new value in every step before this line reads it."""
    blocks = [loop]
    for block in blocks:
        blocks.extend(n for n in getattr(block, "body", ()) if isinstance(n, ast.With))
    given = [n for block in blocks for n in getattr(block, "body", ()) if isinstance(n, ast.Assign)]
    made = (n for n in given if any(path_of(target) == path for target in n.targets) and not holds(n.value, {path}))
    return line <= _end(loop) and any(n.lineno < line for n in made)


def _reached(place: _Place) -> list[ast.stmt]:
    """The loop, and the functions and methods of the same file that it calls."""
    functions = {n.name: n for n in ast.walk(place.tree) if isinstance(n, ast.FunctionDef)}
    found: list[ast.stmt] = [place.loop]
    for body in found:
        calls = (path_of(n.func) or "" for n in ast.walk(body) if isinstance(n, ast.Call))
        for name in sorted({path.removeprefix("self.") for path in calls}):
            if (function := functions.get(name)) is not None and function not in found:
                found.append(function)
    return found


def _only_talks(n: ast.AST) -> bool:
    match n:
        case ast.If(orelse=[]):
            return all(map(_only_talks, n.body))
        case ast.Expr(value=ast.Call(func=func)):
            return (path_of(func) or "").rpartition(".")[2] in _TALKS
    return False


def _texts_of_modules(state: Mapping[str, Any], is_untracked: Callable[..., bool]) -> list[Text]:
    seen, texts = set[type](), list[Text]()
    modules = (m for target in state.values() if isinstance(target, torch.nn.Module) for m in target.modules())
    for module in islice(modules, MODULES):
        kind = type(module)
        if kind not in seen and not kind.__module__.startswith("torch."):
            seen.add(kind)
            texts += map(Text, _texts_of_module(module, is_untracked))
    return texts


def _texts_of_module(module: torch.nn.Module, is_untracked: Callable[..., bool]) -> Iterator[str]:
    kind = type(module)
    code = code_of(kind.forward)
    if code is None or kind.get_extra_state is not torch.nn.Module.get_extra_state:
        return
    tree = tree_of(code.co_filename)
    forward = definition(tree, code) if tree is not None else None
    if tree is None or forward is None:
        return
    tensors = {name for name, _ in module.named_parameters()}
    for name, part in module.named_modules():
        saved = part._buffers.keys() - part._non_persistent_buffers_set
        tensors |= {f"{name}.{buffer}".lstrip(".") for buffer in saved}
    values = {"self": types.SimpleNamespace(**{k: v for k, v in vars(module).items() if k != "training"})}

    def number(name: str) -> str | None:
        if name == "self":
            return kind.__name__
        value = held(values, name)
        return type(value).__name__ if isinstance(value, int | float) and value is not True else None

    script = Script(tree, number, lambda n: constant(values, n))
    for found in loop_carried(script, forward, {f"self.{name}": PARAMETERS for name in tensors}):
        name = word(found.name)
        if is_untracked(f"{kind.__name__}.{name}", kind.__name__):
            continue
        yield (
            f"{kind.__name__}.{name} is a plain attribute of a module that its forward pass changes (line {found.line} "
            f"of {Path(inspect.getfile(kind)).name}), and it affects {found.use} (line {found.at}): no checkpoint "
            f"holds it. Write self.register_buffer({name!r}, torch.tensor({held(values, found.name)!r})) in "
            f"{kind.__name__}.__init__, and change it by self.{name}.fill_(…); or, if nothing is lost with it, "
            f"run.untracked({f'{kind.__name__}.{name}'!r})"
        )
