"""Keeps restored state until it can be used.

A restore loads everything at once. But frameworks make their optimizers later, and fetching the first batch draws
random numbers. Invariants: loaded state is applied exactly once, and nothing else sees it before.
"""

from __future__ import annotations

from typing import Any

from everstep.checkpoint import RngState


class Late:
    """A placeholder in a state for an object that does not exist yet. `bind` it when it does."""

    def __init__(self) -> None:
        self._target: Any = None
        self._loaded: dict[str, Any] | None = None

    @property
    def everstep_target(self) -> Any:
        """The object that it stands for; None until `bind`."""
        return self._target

    def bind(self, target: Any) -> None:
        """Stand for `target` from now on, and load the restored state into it."""
        self._target = target
        if self._loaded is not None:
            target.load_state_dict(self._loaded)
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._target.state_dict() if self._target is not None else {}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._target is None:
            self._loaded = state
        else:
            self._target.load_state_dict(state)


class LateRng:
    """The random generators of this rank, saved as they are at that moment. `apply` restores loaded ones."""

    everstep_per_rank = True

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def apply(self) -> None:
        """Restore the loaded generators, at the first call only. Does nothing if none were loaded."""
        if self._loaded is not None:
            RngState().load_state_dict(self._loaded)
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        return RngState().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state


class RngAt:
    """The random generators of this rank at an earlier moment: `keep` them then, and save them at any later time."""

    everstep_per_rank = True

    def __init__(self) -> None:
        self._kept = RngState().state_dict()

    def keep(self) -> None:
        self._kept = RngState().state_dict()

    def apply(self) -> None:
        """Restore the generators of that moment."""
        RngState().load_state_dict(self._kept)

    def state_dict(self) -> dict[str, Any]:
        return self._kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = state
