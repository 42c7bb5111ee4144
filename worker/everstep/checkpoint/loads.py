"""Load marks: how often a commit was loaded by a run that then came to nothing. A state may be whole and still poison.

Before a commit is loaded, a small object says so; it goes when the run has proved itself: with its next commit, after
`SURVIVED_STEPS` steps, or with an orderly end. What is left are starts that died, and a commit with too many of them is
stepped over. Only rank 0 uses this. Invariant: a mark is written before the load and never counted twice.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from everstep.checkpoint import wire
from everstep.checkpoint.layout import LOADS, load_name, load_numbers
from everstep.checkpoint.manifest import NONE, VERSION, OpenRecord
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
        """This run is about to load `commit`, and no other that it tried."""
        self.end()
        body: dict[str, wire.Json] = {"version": VERSION, "n": commit, "open": self._own.n, "at": self._own.at}
        self._store.put(load_name(commit, self._own.n), wire.encode(body))
        self._marked = commit

    def end(self) -> None:
        """What was loaded is no poison, or was not used: take this run's mark back."""
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
        """`commit` is the newest now: what older ones did to earlier runs no longer matters."""
        self._marked = NONE
        for info in self._store.list(LOADS):
            numbers = load_numbers(info.name)
            if numbers is not None and numbers[0] < commit:
                self._store.delete(info.name)
