"""The worker's own pure functions, as the model calls them, each of their rules with a switch.

With no rule off this module adds nothing: what is explored is `log.decisions`, `format.layout` and `retention.plan` of
`everstep.checkpoint`. A rule that is off is a change to what those functions answer, as small as it can be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from everstep.checkpoint.format import layout, manifest
from everstep.checkpoint.format.manifest import NONE, CommitRecord, OpenRecord, Owner, Record
from everstep.checkpoint.log import decisions as log
from everstep.checkpoint.log.decisions import Again, Append, Claim, Done, Head, Refuse, Unknown, Unreadable
from everstep.checkpoint.retention import cleaner as retention
from everstep.checkpoint.retention.cleaner import survey
from everstep.checkpoint.retention.pins import saves_of
from support.protocol.lineage import Damaged, Deleted, Log
from support.protocol.rules import LogRule

Found = Record | Unreadable
Copies = frozenset[OpenRecord] | None  # None: of a release that wrote none


@dataclass(frozen=True, slots=True)
class Records:
    """What `survey` reads of a log."""

    log: Log

    def read(self, n: int) -> Record | None:
        found = self.log[n]
        return found if isinstance(found, OpenRecord | CommitRecord) else None


@dataclass(frozen=True, slots=True)
class WriterCode:
    off: frozenset[LogRule] = frozenset()

    def seen(self, n: int, found: Record | Damaged, copies: Copies, below: OpenRecord | None, me: str = "") -> Found:
        """A record as a writer sees it that has read all below; of a damaged one it sees the copies of opens."""
        if not isinstance(found, Damaged):
            return found
        unreadable = Unreadable(n, "damaged")
        if LogRule.COPY_BEFORE_OPEN in self.off:
            return replace(unreadable, opens=False)
        here = sorted((c for c in copies or () if c.n == n and c.writer != me), key=lambda c: c.writer)
        known = below is not None and any(c.n == below.n for c in copies or ())
        return log.resolve(unreadable, here, kind="", known=known)

    def head_of(self, records: Log, copies: Copies = None) -> Head:
        """What one walk over these records shows; a walk ends at the first gap that compaction did not make."""
        head = Head()
        for n, record in enumerate(records):
            if record is None:
                break
            if isinstance(record, Deleted):
                continue  # a listing shows what is left
            head = log.advance(head, self.seen(n, record, copies, head.open))
        return head

    def open(self, head: Head, claim: Claim) -> Append | Refuse | Unknown:
        if LogRule.UNKNOWN_OWNER_STOPS in self.off:
            head = replace(head, unreadable=NONE)
        decision = log.decide_open(head, claim)
        if not isinstance(decision, Refuse):
            return decision
        owners = head.open.owners if head.open else ()
        jobs = [o.job_uid for o in owners]
        if claim.job_uid not in jobs:
            rule = LogRule.JOB_AGE
        else:
            rule = LogRule.ROUND_ORDER if claim.job_uid == jobs[-1] else LogRule.JOB_ORDER
        if rule not in self.off:
            return decision
        rest = tuple(o for o in owners if o.job_uid != claim.job_uid)
        record = OpenRecord(
            head.last + 1, claim.writer, claim.round, claim.job_uid, claim.world_size, claim.at,
            (*rest, Owner(claim.job_uid, claim.round, claim.created)), head.open.n if head.open else NONE, head.commit,
        )  # fmt: skip
        return Append(record, "the rule is off")

    def commit(self, head: Head, own: OpenRecord, draft: CommitRecord) -> Append | Refuse | Unknown:
        decision = log.decide_commit(head, own, draft)
        if isinstance(decision, Refuse) and LogRule.NEWER_OPEN_FENCES in self.off:
            return Append(replace(draft, n=head.last + 1, open=own.n, commit=head.commit), "the rule is off")
        return decision

    def conflict(self, head: Head, attempted: Record, found: Found) -> Done | Refuse | Again:
        if isinstance(found, CommitRecord) and manifest.is_compacted(found):
            found = manifest.compacted(found)  # without the ghosts
        if log.same(attempted, found) and LogRule.RECOGNISE_OWN in self.off:
            return Again(log.advance(head, found), "the rule is off")
        if LogRule.READ_WHAT_WON in self.off and not log.same(attempted, found):
            return Again(replace(head, last=found.n), "the rule is off")
        decision = log.after_conflict(head, attempted, found)
        if isinstance(decision, Refuse) and LogRule.NEWER_OPEN_FENCES in self.off:
            return Again(log.advance(head, found), "the rule is off")
        return decision

    def compact(self, record: CommitRecord) -> CommitRecord | Deleted:
        """What takes the record's place; the ghosts, which only the model's invariants read, stay."""
        if LogRule.COMPACT_IN_PLACE in self.off:
            return Deleted(record.n)
        return replace(manifest.compacted(record), values=record.values)

    def save_id(self, own: OpenRecord, sequence: int) -> str:
        if LogRule.UNIQUE_SAVES in self.off:
            return f"step-{sequence}"
        return layout.save_id(own.n, own.writer, sequence)

    def left_over(
        self, save_ids: set[str], commits: list[CommitRecord], keep: int, damaged: frozenset[int], own: int, newest: int
    ) -> set[str]:
        """The saves to delete, as retention plans it from what this writer knows."""
        if LogRule.CLEAN_ONLY_OLDER in self.off:
            own, newest = layout.MAX_RECORD_NUMBER, 0
        plan = retention.plan_retention(save_ids, commits, keep=keep, damaged=damaged, open_n=own, sequence=newest)
        return {d.save_id for d in plan}

    def void_below(self, save_ids: set[str], records: Log, own: int) -> set[str]:
        """The saves of earlier opens to delete before the first commit: those that can never become commits."""
        older = {save for save in save_ids if (owner := layout.owner_of(save)) is not None and owner[0] < own}
        if LogRule.CLEAR_WHAT_IS_IN_NO_RECORD in self.off:
            return older
        reader: Any = Records(records)
        found = survey(reader, own, older)
        spared = frozenset() if LogRule.SPARE_WHAT_IS_UNKNOWN in self.off else found.unknown
        return older - spared - {save for record in found.commits for save in saves_of(record)}
