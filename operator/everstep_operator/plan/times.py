"""Times of other clocks: of a leader before this one, of a node, of somebody who edited a status.

They may lie in the future, or at the end of the calendar. Invariant: no sum here overflows, and no time in the future
makes a wait longer than the wait itself.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from everstep_operator.api.base import ApiModel

# Clocks of one cluster differ by less. A time that is further ahead is wrong.
AHEAD = timedelta(seconds=60)
# A day from the ends of the calendar: written in any time zone they are still times.
FIRST, LAST = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)
_LONGEST = 10**12  # seconds: longer than the calendar

Model = TypeVar("Model", bound=ApiModel)


def after(at: datetime, seconds: float) -> datetime:
    """`at` and this many seconds, which may be negative; at most the end of the calendar."""
    try:
        return min(max(at + timedelta(seconds=min(max(seconds, -_LONGEST), _LONGEST)), FIRST), LAST)
    except OverflowError:
        return LAST if seconds > 0 else FIRST


def may_be(at: datetime, now: datetime) -> bool:
    """Whether a time of another clock may be true: it is not further ahead than clocks differ."""
    return at - now <= AHEAD


def until(model: Model, now: datetime) -> Model:
    """The stored values with no time after `now`. What a leader wrote whose clock was ahead begins now; the status is
    written so, and each wait takes its own time from here."""
    changed: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        new = _until(value, now)
        if new is not value:
            changed[name] = new
    return model.model_copy(update=changed) if changed else model


def _until(value: Any, now: datetime) -> Any:
    if isinstance(value, datetime):
        return value if value <= now else now
    if isinstance(value, ApiModel):
        return until(value, now)
    if isinstance(value, tuple):
        new = tuple(_until(item, now) for item in value)
        return value if all(a is b for a, b in zip(new, value, strict=True)) else new
    return value
