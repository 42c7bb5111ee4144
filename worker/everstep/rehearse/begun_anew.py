"""Judges what stands in the heap of a rank (`heap`). Pure, but for `read`.

A rehearsal knows three things of a value: what the step before had, so it changes with the steps; what another calm run
has, so it is no chance; and what processes have that all began anew, so nothing restored it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from everstep.rehearse.record import DIGEST

Heap = dict[str, list[str]]  # name → the text of each value that has it, sorted
Heaps = dict[int, Heap]  # completed steps → what was read then
FILE = "heap-{step}-{rank}.json"


def read(folder: Path) -> dict[int, Heaps]:
    """Those of a run, by rank. Of a step that was taken again, the last one."""
    found: dict[int, Heaps] = {}
    for path in sorted(folder.glob(FILE.format(step="*", rank="*"))):
        _, step, rank = path.stem.split("-")
        found.setdefault(int(rank), {})[int(step)] = json.loads(path.read_text())
    return found


def begun_anew(calm: Heaps, again: Heaps, run: Heaps, rank: int) -> dict[str, tuple[int, str]]:
    """What changes with the steps, alike in both calm runs, and is another in `run`, on one rank: by name the number of
    steps and what both have."""
    steps = calm.keys() & again.keys() & run.keys()
    last = max((step for step in steps if step - 1 in steps), default=None)
    if last is None:
        return {}
    (a0, a1), (b0, b1), (c0, c1) = ((one[last - 1], one[last]) for one in (calm, again, run))
    earlier = [heap for step, heap in calm.items() if step < last]
    names = {
        name for name in a0.keys() & a1.keys() & c0.keys() & c1.keys()
        if any(heap.get(name, a1[name]) != a1[name] for heap in earlier)
    }  # fmt: skip
    return {
        name: (last, _text(a1[name], c1[name], rank)) for name in sorted(names)
        if (b0.get(name), b1.get(name)) == (a0[name], a1[name]) and c0[name] != a0[name] and c1[name] != a1[name]
    }  # fmt: skip


def _text(calm: list[str], here: list[str], rank: int) -> str:
    """Without what both have, and without digests, which say nothing to a person."""
    a, b = Counter(calm), Counter(here)
    there, mine = (
        ", ".join(text.partition(DIGEST)[0] for text in one.elements()) or "nothing" for one in (a - b, b - a)
    )
    if there == mine:
        return f"not the same {mine} on rank {rank} as in the calm run"
    return f"{mine} on rank {rank}, {there} in the calm run"
