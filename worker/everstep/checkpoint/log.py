"""What may be appended to the commit log, decided without I/O: the protocol of docs/adr/0001 as functions.

The log is dense: record n is created conditionally at n = last + 1, so of all writers that saw the same end exactly
one appends. Invariants that these functions keep, whatever the interleaving:

- A commit is appended only by the writer of the newest open record below it. Whoever finds a newer open is fenced.
- Within one job the rounds of the open records never go down, a job that another job took the log from never opens it
  again, and no job opens it after one that was created later.
- A writer whose record is already there (its response was lost) has appended it, once.

`append_*` in commitlog drives these functions against a store; the executable model drives the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from everstep.checkpoint.manifest import NONE, CommitRecord, OpenRecord, Owner, Record

MAX_OWNERS: Final = 64


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that is there but damaged: it takes its place in the log, and says nothing."""

    n: int
    reason: str


@dataclass(frozen=True, slots=True)
class Head:
    """The end of the log as one reader saw it. It may be behind; a conflict tells."""

    last: int = NONE  # the greatest record number seen
    open: OpenRecord | None = None  # the newest open record at or below `last`
    commit: int = NONE  # the newest commit at or below `last`
    unreadable: int = NONE  # the newest damaged record above `open`: it might be another open


@dataclass(frozen=True, slots=True)
class Claim:
    """Who wants to take the log. `round` is the fencing token; `job_uid` is "" outside Kubernetes."""

    writer: str
    round: int
    job_uid: str
    world_size: int
    at: str
    created: int = 0  # of the job, in seconds since the epoch; 0 is not known


@dataclass(frozen=True, slots=True)
class Append:
    """Create this record, conditionally, at its own number."""

    record: Record
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The record is in the log."""

    record: Record
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Stop for ever: the log has another owner."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """Do not append now: who owns the log cannot be told. Nothing is lost by it but this save."""

    reason: str


@dataclass(frozen=True, slots=True)
class Again:
    """Somebody else's record has the number: decide again from this head."""

    head: Head
    reason: str


def advance(head: Head, found: Record | Unreadable) -> Head:
    """The head after reading the next record. Records are read in order: `found.n` is `head.last + 1` or later."""
    match found:
        case OpenRecord():
            return Head(found.n, found, head.commit if head.commit > found.commit else found.commit)
        case CommitRecord():
            return replace(head, last=found.n, commit=found.n)
        case Unreadable():
            return replace(head, last=found.n, unreadable=found.n)


def decide_open(head: Head, claim: Claim) -> Append | Refuse:
    """May this claim take the log, and with which record?

    - Never an older round of the job that owns it now: its pods were replaced.
    - Never a job that another job has taken the log from: it was deleted and recreated under the same URL.
    - Never a job older than one that has opened it: a pod of a deleted job that starts late, for the first time.
    - Anyone else may: the owner's own newer (or same) round, a new job, a plain `python` run.
    """
    before = head.open
    owners = before.owners if before else ()
    index = next((i for i, o in enumerate(owners) if o.job_uid == claim.job_uid), None)
    reason = "the log is new" if before is None else f"takes over from record {before.n}"
    if index is not None and index < len(owners) - 1:
        return Refuse(f"job {claim.job_uid} lost the log to job {owners[-1].job_uid}, which was created after it")
    if index is not None and claim.round < owners[index].round:
        return Refuse(f"round {claim.round} is older than round {owners[index].round}, which has opened the log")
    newer = next((o for o in owners if claim.job_uid and 0 < claim.created < o.created), None)
    if newer is not None:
        return Refuse(f"job {claim.job_uid} is older than job {newer.job_uid}, which has opened the log")
    if claim.job_uid:
        others = (o for o in owners if o.job_uid != claim.job_uid)
        owners = (*others, Owner(claim.job_uid, claim.round, claim.created))[-MAX_OWNERS:]
    record = OpenRecord(
        head.last + 1, claim.writer, claim.round, claim.job_uid, claim.world_size, claim.at, owners,
        before.n if before else NONE, head.commit,
    )  # fmt: skip
    return Append(record, reason)


def decide_commit(head: Head, own: OpenRecord, draft: CommitRecord) -> Append | Refuse | Unknown:
    """May the writer of `own` append `draft`, and with which number and links? The draft's are ignored."""
    if head.open is None or head.open.n < own.n:
        return Unknown(
            f"the log ends before record {own.n}, this writer's own open: the listing is stale or it was deleted"
        )
    if head.open.n > own.n or head.open.writer != own.writer:
        return fenced_by(head.open)
    if head.unreadable > own.n:
        return Unknown(f"record {head.unreadable} is damaged and might be another writer's open")
    record = replace(draft, n=head.last + 1, open=own.n, commit=head.commit)
    return Append(record, f"record {own.n} is the newest open and this writer's own")


def after_conflict(head: Head, attempted: Record, found: Record | Unreadable) -> Done | Refuse | Again:
    """The create of `attempted` was refused because `found` has its number. What now?

    The same record means that an earlier attempt succeeded and its response was lost. For a commit, an open that is
    not its own means fenced. Anything else moves the head, and the decision is made again: that ends, because only
    an open by another (which fences) or a lost response can meet a commit more than a bounded number of times.
    """
    if found == attempted:
        return Done(attempted, "it was already there: the response to an earlier attempt was lost")
    if isinstance(attempted, CommitRecord) and isinstance(found, OpenRecord):
        return fenced_by(found)
    return Again(advance(head, found), f"record {found.n} was taken by another record")


def fenced_by(newer: OpenRecord) -> Refuse:
    """The refusal that a newer open record means."""
    job = f" of job {newer.job_uid}" if newer.job_uid else ""
    return Refuse(f"record {newer.n}: writer {newer.writer}{job}, round {newer.round}, opened the log at {newer.at}")
