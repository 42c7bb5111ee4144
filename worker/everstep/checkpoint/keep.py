"""Which commits stay beyond the newest: the first of an interval of steps or hours, for good, and the best by a metric.

Pure. What it decides is written as a mark beside the pins (`holds`), while the commit is still one of the newest: so
what is kept for good does not depend on who cleans up later, nor on a walk of the whole log. Invariant: a mark for good
is never taken back here; a mark for the best goes only when `best` better commits of the same metric have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from everstep.checkpoint.errors import SettingUnusable

STEPS: Final = "steps"
HOURS: Final = "hours"
BEST: Final = "best"
MAX_KEPT: Final = 10_000


@dataclass(frozen=True, slots=True)
class Keep:
    """Which commits stay. A commit stays if any of these says so.

    - `last`: so many of the newest usable commits.
    - `every_steps`: for good, the first commit of each interval of so many steps. With 100 these are the first commit
      of steps 100 to 199, the first of steps 200 to 299, and so on; none of steps 0 to 99.
    - `every_hours`: for good, the first commit, and then each commit that is at least so many hours younger than the
      last one that was kept for its hour. A kept commit may have a later time than this one, if its machine's clock was
      ahead. Such a commit does not count here.
    - `best`: the so many best by `metric` of what `save(…, metrics={…})` or, after it, `add_metrics` was given; `mode`
      says whether "min" or "max" is better. Of equal ones the newer is. A commit without the metric, or with NaN or
      infinity, is not among them.

    Raises `SettingUnusable` naming the field that is wrong.
    """

    last: int = 3
    every_steps: int | None = None
    every_hours: float | None = None
    best: int = 0
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name, value, least in (
            ("last", self.last, 1),
            ("every_steps", self.every_steps, 1),
            ("best", self.best, 0),
        ):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise SettingUnusable(f"keep: {name}={value!r}: an integer of at least {least} is expected")
        hours = self.every_hours
        if hours is not None and (not isinstance(hours, int | float) or not 0 < hours < math.inf):
            raise SettingUnusable(f"keep: every_hours={hours!r}: a positive number of hours is expected")
        if self.best > MAX_KEPT or self.last > MAX_KEPT:
            raise SettingUnusable(f"keep: last and best may be at most {MAX_KEPT}; for more, use every_steps")
        if not isinstance(self.metric, str) or not self.metric:
            raise SettingUnusable(f"keep: metric={self.metric!r}: the name of a metric is expected, such as 'loss'")
        if self.mode not in ("min", "max"):
            raise SettingUnusable(f"keep: mode={self.mode!r}: 'min' or 'max' is expected")

    @property
    def more(self) -> bool:
        """Whether it keeps anything but the newest."""
        return self.every_steps is not None or self.every_hours is not None or self.best > 0

    def lacks(self, metrics: Mapping[str, float]) -> bool:
        """Whether a commit with these metrics cannot be among the best."""
        return self.best > 0 and self.metric not in metrics

    def advice(self, *, by_session: bool) -> str:
        """The message for the first such commit."""
        call = (
            f"run.log({self.metric}=…) in its step or before the next one, or run.evaluate in its steps"
            if by_session
            else f"save(…, metrics={{{self.metric!r}: …}}), or add_metrics before the next save"
        )
        return (
            f"a save without a finite number {self.metric!r} is not among those that keep=Keep(best={self.best}, "
            f"metric={self.metric!r}) keeps. Give each save one: {call}. This is said once"
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """A commit and why it is kept: `why` holds "steps", "hours" and "best <metric>". `at`: seconds since the epoch."""

    save_id: str
    n: int
    step: int
    at: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    why: tuple[str, ...] = ()


def metrics_of(values: object) -> dict[str, float]:
    """The metrics in the `values` of a commit's record; what is not a number is left out."""
    metrics = values.get("metrics") if isinstance(values, dict) else None
    if not isinstance(metrics, dict):
        return {}
    return {name: number for name, value in metrics.items() if (number := finite(value)) is not None}


