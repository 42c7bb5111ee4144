"""Reads the text of the script's loop before its first step, for what a new process could not go on with.

`script_rules` refuses what is certain to go wrong. What the loop carries from step to step and is not tracked
(`carried_names`) is listed in one warning, or refused if the run is strict. If there is no text (a prompt, a library's
loop), nothing is found. Invariant: none of the script's code is called, and no object of the script is kept alive.
"""

from __future__ import annotations

import ast
import inspect
import logging
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from everstep.recovery.errors import LoopError
from everstep.torch_private.modules import buffers_of, parameters_of, unsaved_of
from everstep.train.further_loops import TakenOnce
from everstep.train.guards import script_rules
from everstep.train.guards.carried_names import Carried, Reader
from everstep.train.guards.script_objects import Name, is_script, value_of, variables
from everstep.train.guards.sources import (
    code_of,
    counted_around,
    definition,
    end,
    forget,
    frames_that_ask,
    loop_at,
    own_names,
    tree_of,
)
from everstep.train.guards.untracked.covered import Covered

log = logging.getLogger("everstep.train")

UNREAD = "the text of the loop could not be read for names that it carries"
DROPPED = (
    "the logging of this script drops warnings of the logger everstep.train, also those that name what a new process "
    "lacks after a loss. Let them be written: logging.getLogger('everstep.train').addHandler(logging.StreamHandler()), "
    "and no logging.disable()"
)
NAMED = 12  # names in one text


@dataclass(frozen=True, slots=True)
class _Loop:
    """The loop over steps in `file`, or the function that takes one step, with the variables that it can read."""

    file: str
    tree: ast.Module
    loop: ast.For | ast.While | ast.FunctionDef
    values: Mapping[str, Any]
    function: Any = None


