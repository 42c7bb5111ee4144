"""The untracked-state check of a run whose loop belongs to a framework: there is none.

What the script's own objects keep beside the framework's state is looked at by `script_state`.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.train.guards.untracked.untracked_state import UntrackedStateCheck


class Uncounted(UntrackedStateCheck):
    """Finds nothing: all that training changes belongs to the framework, and is tracked. It says when a step is made,
    which others ask."""

    takes_names = False

    def __init__(self) -> None:
        super().__init__({})

    def start(self) -> None: ...

    def begins(self) -> None:
        self.in_step = True

    def over(self) -> None:
        self.in_step = False

    def moved(self) -> None: ...
    def completed(self, world_size: int, same: Callable[[int], bool]) -> None: ...
