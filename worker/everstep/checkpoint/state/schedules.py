"""The state of a schedule that has other schedules inside of it.

The `state_dict` of torch's own (`SequentialLR`, `ChainedScheduler`) has the states of their parts. A class of a script
or a library inherits `LRScheduler.state_dict`, which returns all attributes. If one of these is a schedule
(`after_scheduler`), the state contains an object, which no commit can hold. Invariant: the result of `state_of`
contains no schedule, and `load` keeps the script's own objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from everstep.checkpoint.state.refilling import in_classes_of


def state_of(schedule: LRScheduler) -> dict[str, Any]:
    """The `state_dict` of a schedule, with each schedule in it replaced by its own `state_dict`."""
    state: dict[str, Any] = _packed(schedule.state_dict(), (schedule,))
    return state


def load(schedule: LRScheduler, state: Mapping[str, Any]) -> None:
    """The inverse of `state_of`."""
    _load(schedule, state, (schedule,))


def parts_of(schedule: LRScheduler) -> Iterator[LRScheduler]:
    """The schedules among the attributes that `state_dict` saves."""
    kept = schedule.state_dict()
    for name, value in vars(schedule).items():
        if name in kept:
            each = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            yield from (item for item in each if isinstance(item, LRScheduler))


def _packed(value: Any, outside: tuple[LRScheduler, ...]) -> Any:
    if isinstance(value, LRScheduler):
        # A schedule that contains itself is left as it is. It is refused by name later: no commit can hold it.
        return value if value in outside else _packed(value.state_dict(), (*outside, value))
    if isinstance(value, dict):
        return {key: _packed(item, outside) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_packed(item, outside) for item in value)
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
        return {key: _unpacked(live.get(key), item, outside) for key, item in saved.items()}
    if type(live) in (list, tuple) and isinstance(saved, list | tuple) and len(live) == len(saved):
        return type(live)(_unpacked(item, other, outside) for item, other in zip(live, saved, strict=True))
    return saved
