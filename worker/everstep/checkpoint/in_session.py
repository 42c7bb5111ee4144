"""What a session does with its Checkpointer beyond what a script calls: it goes on in another world, and keeps small
objects beside commits and below the URL.

Invariant: nothing here changes what a commit holds.
"""

from __future__ import annotations

import logging
from functools import partial

from everstep.checkpoint.checkpointer import Checkpointer
from everstep.checkpoint.format.layout import attachment_name
from everstep.checkpoint.handle import Committed, SaveHandle
from everstep.checkpoint.log.opening import InRound
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.save import at_exit
from everstep.checkpoint.state.holders import Holders
from everstep.storage import StorageError
from everstep.storage.errors import NotFound

log = logging.getLogger("everstep.checkpoint")


class InSession:
    """A Checkpointer that belongs to a session: the session compares the ranks' state itself, and waits for the last
    save itself.

    Attachments lie beside the shards of a commit, in the folder of the save, and go with it when it is deleted. Nobody
    needs them to read the commit: what a store does not take or give of them is logged, and costs nothing else.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self._store = checkpointer._store
        checkpointer._by_session = True
        at_exit.forget(checkpointer)

    def move(self, ranks: Ranks, round_: int, rendezvous: str = "") -> None:
        """Go on in another world, that of round `round_`. Its members have the state of this process, or get it, so
        nothing is restored. The next save takes the log again, in that round. It raises `NewerCommit` if others have
        committed a later step meanwhile. A save in flight is given up; it becomes a commit only if all of it was
        written by then."""
        own = self._checkpointer
        if own._writer is not None:
            own._writer.abandon()
            own._writer = None
        own._owner.end_sign()
        own._loader.move()
        own._owner.move(ranks, InRound(round_, rendezvous))
        own._sequence, own._last = 0, -1
        own._late_metrics.move(ranks.rank)
        own._snapshots.holders = Holders()

    def ends(self) -> None:
        """Training is over: what is saved now, or in flight, is its last state."""
        self._checkpointer._life.ends = True

    def due_by_steps(self, step: int) -> bool:
        """Whether a save is due after `step` by its number."""
        return self._checkpointer._policy.by_steps(step)

    def newest(self) -> int | None:
        """The step of the newest commit, of any writer. Not collective; raises `StorageError`."""
        commit = self._checkpointer.latest()
        return commit.step if commit is not None else None

    def has_save(self, step: int) -> bool:
        """Whether metrics of this step can be added."""
        return self._checkpointer._late_metrics.knows(step)

    def put(self, name: str, data: bytes) -> str:
        """Write an object that belongs to no commit, `name` below the URL. Returns its URL. For any rank and thread."""
        self._store.put(name, data)
        return f"{self._store.url.rstrip('/')}/{name}"

    def attach(self, handle: SaveHandle, name: str, data: bytes, *, now: bool = False) -> None:
        """Put `data` beside the shards of a save, once it is a commit. Only on rank 0. `now`: the save is over; write
        at once."""
        if not now:
            if self._checkpointer._writer is not None:
                self._checkpointer._writer.later(partial(self.attach, handle, name, data, now=True))
        elif isinstance(handle.outcome, Committed):
            self._put_beside(handle.save_id, name, data)

    def get(self, name: str, most: int) -> bytes | None:
        """The first `most` bytes of an object that belongs to no commit; None if there is none. Raises
        `StorageError`."""
        try:
            return self._store.get(name, 0, most)
        except NotFound:
            return None

    def attached(self, name: str) -> bytes | None:
        """The attachment of the commit that `restore` has loaded. Not collective."""
        if not (restored := self._checkpointer._restored_id):
            return None
        try:
            return self._store.get(attachment_name(restored, name))
        except NotFound:
            return None
        except StorageError as e:
            log.warning("%s was not read: %s", attachment_name(restored, name), e)
            return None

    def attach_to_restored(self, name: str, data: bytes) -> None:
        """Put `data` beside the commit that `restore` has loaded, now."""
        if restored := self._checkpointer._restored_id:
            self._put_beside(restored, name, data)

    def _put_beside(self, save_id: str, name: str, data: bytes) -> None:
        try:
            self._store.put(attachment_name(save_id, name), data)
        except StorageError as e:
            log.warning("%s was not put beside the commit: %s", attachment_name(save_id, name), e)
