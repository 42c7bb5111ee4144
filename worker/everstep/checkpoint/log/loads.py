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
from everstep.checkpoint.format.manifest import VERSION, OpenRecord
from everstep.storage import ObjectStore, StorageError

log = logging.getLogger("everstep.checkpoint")

SURVIVED_STEPS: Final = 10


Later = Callable[[Callable[[], object]], object]  # does something on the writer's thread


class LoadMark:
    """The mark of a Checkpointer's load. It is removed when the run works, or when the load failed for a reason that is
    not the commit's."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._own: OpenRecord | None = None
        self._marked: str | None = None  # the mark's name
        self._loading = False
        self._loaded = False  # a commit was loaded
        self._over = False  # the run has ended in order: a state that is loaded afterwards is not trained on
        self._proved: int | None = None  # at this step the loaded state counts as harmless

    def begin(self, own: OpenRecord) -> None:
        """A load begins, by the writer of `own`. The mark of the writer that this process was before stays: in its
        world a process has died, and the commit may be why."""
        if self._own is not None and self._own.n != own.n:
            self._marked = None
        self._own, self._loading = own, True

    def deaths(self) -> dict[int, int]:
        """Commit → how many earlier starts loaded it and left their mark."""
        assert self._own is not None
        numbers = (load_numbers(info.name) for info in self._store.list(LOADS))
        return Counter(n[0] for n in numbers if n is not None and n[1] != self._own.n)

    def mark(self, commit: int) -> None:
        """Mark that this run is about to load `commit`; remove its mark of a commit that it tried before."""
        assert self._own is not None
        self._remove()
        body: dict[str, wire.Json] = {"version": VERSION, "n": commit, "open": self._own.n, "at": self._own.at}
        name = load_name(commit, self._own.n)
        self._store.put(name, wire.encode(body))
        self._marked = name

    def failed(self) -> None:
        """The load failed for a reason that is not the commit's: remove its mark."""
        with contextlib.suppress(StorageError):
            self._remove()

    def loaded(self, step: int | None, rank: int) -> None:
        """The load has ended with the state after `step`; None: there was nothing to load."""
        self._loading = False
        if self._over:
            self._remove_quietly()
        elif rank == 0 and step is not None:
            self._loaded, self._proved = True, step + SURVIVED_STEPS

    def give_up(self) -> None:
        """A load failed because of other processes, and this process lives: remove its mark."""
        if self._loading:
            self._loading = False
            self._remove_quietly()

    def alive(self, step: int, later: Later | None) -> None:
        """Training has reached `step`. After `SURVIVED_STEPS` steps the loaded state counts as harmless."""
        if self._proved is not None and step >= self._proved:
            self._proved = None
            if later is not None:
                later(self._remove)
            else:  # there is no writer: the world has changed, and only the next save makes one
                threading.Thread(target=self._remove_quietly, name="everstep-note", daemon=True).start()

    def clear(self, commit: int) -> None:
        """Remove the marks of commits older than `commit`, which is the newest now."""
        if not self._loaded:
            return
        self._marked = None
        for info in self._store.list(LOADS):
            numbers = load_numbers(info.name)
            if numbers is not None and numbers[0] < commit:
                self._store.delete(info.name)

    def close(self, later: Later) -> None:
        """The run ends in order."""
        self._over = True
        if self._proved is not None:
            later(self._remove)

    def _remove(self) -> None:
        """Remove this run's mark from the commit, because it did no harm or was not used."""
        if (marked := self._marked) is not None:
            self._store.delete(marked)
            if self._marked == marked:  # another thread may have marked the next load meanwhile
                self._marked = None

    def _remove_quietly(self) -> None:
        """`_remove`, where nobody can do anything about a store that fails."""
        try:
            self._remove()
        except StorageError as e:
            log.warning("the mark of the commit that was loaded stays: %s", e)
