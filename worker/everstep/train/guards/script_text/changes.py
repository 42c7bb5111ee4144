"""Describes what a loop does to one of its variables, for `loop_carried`, and what follows from all changes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.train.guards.script_text.value_origins import NONE, Taint


@dataclass(slots=True)
class Change:
    line: int
    file: str
    kept: Taint = NONE  # the origins of its new value
    control: Taint = NONE  # the origins of the decision to change it
    state: bool = False
    bound: bool = False
    made: bool = False  # it is an object of a class, which the untracked-state check knows


def states_of(changes: Mapping[str, Change]) -> set[str]:
    """The changed variables that a new process could not make again: all except constants that are made once."""
    found = {name for name, c in changes.items() if c.state or "*" in c.kept | c.control or name in c.kept}
    while more := {n for n, c in changes.items() if n not in found and (c.kept | c.control) & (found - {n})}:
        found |= more
    return found


def behind(taint: Taint, changes: Mapping[str, Change]) -> Taint:
    """The variables, and those from which they were changed."""
    found = set(taint)
    waiting = list(taint)
    while waiting:
        change = changes.get(waiting.pop())
        for name in (change.kept | change.control) - found if change is not None else ():
            found.add(name)
            waiting.append(name)
    return frozenset(found)