class ScriptCheck:
    """Of one run. `untracked`: the names that may be lost; the set may grow. `changes`: the world may change.
    `goes_on`: state is saved, or sent to other processes; else nothing is refused. `strict`: what is carried is
    refused."""

    def __init__(
        self, state: Mapping[str, Any], untracked: Collection[str], is_untracked: Callable[..., bool],
        *, changes: bool, goes_on: bool, strict: bool,
    ) -> None:  # fmt: skip
        self._state, self._untracked, self._is_untracked = state, untracked, is_untracked
        self._changes, self._goes_on, self._strict = changes, goes_on, strict
        self._read_epoch = False
        self.carried = dict[str, Name]()  # and is not tracked
        self._lines = dict[str, str]()  # of each of these names, with a remark
        self._bound_anew = set[str]()  # names that each step binds before it reads them
        self.function: Any = None  # that takes a step, in `Run.train`
        self.called: list[Any] = []  # the functions given to `Run.evaluate`, called between two steps

    def before_steps(self, frame: types.FrameType, data: Collection[int], *, nested: bool) -> LoopError | None:
        """The error in the text of the loop that `frame` is called from. It is found before others wait for this
        process, and raised on all of them. `data`: ids of the datasets that are trained on. `nested`: the loop over
        steps is in one over epochs."""
        if not self._goes_on:
            return None
        try:
            self._read(frame, None if nested else self.function, data)
            if not nested:
                self._refuse()
        except LoopError as e:
            return e
        return None

    def epoch_begins(self, frame: types.FrameType, data: Collection[int], *, first_rank: bool) -> None:
        """The steps of an epoch begin. Raises `LoopError` for an error in the text of the loop over them."""
        if self._goes_on and not self._read_epoch:
            self._read_epoch = True
            self._read(frame, self.function, data)
            self._refuse()
            if first_rank:
                self.warn()

    def warn(self) -> None:
        """List in the log what the loop carries: on stderr where the script's logging drops warnings."""
        if self._lines:
            log.warning("%s", self._text())
        if not _are_written(log):
            texts = [self._text(), DROPPED] if self._lines else [DROPPED]
            sys.stderr.write("".join(f"everstep: {text}\n" for text in texts))
            sys.stderr.flush()

    def may_differ(self, name: str) -> bool:
        """Whether a value with this name may rightly be another in a process that begins later."""
        anew = any(name == bound or name.startswith((f"{bound}.", f"{bound}[")) for bound in self._bound_anew)
        return anew or self._is_untracked(name)

    def _refuse(self) -> None:
        if self._strict and self._lines:
            raise LoopError(f"{self._text()}. They are refused because the run is strict (start(strict=True) or "
                            "EVERSTEP_STRICT=1)")  # fmt: skip

    def _text(self) -> str:
        lines, names = list(self._lines.values()), list(self._lines)
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        silent = ", ".join(f'"{name}"' for name in names[:NAMED])
        return (
            f"carried by the loop and not tracked: {', '.join(lines[:NAMED])}{more}. In a new process they begin "
            "anew. Track those by which it trains (run.track(carried=carried) before the loop; numbers in a "
            f"dictionary); declare the others by run.untracked({silent}{', …' if more else ''}); or prove the script "
            "with `everstep rehearse`"
        )

    def _read(self, frame: types.FrameType, function: Any, data: Collection[int]) -> None:
        texts, unread = list[str](), False
        try:
            for loop in _of_function(function) if function is not None else _of_frame(frame):
                reader, file = self._note(loop, data), Path(loop.file).name
                if self._changes:
                    texts += script_rules.of_generator(loop.loop, file)
                    texts += script_rules.of_ranks(loop.tree, loop.loop, reader.early, file)
        except Exception:  # an unforeseen script trains as it would without this check
            log.warning(UNREAD, exc_info=True)
            unread = True
        finally:
            forget()
        if texts:
            more = f". And {len(texts) - 1} more, in the log" if len(texts) > 1 else ""
            raise LoopError(". ".join(texts), brief=texts[0] + more)
        if unread and self._strict:
            raise LoopError(f"{UNREAD} (the cause is in the log), and the run is strict: prove the script with "
                            "`everstep rehearse`, and leave out strict=True and EVERSTEP_STRICT=1")  # fmt: skip

    def _note(self, loop: _Loop, data: Collection[int]) -> Reader:
        covered = Covered(self._state)
        # A loader is tracked for its position, and not for the data that it reads.
        covered.objects -= set(data) - {id(target) for target in self._state.values()}
        reader = Reader(loop.values, loop.file)
        if isinstance(loop.loop, ast.FunctionDef):
            reader.function(loop.function, loop.function.__name__)
        else:
            reader.loop(loop.loop)
        for function in self.called:
            reader.function(function, getattr(function, "__name__", ""), always=False)
        carried = reader.carried()
        for entry in carried:
            if self._is_untracked(entry.name) or _is_tracked(entry, loop.values, covered):
                continue
            remark = (
                ", another object than the tracked one" if _is_held(value_of(loop.values, entry.parts), covered) else ""
            )
            self.carried[entry.name] = entry.parts
            self._lines.setdefault(entry.name, f"{entry.name} ({Path(entry.file).name}:{entry.line}{remark})")
        around = {} if isinstance(loop.loop, ast.FunctionDef) else counted_around(loop.tree, loop.loop)
        for name, line in around.items():
            if not self._is_untracked(name):
                self.carried[name] = (name,)
                where = f"{Path(loop.file).name}:{line}"
                self._lines[name] = f"{name} ({where}, which begins with its first pass: compute it from step.number)"
        # Every value of these names is of the present step. A name in `always` is bound in each step before it is read.
        # A name that only some steps bind is among them if nothing else than the code that `reader` followed reads it.
        # A function that `reader` did not follow, such as a hook, may read what an earlier step has bound.
        elsewhere = _read_elsewhere(loop)
        anew = {name for name in reader.bound if name in reader.always or name not in elsewhere}
        self._bound_anew = (self._bound_anew | anew) - {entry.name for entry in carried} - around.keys()
        return reader


