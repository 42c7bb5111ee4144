"""What a loop does to one of its variables, for `loop_carried`, and what follows from all of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.train.guards.script_text.value_origins import NONE, Taint


@dataclass(slots=True)
class Change:
    line: int
    file: str
    kept: Taint = NONE  # what its new value comes from
    control: Taint = NONE  # what decides whether it is changed
    state: bool = False
    bound: bool = False
    made: bool = False  # an object of a class, which the census knows


def states_of(changes: Mapping[str, Change]) -> set[str]:
    """Of what is changed, what a new process could not make as it is: not constants that are made once."""
    found = {name for name, c in changes.items() if c.state or "*" in c.kept | c.control or name in c.kept}
    while more := {n for n, c in changes.items() if n not in found and (c.kept | c.control) & (found - {n})}:
        found |= more
    return found


def behind(taint: Taint, changes: Mapping[str, Change]) -> Taint:
    """With the variables from which these were changed."""
    found = set(taint)
    waiting = list(taint)
    while waiting:
        change = changes.get(waiting.pop())
        for name in (change.kept | change.control) - found if change is not None else ():
            found.add(name)
            waiting.append(name)
    return frozenset(found)