def finite(value: object) -> float | None:
    """A record's value as a finite number; None for anything else, and for an integer larger than any float."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(metrics: Mapping[str, object] | None) -> dict[str, float]:
    """The metrics as a record can hold them: NaN and infinity, which a loss may well be, are left out.

    Raises `SettingUnusable` naming what is no number: a tensor of one element is one.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise SettingUnusable(f"metrics={metrics!r}: a dict of names and numbers is expected")
    finite_metrics: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or not name:
            raise SettingUnusable(f"metrics: the name {name!r} is no text")
        try:
            number = None if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
        except OverflowError:
            number = math.inf
        except (TypeError, ValueError, RuntimeError):
            number = None
        if number is None:
            raise SettingUnusable(f"metrics[{name!r}]={value!r}: a number, or a tensor of one element, is expected")
        if math.isfinite(number):
            finite_metrics[name] = number
    return finite_metrics


def plan_marks(keep: Keep, marked: Iterable[Kept], commits: Iterable[Kept]) -> tuple[Kept, ...]:
    """Which marks to write and which to delete, in the order of the log. A mark with a `why` is written, in place of
    the commit's old mark if there is one. A mark with an empty `why` is deleted. Marks that stay as they are, are left
    out.

    `marked` are the marks in the store; `commits` are the usable commits in the store, in any order.
    """
    before = {m.save_id: m for m in marked}
    marks = dict(before)
    order = sorted({c.save_id: c for c in commits}.values(), key=lambda c: c.n)
    for commit in order:
        mark = marks.setdefault(commit.save_id, replace(commit, why=()))
        if not commit.metrics.items() <= mark.metrics.items():  # an evaluation came after the mark was written
            marks[commit.save_id] = replace(mark, metrics={**mark.metrics, **commit.metrics})
    for commit in order:
        older = _led_to(commit, marks.values())
        mine = set(marks[commit.save_id].why)
        if keep.every_steps is not None and _begins_interval(commit.step, keep.every_steps, older):
            mine.add(STEPS)
        if keep.every_hours is not None and _is_due(commit.at, keep.every_hours * 3600, older):
            mine.add(HOURS)
        marks[commit.save_id] = replace(marks[commit.save_id], why=tuple(sorted(mine)))
    if keep.best:
        why = f"{BEST} {keep.metric}"
        best = {m.save_id for m in _best(keep, list(marks.values()))}
        for name, mark in marks.items():
            mine = set(mark.why) - {why} | ({why} if name in best else set())
            marks[name] = replace(mark, why=tuple(sorted(mine)))
    changed = (
        m
        for name, m in marks.items()
        if (m.why, m.metrics) != ((before[name].why, before[name].metrics) if name in before else ((), m.metrics))
    )
    return tuple(sorted(changed, key=lambda m: m.n))


def _led_to(commit: Kept, known: Iterable[Kept]) -> list[Kept]:
    """The earlier commits that this one goes back to, newest first, as far as steps show it. Suppose a run commits
    steps 100 and 200, loads step 100 again, and commits step 150. Step 150 goes back to 100, and not to 200."""
    least, ancestors = commit.step, []
    for mark in sorted((m for m in known if m.n < commit.n), key=lambda m: -m.n):
        if mark.step < least:
            ancestors.append(mark)
            least = mark.step
    return ancestors


def _begins_interval(step: int, interval: int, older: Sequence[Kept]) -> bool:
    number = step // interval
    return number > 0 and not any(STEPS in m.why and m.step // interval == number for m in older)


def _is_due(at: float, seconds: float, older: Sequence[Kept]) -> bool:
    return not any(HOURS in m.why and 0 <= at - m.at < seconds for m in older)  # a later one: a clock that ran ahead


def _best(keep: Keep, known: Sequence[Kept]) -> list[Kept]:
    sign = 1.0 if keep.mode == "min" else -1.0
    able = [m for m in known if math.isfinite(m.metrics.get(keep.metric, math.nan))]
    return sorted(able, key=lambda m: (sign * m.metrics[keep.metric], -m.n))[: keep.best]
