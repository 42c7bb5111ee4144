"""What Lightning's trainer has logged since it was asked last.

Its `callback_metrics` go on holding what an earlier validation found. Invariant: a number is given out once, so that it
is in the commit of the step after which it was measured, and in no later one.
"""

from __future__ import annotations

from typing import Any


class Logged:
    """Of one trainer."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def new(self, trainer: Any) -> dict[str, Any]:
        now = dict(trainer.callback_metrics)
        found = {name: value for name, value in now.items() if self._before.get(name) is not value}
        self._before = now  # kept, so that no other value gets the identity of one of them
        return found
