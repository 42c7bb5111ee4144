"""Waits, in a training process of a rehearsal, for the saves in flight.

What a run goes on from after a loss must not depend on how fast the machine writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep.checkpoint import Checkpointer
from everstep.checkpoint.handle import Outcome, SaveHandle, Written
from everstep.rehearse.record import LATE, OVER
from everstep.train.coordination.save_schedule import SaveSchedule

LOOK_SECONDS = 0.01


class Saves:
    """Those that this process has begun. `seconds`: the longest wait."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._newest: dict[int, str] = {}  # of each Checkpointer, by its id: the save that it began last
        self.at_once = False  # a save is waited for when it begins, until the world changes

    def install(self) -> None:
        """Wrap the beginning and the end of a save, in this process."""
        save, finish, move = Checkpointer.save, SaveHandle.finish, SaveSchedule.move

        def saved(checkpointer: Checkpointer, *arguments: Any, **options: Any) -> SaveHandle:
            handle = save(checkpointer, *arguments, **options)
            self._newest[id(checkpointer)] = handle.save_id
            if self.at_once:
                self.wait()
            return handle

        def finished(handle: SaveHandle, outcome: Outcome) -> None:
            # Only rank 0 knows when there is a commit. The others know that their part is written, or that it failed.
            if handle.save_id and not isinstance(outcome, Written):
                (self._folder / f"{OVER}{handle.save_id}").touch()
            finish(handle, outcome)

        def moved(schedule: SaveSchedule, *arguments: Any) -> None:
            if self.at_once and schedule.saved_step is not None:
                schedule.committed = schedule.saved_step  # rank 0 knows it alone, and the others would save again
            self.at_once = False
            self.forget()
            move(schedule, *arguments)

        wrapped: tuple[tuple[Any, str, Any], ...] = (
            (Checkpointer, "save", saved), (SaveHandle, "finish", finished), (SaveSchedule, "move", moved),
        )  # fmt: skip
        for owner, name, ours in wrapped:
            setattr(owner, name, ours)

    def forget(self) -> None:
        """The world is another one: a save of the world before may never end."""
        self._newest.clear()

    def wait(self) -> None:
        """Until each newest save is a commit or has failed."""
        waiting = [self._folder / f"{OVER}{one}" for one in self._newest.values() if one]
        self.wait_for(lambda: all(over.exists() for over in waiting))
        self.forget()

    def wait_for(self, condition: Callable[[], bool], times: float = 1.0) -> bool:
        """Until it holds, at most so many times as long as for a save; if it does not in time, that is noted. Returns
        whether it did."""
        deadline = time.monotonic() + self._seconds * times
        while not condition():
            if time.monotonic() > deadline:
                (self._folder / LATE).touch()
                return False
            time.sleep(LOOK_SECONDS)
        return True
