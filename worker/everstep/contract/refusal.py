"""Tells a refusal from other errors. The same script would be refused again, so no restart can help.

A refusal rarely reaches the top of a program as it was raised. It comes from a DataLoader's worker, out of a group of
errors, or behind an error that the script raised when it caught it. So it is looked for in all that led to the error.
Standard library only: who asks may not have imported the library that refuses. Invariants: nothing here raises; the
search is bounded; an error that says of itself that a restart may help is never a refusal, whatever led to it.
"""

from __future__ import annotations

import builtins
import contextlib
import re
import sys

_STEPS = "everstep_refused_after"
OWN_MODULES = ("everstep.", "everstep_horovod.", "everstep_sources.")  # beginnings of our modules' names
MAX_ERRORS = 100  # that are looked at
# What a restart may heal, where a refusal is raised from it: a disk that is full, a machine that is busy.
_MAY_HEAL = (OSError, MemoryError, KeyboardInterrupt)
# torch gives the error of another process as a text, in an error of its own: of a DataLoader's worker, with the type;
# of `torch.multiprocessing.spawn`, without.
_OF_ANOTHER_PROCESS = re.compile(r"^Caught \w+ in .*\nOriginal |terminated with the following error:")
_NAMED = re.compile(r"^(?:Original )?([A-Za-z_][\w.]*)(?:: |$)", re.MULTILINE)
_CAUSE = "direct cause of the following exception"
_NOT_FINAL = "(everstep: a restart may help)"


class _Process:
    """Of this process."""

    steps = 0  # optimizer steps that it has completed


def count_step() -> None:
    """A step is complete."""
    _Process.steps += 1


def steps_done() -> int:
    """How many steps this process has completed."""
    return _Process.steps


class Refusal(Exception):
    """Base of the errors that mean: this script, or its state or data, is refused.

    `everstep_refused_after`: how many steps the process had completed; None if a restart may help.
    """

    everstep_refused_after: int | None

    def __new__(cls, *args: object, **named: object) -> Refusal:
        made = super().__new__(cls, *args, **named)
        made.everstep_refused_after = _Process.steps
        return made

    def may_pass(self) -> None:
        """A restart may help: it is a failure like others. The log says so too, also in another process."""
        self.everstep_refused_after = None
        self.add_note(_NOT_FINAL)


def find(error: BaseException) -> BaseException | None:
    """The refusal that this error is, or that led to it; None if there is none, or if a restart may help."""
    errors = [error]
    for raised in errors:
        if len(errors) > MAX_ERRORS:
            return None
        if hasattr(raised, _STEPS):
            if _steps(raised) is not None and not _may_heal(raised):
                return raised
            continue
        if not isinstance(raised, Refusal) and _is_told_of(raised):
            return raised
        # What was raised while a refusal was handled: a full disk or a lost connection is no refusal for that.
        beside = None if raised.__cause__ is None and _is_own(raised) else raised.__context__
        led = [raised.__cause__, beside, *(raised.exceptions if isinstance(raised, BaseExceptionGroup) else ())]
        errors += [e for e in led if e is not None and not any(e is known for known in errors)]
    return None


def refused_after(error: BaseException) -> int | None:
    """How many steps the process had completed when the script was refused; None for an error that is no refusal."""
    refused = find(error)
    if refused is None:
        return None
    return _Process.steps if (steps := _steps(refused)) is None else steps


def sentence(error: BaseException) -> str:
    """What a refusal says, without the traceback in which torch wraps that of another process."""
    text = str(error)
    last = _last_of_ours(text) if _OF_ANOTHER_PROCESS.search(text) else None
    return f"{type(error).__name__}: {text}" if last is None else last[1]


def _is_own(error: BaseException) -> bool:
    """Whether the error says by itself why it was raised, whatever was being handled then."""
    return isinstance(error, _MAY_HEAL) or type(error).__module__.startswith(OWN_MODULES)


def _steps(error: BaseException) -> int | None:
    steps = getattr(error, _STEPS, None)
    return steps if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0 else None


def _may_heal(refused: BaseException) -> bool:
    """Whether the refusal was raised from an error that a restart may heal, here or in another process."""
    if _heals_by_text(str(refused)):
        return True
    chain = [refused]
    while (cause := chain[-1].__cause__) is not None and not any(cause is known for known in chain):
        if isinstance(cause, _MAY_HEAL) or (hasattr(cause, _STEPS) and _steps(cause) is None):
            return True
        chain.append(cause)
        if len(chain) > MAX_ERRORS:
            return True
    return False


def _heals_by_text(text: str) -> bool:
    if not _OF_ANOTHER_PROCESS.search(text):
        return False
    if _NOT_FINAL in text:
        return True
    named = [getattr(builtins, name, None) for name in _NAMED.findall(text)] if _CAUSE in text else []
    return any(isinstance(kind, type) and issubclass(kind, _MAY_HEAL) for kind in named)


def _is_told_of(error: BaseException) -> bool:
    """Whether this is torch's error for another process that ended by a refusal; it has only the text."""
    with contextlib.suppress(Exception):
        text = str(error)
        if _OF_ANOTHER_PROCESS.search(text) and not _heals_by_text(text):
            kind = last[0] if (last := _last_of_ours(text)) is not None else None
            return isinstance(kind, type) and issubclass(kind, Refusal)
    return False


def _last_of_ours(text: str) -> tuple[object, str] | None:
    """The error of this library that a traceback ends with: its class, if it is known here, and its words."""
    named = [match for match in _NAMED.finditer(text) if match[1].startswith(OWN_MODULES)]
    if not named:
        return None
    module, _, name = named[-1][1].rpartition(".")
    return getattr(sys.modules.get(module), name, None), f"{name}: {text[named[-1].end() :].strip()}"
