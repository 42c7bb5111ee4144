"""The state of a schedule that has other schedules inside of it.

torch's own (`SequentialLR`, `ChainedScheduler`) have the states of their parts in their `state_dict`. A class of a
script's or a library's inherits `LRScheduler.state_dict`, which gives all attributes: with a schedule among them
(`after_scheduler`) that is an object, which no commit can hold. Invariant: what `state_of` gives contains no schedule,
and `load` leaves the script's own objects in their places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from everstep.checkpoint.state.refilling import in_classes_of


def state_of(schedule: LRScheduler) -> dict[str, Any]:
    """Its `state_dict`, with each schedule in it replaced by that one's."""
    found: dict[str, Any] = _packed(schedule.state_dict(), (schedule,))
    return found


def load(schedule: LRScheduler, state: Mapping[str, Any]) -> None:
    """The inverse of `state_of`."""
    _load(schedule, state, (schedule,))


def parts_of(schedule: LRScheduler) -> Iterator[LRScheduler]:
    """The schedules among its attributes whose state is in its own."""
    kept = schedule.state_dict()
    for name, value in vars(schedule).items():
        if name in kept:
            each = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            yield from (one for one in each if isinstance(one, LRScheduler))


def _packed(value: Any, outside: tuple[LRScheduler, ...]) -> Any:
    if isinstance(value, LRScheduler):
        # One that contains itself stays as it is, and is refused by name as what no commit can hold.
        return value if value in outside else _packed(value.state_dict(), (*outside, value))
    if isinstance(value, dict):
        return {key: _packed(one, outside) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_packed(one, outside) for one in value)
    return value


def _load(schedule: LRScheduler, state: Mapping[str, Any], outside: tuple[LRScheduler, ...]) -> None:
    live = schedule.state_dict()
    schedule.load_state_dict(in_classes_of(live, _unpacked(live, state, outside)))


def _unpacked(live: Any, saved: Any, outside: tuple[LRScheduler, ...]) -> Any:
    if isinstance(live, LRScheduler) and isinstance(saved, Mapping):
        if live not in outside:
            _load(live, saved, (*outside, live))
        return live
    if isinstance(live, dict) and isinstance(saved, Mapping):
        return {key: _unpacked(live.get(key), one, outside) for key, one in saved.items()}
    if type(live) in (list, tuple) and isinstance(saved, list | tuple) and len(live) == len(saved):
        return type(live)(_unpacked(one, other, outside) for one, other in zip(live, saved, strict=True))
    return saved
