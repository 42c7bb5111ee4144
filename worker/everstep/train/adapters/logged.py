"""Finds what Lightning's trainer has logged since the last call.

Its `callback_metrics` keep the results of earlier validations. Invariant: a number is returned once, so it is in the
commit of the step after which it was measured, and in no later one.
"""

from __future__ import annotations

from typing import Any


class Logged:
    """The log of one trainer."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def new(self, trainer: Any) -> dict[str, Any]:
        now = dict(trainer.callback_metrics)
        changed = {name: value for name, value in now.items() if self._before.get(name) is not value}
        self._before = now  # kept, so that no new value gets the identity of an old one
        return changed