def _read_elsewhere(loop: _Loop) -> set[str]:
    """The variables that are read by functions other than those around the loop. A function's own variables do not
    count."""
    names = set[str]()
    for n in ast.walk(loop.tree):
        if not isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if not (n.lineno <= loop.loop.lineno and end(loop.loop) <= end(n)):
            read = {name.id for name in ast.walk(n) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load)}
            names |= read - own_names(n)
    return names


def _is_tracked(name: Carried, values: Mapping[str, Any], covered: Covered) -> bool:
    """Whether the value of this name is saved, because it belongs to a tracked object.

    A variable to which the loop assigns another object is not saved, even if its object is tracked now. An attribute of
    a tracked object is saved, whatever is assigned to it. A module is the exception: only its parameters and persistent
    buffers are saved, unless its class has `get_extra_state`, which may save any attribute."""
    for i in range(1, len(name.parts)):
        owner = value_of(values, name.parts[:i])
        if isinstance(owner, torch.nn.Module):
            saved = parameters_of(owner).keys() | buffers_of(owner).keys() - unsaved_of(owner)
            more = type(owner).get_extra_state is not torch.nn.Module.get_extra_state
            is_own = id(owner) in covered.objects and i == len(name.parts) - 1
            if is_own and (more or name.parts[i][1:] in saved):
                return True
        elif _is_held(owner, covered):
            return True
    value = value_of(values, name.parts)
    return not name.rebound and (_is_held(value, covered) or _only_shows(value, covered))


def _only_shows(value: Any, covered: Covered) -> bool:
    """Whether it is a module, such as DDP's, or a list, all of whose parameters or elements are tracked themselves."""
    if isinstance(value, torch.nn.Module):
        parts = list(torch.nn.Module.parameters(value))
    else:
        parts = list(value) if type(value) in (list, tuple) else []
    return bool(parts) and all(isinstance(part, torch.Tensor) and covered.holds(part) for part in parts)


def _is_held(value: Any, covered: Covered) -> bool:
    if isinstance(value, TakenOnce):
        return True  # `next` takes a step from it
    if value is None or isinstance(value, bool | int | float | str):
        return False
    return id(value) in covered.objects or (isinstance(value, torch.Tensor) and covered.holds(value))


# The place of the loop.


def _of_frame(frame: types.FrameType | None) -> Iterator[_Loop]:
    """The loop that asks for the step. If that is in a generator function, also the loops that ask it for one."""
    for above in frames_that_ask(frame):
        loop = loop_at(above.f_code.co_filename, above.f_lineno) if is_script(above.f_code.co_filename) else None
        if loop is not None:
            values: dict[str, Any] = {"__name__": above.f_globals.get("__name__")}
            for name, value in variables(above):
                values.setdefault(name, value)
            yield _Loop(above.f_code.co_filename, *loop, values)


def _of_function(function: Any) -> Iterator[_Loop]:
    own = {"self": function.__self__} if isinstance(function, types.MethodType) else {}
    code = code_of(getattr(function, "__func__", function))
    tree = tree_of(code.co_filename) if code is not None else None
    body = definition(tree, code) if code is not None and tree is not None else None
    if code is not None and tree is not None and body is not None:
        inner = inspect.unwrap(getattr(function, "__func__", function))
        cells = zip(code.co_freevars, inner.__closure__ or (), strict=True)
        own |= {k: cell.cell_contents for k, cell in cells if cell != types.CellType()}
        yield _Loop(code.co_filename, tree, body, {**inner.__globals__, **own}, function)


def _are_written(logger: logging.Logger) -> bool:
    """Whether a warning of this logger comes to an output."""
    if not logger.isEnabledFor(logging.WARNING):
        return False
    handlers, above = list[logging.Handler](), logger
    while above is not None:
        handlers += above.handlers
        above = above.parent if above.propagate else None  # type: ignore[assignment]
    # Without any handler Python writes warnings to stderr.
    return not handlers or any(
        handler.level <= logging.WARNING and not isinstance(handler, logging.NullHandler) for handler in handlers
    )
