"""Looks for what a new process could not go on with: in the text of the script's loop, and in its global variables.

`loop_check` reads the text, once before the first step, and once at the first loop over the steps of an epoch.
`hidden_changes` finds what changes by no line of it, and `hidden_attributes` what changes by lines that the loop is
not seen to reach.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

from everstep.recovery.errors import LoopError
from everstep.train.guards.script_text import loop_check
from everstep.train.guards.script_text.hidden_attributes import HiddenAttributes
from everstep.train.guards.script_text.hidden_changes import HiddenChanges


class ScriptCheck:
    """Of one run. `changes`: the world may change. `goes_on`: state is saved, or sent to other processes; else nothing
    is refused."""

    def __init__(
        self, state: Mapping[str, Any], is_untracked: Callable[..., bool], *, changes: bool, goes_on: bool
    ) -> None:
        self._state, self._is_untracked = state, is_untracked
        self._changes, self._goes_on = changes, goes_on
        self._hidden = HiddenChanges(is_untracked)
        self._attributes = HiddenAttributes()
        self._read_epoch = False
        self.function: Any = None  # that takes a step, in `Run.train`
        self.called: list[Any] = []  # the functions given to `Run.evaluate`, called between two steps

    def before_steps(self, frame: types.FrameType, data: Collection[int], *, nested: bool) -> LoopError | None:
        """The error in the text of the loop that `frame` is called from. It is found before others wait for this
        process, and raised on all of them. `data`: ids of the datasets that are trained on. `nested`: the loop over
        steps is in one over epochs."""
        if not self._goes_on:
            return None
        try:
            self._read(frame, None if nested else self.function, data, nested=False)
            loop_check.check_modules(self._state, self._is_untracked)
        except LoopError as e:
            return e
        return None

    def epoch_begins(self, frame: types.FrameType, data: Collection[int]) -> None:
        """The steps of an epoch begin. Raises `LoopError` for an error in the text of the loop over them."""
        if self._goes_on and not self._read_epoch:
            self._read_epoch = True
            self._read(frame, self.function, data, nested=True)

    def step_completed(self, frame: types.FrameType) -> None:
        """Raises `LoopError` for a variable that changes by no line of the text, and for an attribute that affects
        training and changes by no line that the loop is seen to reach."""
        if self._goes_on:
            self._hidden.completed(frame)
            if moved := self._attributes.completed(frame):
                loop_check.check_hidden(frame, self.function, self._state, self._is_untracked, moved)

    def _read(self, frame: types.FrameType, function: Any, data: Collection[int], *, nested: bool) -> None:
        loop_check.check_loop(
            frame, function, self._state, self._is_untracked, self.called, data, changes=self._changes, nested=nested
        )
