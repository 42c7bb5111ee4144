"""Judges numbers of tracked objects that differ between two calm runs, such as a sum of seconds. Pure.

Their values prove nothing. What both calm runs have in common a kill must not change: that a number is the same on all
ranks, that it never falls, that it is a finite number.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from everstep.rehearse.record import NUMBER, Steps


@dataclass(frozen=True)
class Broken:
    """What a run has broken. `step`: the first completed one behind which it shows. `saved`: the number is in the state
    of its object, and not an attribute beside it."""

    step: int
    name: str
    text: str
    saved: bool


def broken(calm: Steps, again: Steps, run: Steps, chance: Collection[str]) -> list[Broken]:
    """Of each number the first step of `run` that breaks what `calm` and `again` have in common. `chance`: "tracked "
    or "held " and the name of each value that differs between these two."""
    objects = {name for record in calm.values() for name in record.tracked}
    breaks = []
    for kind, name in sorted(tuple(one.split(" ", 1)) for one in chance):
        saved = kind == "tracked"
        if not saved and name.partition(".")[0] not in objects:
            continue
        usual = {rule for steps in (calm, again) for rule, *_ in _breaks(steps, name, saved=saved)}
        new = (Broken(step, name, text, saved) for rule, step, text in _breaks(run, name, saved=saved)
               if rule not in usual)  # fmt: skip
        breaks += list(islice(new, 1))
    return sorted(breaks, key=lambda one: (not one.saved, one.step))


def _breaks(steps: Steps, name: str, *, saved: bool) -> Iterator[tuple[str, int, str]]:
    """What is broken, behind which step, and a sentence about it."""
    last: dict[int, float] = {}  # by rank
    first: dict[int, tuple[int, float]] = {}  # by step: a rank and its number
    for (rank, step), record in sorted(steps.items(), key=lambda item: (item[0][1], item[0][0])):
        number = _number(record.tracked if saved else record.held, name)
        if number is None:
            continue
        if not math.isfinite(number):
            yield "finite", step, f"is {number:g} on rank {rank}"
            continue
        other_rank, other = first.setdefault(step, (rank, number))
        if number != other:
            yield "ranks", step, f"is {other:g} on rank {other_rank} and {number:g} on rank {rank}"
        # Where ranks have numbers of their own, a new process begins with another rank's.
        if number < (least := min(last.values(), default=number)):
            yield "falls", step, f"falls from {least:g} to {number:g} on rank {rank}"
        last[rank] = number


def _number(values: Mapping[str, str], name: str) -> float | None:
    try:
        return float(values[name].removeprefix(NUMBER))
    except (KeyError, ValueError):
        return None
