"""Prepares what the templates show of a job. Pure: from views, records and histories to texts and lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from everstep.jobs.costs import MEANINGS, STAGES, seconds_by_state
from everstep.jobs.timeline import Timeline
from everstep.jobs.view import View, age, ended, moment
from everstep_operator.page.model import Commit, Listed

GOOD = frozenset(["Running", "Complete", "training", "spare", "Succeeded"])
BAD = frozenset(["Failed", "Deleted"])
NONE = "–"
LANES = 64  # workers that are drawn
WIDTH = 1000  # of a bar, in its own units
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar. `kind` names its colour in page.css."""

    kind: str
    name: str
    seconds: float
    share: str
    meaning: str
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Recovery:
    at: str
    cause: str
    worker: str
    node: str
    rung: str
    lost_steps: str
    seconds: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """A run of the job before this one. `kind` is that of its outcome."""

    number: int
    outcome: str
    kind: str
    message: str
    began: str
    ended: str
    active: str
    step: str
    committed: str
    restarts: str


@dataclass(frozen=True, slots=True)
class Risk:
    """What is lost if all workers are killed now. `steps` and `seconds` are None where the status does not say."""

    steps: int | None
    seconds: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """A job in the list of all."""

    key: str
    name: str
    where: str
    status: str
    kind: str
    message: str
    workers: str
    step: str
    goodput: str
    committed: str
    commit_age: str
    restarts: int
    age: str


def fleet(jobs: Iterable[Listed], text: str, status: str) -> list[Listed]:
    """The jobs whose name, namespace or run has this text, and which have this status; those that go on first, and
    among them the newest. Empty: any."""
    wanted = text.casefold()
    chosen = [
        each
        for each in jobs
        if (not status or each.view.status == status)
        and (not wanted or any(wanted in part.casefold() for part in (each.view.job, each.where)))
    ]
    chosen.sort(key=lambda each: each.view.began, reverse=True)
    chosen.sort(key=lambda each: ended(each.view.raw_status) or each.view.status == "Deleted")
    return chosen


def row(each: Listed, now: datetime) -> Row:
    view = each.view
    total = f" of {view.total_steps}" if view.total_steps is not None else ""
    return Row(
        key=each.key,
        name=view.job,
        where=each.where,
        status=view.status,
        kind=kind(view.status),
        message=view.notice or view.message,
        workers=workers(view),
        step=f"{shown(view.step)}{total}",
        goodput=view.goodput or NONE,
        committed=shown(view.committed),
        commit_age=age(view.committed_at, view.over_at or now) or NONE,
        restarts=view.restarts,
        age=age(view.began, now) or NONE,
    )


def workers(view: View) -> str:
    """How many of the wanted ones are ready. A job that has ended wants none."""
    return "none" if ended(view.raw_status) and not view.ready else f"{view.ready} of {view.wanted}"


def kind(word: str) -> str:
    """Of a status or a worker's state: good, bad, or wait."""
    return "good" if word in GOOD else "bad" if word in BAD else "wait"


def shown(value: object) -> str:
    return NONE if value is None or value == "" else str(value)


def risk(view: View, now: datetime, commits: Sequence[Commit] = ()) -> Risk | None:
    """`commits` of the log may be newer than what the status has. None: the job is over, or has taken no step."""
    if ended(view.raw_status) or view.as_of or view.step is None:
        return None
    known = [(each.step, each.at) for each in commits if each.complete]
    known += [(view.committed, view.committed_at)] if view.committed is not None else []
    if not known:
        began = moment(view.began)
        seconds = None if began is None else max(0.0, (now - began).total_seconds())
        return Risk(view.step, seconds, f"all {view.step} steps: nothing is committed")
    step, at = max(((step, moment(text)) for step, text in known), key=lambda commit: commit[1] or _NEVER)
    steps = max(0, view.step - step)
    seconds = None if at is None else max(0.0, (now - at).total_seconds())
    since = "" if seconds is None else f", {span(seconds)} of training"
    return Risk(steps, seconds, f"{steps} steps{since}" if steps else "nothing: the last step is committed")


def span(seconds: float) -> str:
    """`0.4 s`, `12 s`, `5 min 3 s`, `3 h 5 min`, `2 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def goodput(view: View, now: datetime) -> tuple[Part, ...]:
    """The seconds of the job's active life by state; none where the status has none."""
    if not view.raw_status.get("stateSeconds"):
        return ()
    seconds = seconds_by_state(view, now)
    return _parts([(state, state, float(seconds[state]), meaning) for state, meaning in MEANINGS.items()])


def _parts(values: Sequence[tuple[str, str, float, str]]) -> tuple[Part, ...]:
    total = sum(seconds for _, _, seconds, _ in values)
    parts: list[Part] = []
    x = 0.0
    for colour, name, seconds, meaning in values:
        width = WIDTH * seconds / total if total else 0.0
        share = f"{100 * seconds / total:.1f} %" if total else NONE
        parts.append(Part(colour, name, seconds, share, meaning, round(x, 2), round(width, 2)))
        x += width
    return tuple(parts)


def recoveries(view: View) -> list[Recovery]:
    """The newest first. A status remembers ten."""
    return [_recovery(record) for record in view.raw_status.get("recoveries") or ()]


def _recovery(record: Mapping[str, Any]) -> Recovery:
    known = [
        (name.replace(" ", "-"), name, int(record[key]) / 1000, meaning)
        for key, (name, meaning) in STAGES.items()
        if record.get(key) is not None
    ]
    return Recovery(
        at=str(record.get("at") or ""),
        cause=shown(record.get("cause")),
        worker=shown(record.get("worker")),
        node=shown(record.get("node")),
        rung=shown(record.get("rung")),
        lost_steps=shown(record.get("lostSteps")),
        seconds=span(sum(seconds for _, _, seconds, _ in known)) if known else NONE,
        parts=_parts(known),
    )


def earlier_runs(view: View) -> list[EarlierRun]:
    """The newest first. A status remembers ten; a local run has none, because each has a folder of its own."""
    return [_earlier_run(run) for run in view.raw_status.get("history") or ()]


def _earlier_run(run: Mapping[str, Any]) -> EarlierRun:
    outcome, seconds = shown(run.get("outcome")), run.get("activeSeconds")
    return EarlierRun(
        number=int(run.get("rerun") or 0),
        outcome=outcome,
        kind="good" if outcome == "Complete" else "bad",
        message=str(run.get("message") or ""),
        began=str(run.get("startedAt") or ""),
        ended=str(run.get("endedAt") or ""),
        active=NONE if seconds is None else span(seconds),
        step=shown(run.get("step")),
        committed=shown(run.get("committedStep")),
        restarts=shown(run.get("restarts")),
    )


def lanes(timeline: Timeline) -> tuple[Timeline, int]:
    """The timeline with at most `LANES` workers, those that lost a pod first, and how many were left out."""
    if len(timeline.lanes) <= LANES:
        return timeline, 0
    lost = [w for w, parts in timeline.lanes.items() if any(part.ended in ("Failed", "Deleted") for part in parts)]
    chosen = sorted([*lost, *(w for w in timeline.lanes if w not in set(lost))][:LANES])
    kept = {worker: timeline.lanes[worker] for worker in chosen}
    return replace(timeline, lanes=kept), len(timeline.lanes) - len(kept)


def utc(text: str) -> str:
    """`2026-11-30 06:26:12` in UTC of an RFC 3339 text; the text itself if it names no time."""
    parsed = moment(text)
    return text if parsed is None else parsed.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
