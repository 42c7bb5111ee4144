"""The census of a run whose loop a framework owns."""

from __future__ import annotations

from collections.abc import Callable

from everstep.train.guards.untracked.untracked_state import UntrackedStateCheck


class Uncounted(UntrackedStateCheck):
    """The framework holds what training moves, and it is tracked; what it holds besides is no business of ours."""

    def __init__(self) -> None:
        super().__init__({})

    def start(self) -> None: ...
    def begins(self) -> None: ...
    def over(self) -> None: ...
    def moved(self) -> None: ...
    def completed(self, world_size: int, same: Callable[[int], bool]) -> None: ...
