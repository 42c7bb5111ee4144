"""Steps and record numbers as callers give them."""

from __future__ import annotations

import operator

from everstep.checkpoint.manifest import MAX_STEP


def whole_step(step: object) -> int:
    """`step` as the log can hold it: an integer of any kind (numpy's, a tensor of one element). Raises `ValueError`."""
    number = _integer(step)
    if number is None or not 0 <= number <= MAX_STEP:
        raise ValueError(f"step={step!r}: an integer from 0 to 2**62 is expected, as completed steps are counted")
    return number


def named_commit(step: object, n: object) -> tuple[int | None, int | None]:
    """The step and the record number that a commit is asked for by. Raises `TypeError` for what is no integer: `"5"`
    would fit no commit, and the error would be that there is none."""
    for name, value in (("step", step), ("n", n)):
        if value is not None and _integer(value) is None:
            raise TypeError(f"{name}={value!r}: an integer is expected, and this is a {type(value).__name__}")
    return (None if step is None else _integer(step)), (None if n is None else _integer(n))


def _integer(value: object) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
