"""Judges the steps behind a change of size in which processes went on. Pure.

They are compared with those of processes that were started with as many ranks from the same commit: to the bit, because
nothing but the beginning of the processes differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from everstep.rehearse.record import BUFFERS, DIGEST, Steps

NOT_COMPARED = "the steps behind a change of size in which processes went on"


@dataclass(frozen=True)
class Difference:
    """Behind which step it shows first, in which tracked objects; `samples` if other ones were read. `values`: of the
    script's own that differ by then, each with a text."""

    step: int
    tracked: list[str]
    samples: bool
    values: dict[str, str]


def is_comparable(live: Steps, started: Steps) -> bool:
    """Whether both begin behind the same step. `live`: of the processes that went on."""
    return bool(live) and bool(started) and _first(live) == _first(started)


def keeps_batch(live: Steps, started: Steps, calm: Steps) -> bool:
    """Whether a step of those that went on has as many samples as in the calm run, and one of those that were started
    has another number: each rank has a batch of its own, of which a job keeps those that it has begun with."""
    first = _first(live)
    totals = [sum(len(record.samples) for (_, step), record in steps.items() if step == first)
              for steps in (live, calm, started)]  # fmt: skip
    return totals[0] == totals[1] != totals[2]


def difference(live: Steps, started: Steps, other: Steps, chance: Collection[str]) -> Difference | None:
    """The first one. `started`: of processes that were started with as many ranks as `live`; `other`: with another
    number. `chance`: see `findings`."""
    for step in sorted({step for _, step in live} & {step for _, step in started}):
        keys = sorted({key for key in live if key[1] == step} & started.keys())
        read = [Counter(chain.from_iterable(steps[key].samples for key in keys)) for steps in (live, started)]
        tracked = sorted(
            {
                name
                for key in keys
                for name, digest in live[key].tracked.items()
                if started[key].tracked.get(name, digest) != digest
                and f"tracked {name}" not in chance
                and not name.startswith(BUFFERS)  # each rank has those of its own batches
            }
        )
        if tracked or read[0] != read[1]:
            return Difference(step, tracked, read[0] != read[1], _values(step, live, started, other, chance))
    return None


def counted(ranks: int) -> str:
    """So many ranks, in words."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _values(step: int, live: Steps, started: Steps, other: Steps, chance: Collection[str]) -> dict[str, str]:
    """Those that differ behind the step; only those that depend on the number of ranks, where there are such."""
    values, of_size = dict[str, str](), set[str]()
    for rank, at in sorted(live):
        if at != step or (rank, at) not in started:
            continue
        here, there = live[rank, at].held, started[rank, at].held
        elsewhere = other[rank, at].held if (rank, at) in other else there
        for name in here.keys() & there.keys():
            if here[name] != there[name] and f"held {name}" not in chance and name not in values:
                a, b = (text.partition(DIGEST)[0] for text in (here[name], there[name]))
                values[name] = (
                    f"{a} on rank {rank}, {b} in a process that was started with {counted(live[rank, at].world)}"
                )
                if elsewhere.get(name, there[name]) != there[name]:
                    of_size.add(name)
    return {name: text for name, text in values.items() if not of_size or name in of_size}


def _first(steps: Steps) -> int:
    return min(step for _, step in steps)
