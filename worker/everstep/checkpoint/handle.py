"""A save as the script sees it: its handle, its outcome, and the hook that gets the events."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from everstep.checkpoint.errors import CheckpointError, SaveFailed
from everstep.checkpoint.flag import Flag
from everstep.contract import unsaved


class Events(Protocol):
    """The hook that gets the events; see `Checkpointer`."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Committed:
    """The checkpoint exists, since `at` (seconds since the epoch), as record `n`."""

    step: int
    n: int
    at: float
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Written:
    """This rank's part is durable. Whether the save becomes a commit, the coordinator decides."""

    step: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The save failed with `error`."""

    step: int
    error: Exception


Outcome = Committed | Written | Failed


class SaveHandle:
    """One save. `outcome` is None while it is in flight."""

    def __init__(self, step: int, outcome: Outcome | None = None, save_id: str = "", called_at: str = "") -> None:
        self.step = step
        self.save_id = save_id  # the folder of its shards; empty if nothing was begun
        self.called_at = called_at  # the script's line; empty if a session saves
        self._outcome = outcome
        self._done = Flag()
        self._by: Collection[threading.Thread] = ()  # the threads of the writer that does this save
        self._was_raised = False  # `wait` has raised the error, if there is one
        if outcome is not None:
            self._done.set()

    @property
    def outcome(self) -> Outcome | None:
        return self._outcome

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> Outcome:
        """Block until the save is over. Raises the error of a failed save (`SaveFailed`, `Fenced`), and `TimeoutError`
        after `timeout` seconds."""
        self._refuse_itself()
        if not self._done.wait(timeout):
            raise TimeoutError(f"the save of step {self.step} is still in flight after {timeout} s")
        assert self._outcome is not None
        self._was_raised = True
        match self._outcome:
            case Failed(_, error):
                unsaved.forget(self)  # the script knows
                raise error
            case outcome:
                return outcome

    def _refuse_itself(self) -> None:
        """Raises `CheckpointError` on the thread that writes this save, where hooks run: it would wait for itself."""
        if threading.current_thread() in self._by and not self.done():
            raise CheckpointError(
                f"the save of step {self.step} is waited for in on_event, which runs on the thread that writes it: it "
                "would wait for itself. Note the event there, and wait, save or close in a thread of the script"
            )

    def unraised_error(self) -> Exception | None:
        """The error of a failed save that `wait` has not raised yet; also an error if the save is still in flight."""
        match self._outcome:
            case None:
                return SaveFailed(f"step {self.step} is not saved: its save is still in flight; close(timeout=…) waits")
            case Failed(_, error) if not self._was_raised:
                return error
        return None

    def finish(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._done.set()
