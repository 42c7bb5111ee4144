"""What a Chrome trace of some steps says about communication, overlap and waiting for data. Pure.

Times are unions of intervals, so that what runs at the same time in two threads or streams counts once. On an
accelerator, computation and communication are its kernels. On a CPU, computation is what torch's operators take, and
communication is from the beginning of a collective to its end in the library (gloo, MPI, UCC).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STEP, INPUT = "everstep.step", "everstep.input"  # the names of our own annotations
_LIBRARIES = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")
_KERNELS = ("nccl", "rccl")  # in the names of an accelerator's kernels that communicate

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all steps together. The shares are of the steps' time, from 0 to 1.

    `communication`: in which a collective was under way. `overlap`: the part of that time in which this rank also
    computed; None without communication. `exposed`: in which it communicated and did not compute. `input`: in which the
    step waited for its batch.
    """

    steps: int
    step_seconds: float
    communication: float
    overlap: float | None
    exposed: float
    input: float


class NoSteps(ValueError):
    """The trace has no step."""


def summarize(events: Iterable[Mapping[str, Any]]) -> Summary:
    """`events`: the trace's `traceEvents`. Raises `NoSteps`."""
    kept = [e for e in events if e.get("ph") == "X" and "dur" in e]
    windows = _spans(e for e in kept if e["name"] == STEP)
    total = _length(windows)
    if not total:
        raise NoSteps("the trace has no step: it ended before the first one was complete")
    kernels = [e for e in kept if e.get("cat") == "kernel"]
    if kernels:
        talks = [e for e in kernels if any(word in e["name"].lower() for word in _KERNELS)]
        works = [e for e in kernels if not any(word in e["name"].lower() for word in _KERNELS)]
    else:
        talks = [e for e in kept if e["name"].startswith(_LIBRARIES)]
        works = [e for e in kept if e.get("cat") == "cpu_op" and not e["name"].startswith("c10d::")]
    communication = common(_spans(talks), windows)
    hidden = _length(common(communication, _spans(works)))
    took = _length(communication)
    return Summary(
        steps=sum(1 for e in kept if e["name"] == STEP),
        step_seconds=total / 1e6 / sum(1 for e in kept if e["name"] == STEP),
        communication=took / total,
        overlap=hidden / took if took else None,
        exposed=(took - hidden) / total,
        input=_length(common(_spans(e for e in kept if e["name"] == INPUT), windows)) / total,
    )


def _spans(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    return union((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(some: list[Interval], others: list[Interval]) -> list[Interval]:
    """The time that is in both; each is disjoint and in order."""
    found: list[Interval] = []
    i = j = 0
    while i < len(some) and j < len(others):
        begin, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if begin < end:
            found.append((begin, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
