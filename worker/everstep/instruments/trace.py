"""What a Chrome trace of some steps says about communication, overlap and waiting for data. Pure.

Times are unions of intervals, so that what runs at the same time in two threads or streams counts once. On an
accelerator, computation and communication are its kernels. On a CPU, computation is what torch's operators take, and
communication is from the beginning of a collective to its end in the library (gloo, MPI, UCC). Waiting for data is what
our own loaders and torch's DataLoader take in the thread that trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# The names of our own annotations. MOVED: the world has changed in this step, which may have failed and be repeated.
STEP, INPUT, MOVED = "everstep.step", "everstep.input", "everstep.moved"
_LOADER = "enumerate(DataLoader)#"  # with this torch's DataLoader begins the name of a wait for its next batch
_COPIES = "gpu_user_annotation"  # the category of an annotation's copy on the accelerator's time line
_LIBRARIES = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")
_KERNELS = ("nccl", "rccl")  # in the names of an accelerator's kernels that communicate

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all steps together, except those in which the world has changed. The shares are of the steps' time, from 0 to
    1.

    `communication`: in which a collective was under way. `overlap`: the part of that time in which this rank also
    computed; None without communication. `exposed`: in which it communicated and did not compute. `input`: in which the
    step waited for a batch; None if no batch came from a loader that is known. `left_out`: the number of steps in which
    the world has changed.
    """

    steps: int
    left_out: int
    step_seconds: float
    communication: float
    overlap: float | None
    exposed: float
    input: float | None


class NoSteps(ValueError):
    """The trace has no step that can be measured."""


def summarize(events: Iterable[Mapping[str, Any]]) -> Summary:
    """`events`: the trace's `traceEvents`. Raises `NoSteps`."""
    kept = [e for e in events if e.get("ph") == "X" and "dur" in e and e.get("cat") != _COPIES]
    moved = [float(e["ts"]) for e in kept if e["name"] == MOVED]
    steps = [e for e in kept if e["name"] == STEP]
    whole = [e for e in steps if not any(float(e["ts"]) <= at <= float(e["ts"]) + float(e["dur"]) for at in moved)]
    windows = _spans(whole)
    total = _length(windows)
    if steps and not total:
        raise NoSteps("the world has changed in each of its steps, so they say nothing about the others: ask again")
    if not total:
        raise NoSteps("the trace has no step: it ended before the first one was complete")
    trains = {e.get("tid") for e in steps}
    waits = [e for e in kept if e.get("tid") in trains and e["name"].startswith((INPUT, _LOADER))]
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
        steps=len(whole),
        left_out=len(steps) - len(whole),
        step_seconds=total / 1e6 / len(whole),
        communication=took / total,
        overlap=hidden / took if took else None,
        exposed=(took - hidden) / total,
        input=_length(common(_spans(waits), windows)) / total if waits else None,
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
