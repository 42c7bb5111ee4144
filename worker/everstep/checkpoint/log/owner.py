"""Which run has the log, as its process sees it: in which world and round it took the log, and what it found there.

Invariant: the log is taken once for a world, by rank 0 for all of its ranks, before any of them saves.
"""

from __future__ import annotations

import os
import time
import uuid
import weakref
from typing import Any

from everstep.checkpoint.errors import Fenced, Occupied, OwnerUnknown
from everstep.checkpoint.format.manifest import OpenRecord
from everstep.checkpoint.format.times import stamp
from everstep.checkpoint.handle import Events
from everstep.checkpoint.log import opening
from everstep.checkpoint.log.alive import Sign
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.opening import InRound, Settings
from everstep.checkpoint.log.shared import check_shared
from everstep.checkpoint.ranks import Ranks, join
from everstep.storage import ObjectStore, StoreUnusable


class Owner:
    """`said`: the process group, rank and world size that the script gave. `probe`: whether the store is a URL's, which
    is tried out, and gets a sign of life."""

    def __init__(
        self, store: ObjectStore, log: CommitLog, settings: Settings, said: tuple[Any, int | None, int | None],
        probe: bool, events: Events,
    ) -> None:  # fmt: skip
        self._store, self._log, self._settings, self._events = store, log, settings, events
        self._said, self._probe = said, probe
        self.ranks: Ranks | None = None
        self.record: OpenRecord | None = None
        self.newest = -1  # the step of the newest commit when the log was taken, until the state is of it or later
        self.round: InRound | None = None  # of the world that this run has moved to; it began in its environment's
        self._sign: Sign | None = None  # of rank 0
        self._begins = True  # until this process has been in a world that had the log

    def take(self, restores: bool = False) -> tuple[OpenRecord, Ranks]:
        """Take the log once, by rank 0; its open record is every rank's. Collective.

        Only a process that begins asks whether another run lives on the URL. A world that goes on from memory after its
        rendezvous was lost may meet a member that it left out there, and is right.
        """
        if self.ranks is None:
            self.ranks = join(*self._said)
        ranks = self.ranks
        if self.record is None:
            round_ = self.round or InRound.of(os.environ)
            claim = opening.claim(uuid.uuid4().hex, round_, ranks.world_size, stamp(time.time()), os.environ)
            probed = self._store if self._probe else None
            begins = self._begins and (restores or self.round is None)
            try:
                own, self.newest = opening.open_together(self._log, probed, self._settings, claim, ranks, begins)
                check_shared(self._store, own, ranks)
                self.record, self._begins = own, False
            except (Fenced, Occupied, OwnerUnknown, StoreUnusable) as e:
                # All end the process; a person should find the reason where the exit code is shown.
                self._events("fenced" if isinstance(e, Fenced) else "unusable", error=e)
                raise
            if ranks.rank == 0 and probed is not None:
                self._sign = Sign(self._store, self.record)
                weakref.finalize(self, self._sign.stop.set)
            self._events("opened", n=self.record.n, round=self.record.round, writer=self.record.writer)
        return self.record, ranks

    def move(self, ranks: Ranks, round_: InRound) -> None:
        """The log is to be taken again, in another world."""
        self.round, self.ranks, self.record, self.newest = round_, ranks, None, -1

    def end_sign(self, timeout: float = 0.0) -> None:
        if self._sign is not None:
            self._sign.end(timeout)
            self._sign = None
