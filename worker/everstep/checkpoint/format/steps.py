"""Steps, record numbers and keys as callers give them, and what is wrong with them."""

from __future__ import annotations

import operator
from collections.abc import Collection

from everstep.checkpoint.errors import SettingUnusable, StateMismatch
from everstep.checkpoint.format.manifest import MAX_STEP


def whole_step(step: object) -> int:
    """`step` as the log can hold it: an integer of any kind (numpy's, a tensor of one element). Raises `ValueError`."""
    number = _integer(step)
    if number is None or not 0 <= number <= MAX_STEP:
        raise ValueError(f"step={step!r}: an integer from 0 to 2**62 is expected, as completed steps are counted")
    return number


def named_commit(step: object, n: object) -> tuple[int | None, int | None]:
    """The step and the record number by which a caller names a commit. Raises `TypeError` for anything but an integer:
    `"5"` would fit no commit, and the error would say that there is none."""
    for name, value in (("step", step), ("n", n)):
        if value is not None and _integer(value) is None:
            raise TypeError(f"{name}={value!r}: an integer is expected, and this is a {type(value).__name__}")
    return (None if step is None else _integer(step)), (None if n is None else _integer(n))


def _integer(value: object) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_order(step: int, last: int, url: str) -> None:
    """Raises `SettingUnusable` for a save of a step before that of the state that was saved or restored last."""
    if step < last:
        raise SettingUnusable(
            f"{url}: save({step}) after step {last} was saved or restored: the newest commit would be of an older "
            "step. To go back, call restore(state, step=…) before; a new run needs another URL"
        )


def lost_keys(step: int, before: Collection[str], state: Collection[str]) -> StateMismatch | None:
    """The complaint about keys that the restored or last saved state had, and that this one lacks."""
    if lost := sorted(set(before) - set(state)):
        return StateMismatch(
            f"step {step} was not saved: the state lacks {', '.join(map(repr, lost))}, which the state of the "
            "restore() or save() before had. A commit takes the place of those before it, so each has to hold all. "
            "Pass the same keys; a part is saved for others by a Checkpointer with another URL"
        )
    return None


def unrestored_keys(step: int, left: Collection[str], state: Collection[str]) -> StateMismatch | None:
    """The complaint about keys whose saved values the restore left out, and that this state has all the same."""
    if late := sorted(set(left) & set(state)):
        keys = ", ".join(map(repr, late))
        return StateMismatch(
            f"step {step} was not saved: {keys} came into the state after restore(), which has left out what the "
            f"commit holds of it: the run would go on with new values, and save them in place of the trained ones. "
            f"Put {keys} into the state before restore(state). To begin it anew on purpose, write restore(state, "
            f"exclude=[{keys}])"
        )
    return None
