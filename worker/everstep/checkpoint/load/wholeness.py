"""Whether the state of the script is that of one step: a restore that is cut off leaves parts of two.

Who saves such a mixture commits a step that never existed, and the next run goes on from it. Invariant: from the first
change by a restore on, no save of what it changes is taken, until a restore of the same parts has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.load.selection import Selection


class Wholeness:
    def __init__(self) -> None:
        self._loads = False  # a restore is under way
        self._torn: list[tuple[frozenset[str], Selection]] = []  # the keys that a restore has begun to change

    @contextmanager
    def loading(self, state: Collection[str], chosen: Selection) -> Iterator[Callable[[], None]]:
        """A restore of this state; what it gives is to be called before the first change. Until then nothing says that
        the state is a mapping."""
        if self._loads:
            raise CheckpointError(
                "restore() is called while another restore() of this Checkpointer is under way, as by a handler of "
                "signals: call it after that one has returned"
            )
        self._loads = True
        try:
            yield lambda: self._torn.append((frozenset(state), chosen))
            done = frozenset(state), chosen
            self._torn = [torn for torn in self._torn if not _covers(done, torn)]
        finally:
            self._loads = False

    def vouched(self) -> None:
        """The caller sees to it that the state is whole."""
        self._torn = []

    def problem(self, step: int, keys: Collection[str]) -> CheckpointError | None:
        """Why a state with these keys is not to be saved."""
        if self._loads:
            return CheckpointError(
                f"step {step} was not saved: restore() is under way, and the state may hold parts of two steps. A "
                "handler of signals that comes within restore() must not save: the commits are as they were, and the "
                "next start restores the newest"
            )
        if not self._torn:
            return None
        torn = sorted({key for held, _ in self._torn for key in held} & set(keys))
        if not torn:
            return None
        return CheckpointError(
            f"step {step} was not saved: a restore() was cut off by an error while it changed the state, so "
            f"{', '.join(torn[:8])} may hold parts of two steps. Call restore() again until it succeeds, or end the "
            "process: its next start restores the newest commit"
        )


def _covers(done: tuple[frozenset[str], Selection], torn: tuple[frozenset[str], Selection]) -> bool:
    return done[0] >= torn[0] and (done[1].whole or done[1] == torn[1])
