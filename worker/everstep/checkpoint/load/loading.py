"""Loads a commit into the live state: the newest whole one, or the one that was asked for.

Knows nothing of writing. Invariants: what does not fit is refused before anything is changed, unless only an object's
own `load_state_dict` can tell; a load that comes to nothing leaves no mark, as that says nothing about the commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from everstep.checkpoint.errors import CheckpointError, Damaged, Fenced
from everstep.checkpoint.format.manifest import CommitRecord, OpenRecord
from everstep.checkpoint.handle import Events
from everstep.checkpoint.load.casting import check_cast
from everstep.checkpoint.load.fit import fit
from everstep.checkpoint.load.restoring import Guard, asked, candidates, newest_whole
from everstep.checkpoint.load.selection import LoadReport, Selection
from everstep.checkpoint.load.targets import of_all_ranks
from everstep.checkpoint.load.wholeness import Wholeness
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.loads import LoadMark
from everstep.checkpoint.log.opening import Settings
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.retention.catalog import Catalog
from everstep.checkpoint.state.capture import Captured, apply, capture
from everstep.checkpoint.state.holders import Holders
from everstep.checkpoint.state.ties import check_ties
from everstep.contract import refusal
from everstep.storage import ObjectStore, StorageError

logger = logging.getLogger("everstep.checkpoint")

OVERTAKEN: Final = "a newer run has taken the log while this one restored"


def put_into(
    state: Mapping[str, Any], captured: Captured, record: CommitRecord, tensors: dict[str, torch.Tensor], ranks: Ranks,
    chosen: Selection, *, whole: bool,
) -> LoadReport:  # fmt: skip
    """Put what was read of a commit into the state; what was left out. Collective."""
    assert isinstance(record.values, dict)
    fitted = fit(state, captured, record, ranks.rank, chosen)
    check_ties(fitted.live, captured, tensors, ranks)
    if chosen.cast:
        check_cast(state, captured, fitted, tensors, ranks)
    answers = apply(state, record.values, tensors, ranks.rank, whole=whole, bodies=fitted.bodies)
    fitted.judged(answers, chosen)
    return fitted.report()


class Loader:
    """The loads of one Checkpointer, and what they have found about the log's commits."""

    def __init__(self, store: ObjectStore, log: CommitLog, settings: Settings, events: Events) -> None:
        self._store, self._log, self._settings, self._events = store, log, settings, events
        self.mark = LoadMark()
        self._whole = Wholeness()
        self.report = LoadReport()  # what the newest load left out
        self.damaged: set[int] = set()
        self.suspected: set[int] = set()  # whole, and earlier runs that loaded them came to nothing

    def move(self) -> None:
        """Go on in another world, whose members have a whole state or are given one."""
        self.mark.give_up()
        self._whole.vouched()

    def torn(self, step: int, state: Mapping[str, Any]) -> CheckpointError | None:
        """Why the state after `step` may be a mixture of two steps."""
        return self._whole.problem(step, state)

    def load(
        self, state: Mapping[str, Any], own: OpenRecord, ranks: Ranks, chosen: Selection, *, holders: Holders,
        step: int | None, n: int | None, idle: Callable[[], object], end: Callable[[], int], has_writer: bool,
    ) -> CommitRecord | None:  # fmt: skip
        """The commit that `state` is filled from; None if there is none. Collective. `holders` have met for this state.
        Saves of this run's own are waited for by `idle`; commits below record `end()` are looked at."""
        with self._whole.loading(state, chosen) as changes:
            captured = capture(state, ranks.rank)  # what cannot be saved is refused now, not at the first save
            holders.check_cuts(captured, ranks)
            wanted = partial(of_all_ranks, state, captured, ranks, bool(holders.unions), selection=chosen)
            idle()
            passed: list[str] = []

            def told(n: int, reason: str, *, suspected: bool = False) -> None:
                if not suspected and (fenced := self._fenced(own)) is not None:
                    raise fenced
                stepped_over(n, reason, suspected=suspected)

            def unreadable(n: int, reason: str, *, suspected: bool = False) -> None:
                fenced = self._fenced(own)
                if ranks.maximum(int(fenced is not None)):
                    raise fenced or Fenced(OVERTAKEN)
                stepped_over(n, reason, suspected=suspected)

            def stepped_over(n: int, reason: str, *, suspected: bool) -> None:
                passed.append(reason)
                (self.suspected if suspected else self.damaged).add(n)
                logger.error("log record %d is stepped over: %s", n, reason)
                self._events("stepped-over", n=n, error=reason)

            loads = self.mark.begin(self._store, own, has_writer=has_writer)
            guard = Guard(loads, self._settings.max_loads, self._settings.nonfinite)
            named = step is not None or n is not None
            try:
                tried = (
                    asked(Catalog(self._store), guard, step, n) if named else candidates(self._log, end, guard, told)
                )  # rank 0's
                found = newest_whole(self._store, ranks, wanted, tried, unreadable, changes)
                self.report = LoadReport()
                if found is not None:
                    self.report = put_into(state, captured, *found, ranks, chosen, whole=chosen.whole)
            except (CheckpointError, StorageError, KeyboardInterrupt) as e:
                self.mark.failed()
                if isinstance(e, CheckpointError) and refusal.find(e) is None:
                    fenced = e if isinstance(e, Fenced) else self._fenced(own)
                    if fenced is not None:
                        self._events("fenced", error=fenced)
                        raise fenced from (None if fenced is e else e)
                if named and passed and isinstance(e, CheckpointError):
                    raise Damaged(f"{self._store.url}: {passed[-1]}") from e
                raise
            self.mark.loaded(None if found is None else found[0].step, ranks.rank)
            return None if found is None else found[0]

    def _fenced(self, own: OpenRecord) -> Fenced | None:
        """Whether a newer run has taken the log since. It deletes what it does not keep: the commits that are missing
        are no damage, and this run has nothing to go on for."""
        try:
            by = self._log.opened_after(own.n)[1]
        except StorageError:
            return None
        return None if by is None else Fenced(f"{self._store.url}: log record {by}: {OVERTAKEN}")
