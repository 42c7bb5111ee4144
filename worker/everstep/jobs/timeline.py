"""Arranges a run's history in lanes: what each worker did when, what was done to it, and how long the world stood
still.

Pure. Times are seconds since the run began. Invariant: every mark comes from an entry of the history; a lane that shows
training had a report of a completed step from a pod of that worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from everstep.jobs.history import READY, ActionTaken, Entry, PodSeen, StatusSeen, StepSeen

T = TypeVar("T")

OVER = ("Succeeded", "Failed", "Deleted")
STANDING = ("Recovering", "Resizing", "Updating", "Suspended", "Queued")


class State(StrEnum):
    STARTING = "starting"  # the pod exists, but none of its steps has been reported
    TRAINING = "training"


@dataclass(frozen=True, slots=True)
class Segment:
    begin: float
    end: float
    state: State
    pod: str
    ended: str = ""  # how the pod ended at this segment's end: Succeeded, Failed or Deleted


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which the world as a whole did not train, and why."""

    begin: float
    end: float
    reason: str


@dataclass(frozen=True, slots=True)
class Timeline:
    seconds: float  # the length of the run
    lanes: dict[int, tuple[Segment, ...]]  # by worker index
    spans: tuple[Span, ...]
    actions: tuple[ActionTaken, ...]
    world: tuple[tuple[float, int], ...]  # (time, world size) at each change, as the status published it
    loss: tuple[tuple[float, int, float], ...]  # (time, step, loss) as rank 0 reported it
    commits: tuple[tuple[float, int], ...]  # (time, committed step)
    outcome: str = ""  # the last reason of Ready
    begin: float = 0.0  # what was before is not in it


def build(history: Iterable[Entry]) -> Timeline:
    """Take the history apart. An empty history gives an empty timeline."""
    entries = list(history)
    seconds = max((e.at for e in entries), default=0.0)
    statuses = [e for e in entries if isinstance(e, StatusSeen)]
    steps = [e for e in entries if isinstance(e, StepSeen)]
    return Timeline(
        seconds,
        _lanes(entries, seconds),
        _spans(statuses, steps, seconds),
        tuple(e for e in entries if isinstance(e, ActionTaken)),
        _changes((e.at, e.size) for e in statuses),
        tuple((e.at, e.step, e.loss) for e in steps if e.rank == 0 and e.loss is not None),
        _changes((e.at, e.committed) for e in statuses if e.committed is not None),
        statuses[-1].reason if statuses else "",
    )


def since(timeline: Timeline, begin: float) -> Timeline:
    """The part from that time on. The last size and the lanes that go on from before stay."""
    if begin <= timeline.begin:
        return timeline
    lanes = {
        worker: tuple(replace(s, begin=max(s.begin, begin)) for s in segments if s.end >= begin)
        for worker, segments in timeline.lanes.items()
    }
    before = [size for at, size in timeline.world if at < begin]
    return replace(
        timeline,
        begin=begin,
        lanes={worker: segments for worker, segments in lanes.items() if segments},
        spans=tuple(replace(s, begin=max(s.begin, begin)) for s in timeline.spans if s.end >= begin),
        actions=tuple(a for a in timeline.actions if a.at >= begin),
        world=(*((begin, size) for size in before[-1:]), *(point for point in timeline.world if point[0] >= begin)),
        loss=tuple(point for point in timeline.loss if point[0] >= begin),
        commits=tuple(point for point in timeline.commits if point[0] >= begin),
    )


def _lanes(entries: list[Entry], seconds: float) -> dict[int, tuple[Segment, ...]]:
    open_: dict[str, tuple[int, Segment]] = {}
    lanes: dict[int, list[Segment]] = {}

    def close(pod: str, at: float, ended: str) -> None:
        worker, segment = open_.pop(pod)
        lanes.setdefault(worker, []).append(replace(segment, end=at, ended=ended))

    def trains(pod: str, at: float) -> None:
        worker, segment = open_[pod]
        if segment.state is State.STARTING:
            close(pod, at, "")
            open_[pod] = (worker, Segment(at, at, State.TRAINING, pod))

    over: set[str] = set()
    for e in entries:
        match e:
            case PodSeen() if e.phase in OVER:
                if e.pod in open_:
                    close(e.pod, e.at, e.phase)
                over.add(e.pod)
            case PodSeen() if e.phase == READY and e.pod in open_:
                trains(e.pod, e.at)
            case PodSeen() if e.pod not in open_ and e.pod not in over:
                open_[e.pod] = (e.worker, Segment(e.at, e.at, State.STARTING, e.pod))
            case StepSeen() if e.pod in open_:
                trains(e.pod, e.at)
            case _:
                pass
    for pod in list(open_):
        close(pod, seconds, "")
    return {worker: tuple(sorted(lanes[worker], key=lambda s: s.begin)) for worker in sorted(lanes)}


def _spans(statuses: list[StatusSeen], steps: list[StepSeen], seconds: float) -> tuple[Span, ...]:
    """The spans in which the world stood still, by the statuses that say so."""
    spans: list[Span] = []
    for e in statuses:
        if e.reason not in STANDING or (spans and e.at < spans[-1].end):
            continue
        if (span := _stood(steps, e, seconds)) is not None:
            spans.append(span)
    return tuple(spans)


def _stood(steps: list[StepSeen], status: StatusSeen, seconds: float) -> Span | None:
    """The time until the world stepped again; None if it trained on unchanged.

    One late report of a pod may still be of the old world. A second one shows that the old world trains on, as an
    elastic job does while a worker is missing. It stands still, if at all, from its last report to the first of the
    next round.
    """
    old = max((s.round for s in steps if s.at <= status.at), default=0)
    later = [s for s in steps if s.at > status.at]
    resumed = min((s.at for s in later if s.round > old), default=None)
    before = [s for s in later if s.round <= old and (resumed is None or s.at < resumed)]
    trains_on = len({s.pod for s in before}) < len(before)
    if resumed is None and trains_on:
        return None
    if resumed is None and status.round <= old and before:
        # Agents may be in the next round before the status says that the old one is over. Then there is no newer round.
        resumed = before[0].at
    begin = max(s.at for s in before) if trains_on else status.at
    return Span(begin, seconds if resumed is None else resumed, status.reason)


def _changes(values: Iterable[tuple[float, T]]) -> tuple[tuple[float, T], ...]:
    changes: list[tuple[float, T]] = []
    for at, value in values:
        if not changes or changes[-1][1] != value:
            changes.append((at, value))
    return tuple(changes)
