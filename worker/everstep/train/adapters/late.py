"""State that a restore brings before the moment at which it can be used.

A restore loads everything at once. Frameworks make their optimizers later, and fetching the first batch draws random
numbers. Invariants: what was loaded is applied exactly once; until then nothing else sees it.
"""

from __future__ import annotations

from typing import Any

from everstep.checkpoint import RngState


class Late:
    """Stands in a state for an object that does not exist yet; `bind` it when it does."""

    def __init__(self) -> None:
        self._target: Any = None
        self._loaded: dict[str, Any] | None = None

    def bind(self, target: Any) -> None:
        """From now on this is `target`, with what was loaded in it."""
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
    """The random generators of this rank as they are when saved; what was loaded is put in place by `apply`."""

    everstep_per_rank = True

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def apply(self) -> None:
        """Put the loaded generators in place, at the first call. Does nothing if nothing was loaded."""
        if self._loaded is not None:
            RngState().load_state_dict(self._loaded)
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        return RngState().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state


class RngAt:
    """The random generators of this rank at a moment that is past: `keep` them then, save them any time after."""

    everstep_per_rank = True

    def __init__(self) -> None:
        self._kept = RngState().state_dict()

    def keep(self) -> None:
        self._kept = RngState().state_dict()

    def apply(self) -> None:
        """Go back to that moment."""
        RngState().load_state_dict(self._kept)

    def state_dict(self) -> dict[str, Any]:
        return self._kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = state
