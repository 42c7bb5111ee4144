"""Load marks count how often a run loaded a commit and then died. A state may be undamaged and still kill each run.

Before a commit is loaded, a small object marks the load. It is deleted when the run works: with its next commit, after
`SURVIVED_STEPS` steps, or at an orderly end. The marks that are left are of runs that died, and a commit with too many
of them is stepped over. Only rank 0 uses this. Invariant: a mark is written before the load and never counted twice.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from everstep.checkpoint.format import wire
from everstep.checkpoint.format.layout import LOADS, load_name, load_numbers
from everstep.checkpoint.format.manifest import NONE, VERSION, OpenRecord
from everstep.storage import ObjectStore, StorageError

log = logging.getLogger("everstep.checkpoint")

SURVIVED_STEPS: Final = 10


class Loads:
    """The marks below one store, as the writer of `own` sees and makes them."""

    def __init__(self, store: ObjectStore, own: OpenRecord) -> None:
        self._store = store
        self._own = own
        self._marked = NONE

    def failed(self) -> dict[int, int]:
        """Commit → how many earlier starts loaded it and left their mark."""
        numbers = (load_numbers(info.name) for info in self._store.list(LOADS))
        return Counter(n[0] for n in numbers if n is not None and n[1] != self._own.n)

    def begin(self, commit: int) -> None:
        """Mark that this run is about to load `commit`; remove its mark of a commit that it tried before."""
        self.end()
        body: dict[str, wire.Json] = {"version": VERSION, "n": commit, "open": self._own.n, "at": self._own.at}
        self._store.put(load_name(commit, self._own.n), wire.encode(body))
        self._marked = commit

    def end(self) -> None:
        """Remove this run's mark from the loaded commit, because it did no harm or was not used."""
        if (marked := self._marked) != NONE:
            self._store.delete(load_name(marked, self._own.n))
            self._marked = NONE

    def end_quietly(self) -> None:
        """`end`, where nobody can do anything about a store that fails."""
        try:
            self.end()
        except StorageError as e:
            log.warning("the mark of the commit that was loaded stays: %s", e)

    def clear(self, commit: int) -> None:
        """Remove the marks of commits older than `commit`, which is the newest now."""
        self._marked = NONE
        for info in self._store.list(LOADS):
            numbers = load_numbers(info.name)
            if numbers is not None and numbers[0] < commit:
                self._store.delete(info.name)


Later = Callable[[Callable[[], object]], object]  # does something on the writer's thread


class LoadMark:
    """The mark of a Checkpointer's load. It is removed when the run works, or when the load failed for a reason that is
    not the commit's."""

    def __init__(self) -> None:
        self._loading: Loads | None = None  # of a load that has not ended
        self._over = False  # the run has ended in order: a state that is loaded afterwards is not trained on
        self._proved: int | None = None  # at this step the loaded state counts as harmless
        self.loads: Loads | None = None  # of rank 0; the writer removes the marks

    def begin(self, store: ObjectStore, own: OpenRecord, *, has_writer: bool) -> Loads:
        """A load begins. With a writer, the marks stay the same object, because the writer removes them."""
        self._loading = self.loads if self.loads is not None and has_writer else Loads(store, own)
        return self._loading

    def failed(self) -> None:
        """The load failed for a reason that is not the commit's: remove its mark."""
        if self._loading is not None:
            with contextlib.suppress(StorageError):
                self._loading.end()

    def loaded(self, step: int | None, rank: int) -> None:
        """The load has ended with the state after `step`; None: there was nothing to load."""
        loads, self._loading = self._loading, None
        if self._over and loads is not None:
            loads.end_quietly()
        elif rank == 0 and step is not None:
            self.loads, self._proved = loads, step + SURVIVED_STEPS

    def give_up(self) -> None:
        """A load failed because of other processes, and this process lives: remove its mark."""
        if self._loading is not None:
            self._loading.end_quietly()
            self._loading = None

    def alive(self, step: int, later: Later | None) -> None:
        """Training has reached `step`. After `SURVIVED_STEPS` steps the loaded state counts as harmless."""
        if self._proved is not None and step >= self._proved:
            assert self.loads is not None
            self._proved = None
            if later is not None:
                later(self.loads.end)
            else:  # there is no writer: the world has changed, and only the next save makes one
                threading.Thread(target=self.loads.end_quietly, name="everstep-note", daemon=True).start()

    def close(self, later: Later) -> None:
        """The run ends in order."""
        self._over = True
        if self._proved is not None and self.loads is not None:
            later(self.loads.end)
