"""Decides which records may be appended to the commit log, without I/O: the protocol of docs/adr/0001 as functions.

The log is dense: record n is created conditionally at n = last + 1, so of all writers that saw the same end exactly
one appends. Invariants that these functions keep, whatever the interleaving:

- A commit is appended only by the writer of the newest open record below it. Whoever finds a newer open is fenced.
- Within one job, or one rendezvous outside of Kubernetes, the rounds of the open records never go down; a job or
  rendezvous that another took the log from never opens it again; and no job opens it after one that was created later.
- A writer whose record is already there (its response was lost) has appended it, once.

`append_*` in commitlog drives these functions against a store; the executable model drives the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from everstep.checkpoint.format.compaction import compacted, is_compacted
from everstep.checkpoint.format.manifest import NONE, CommitRecord, OpenRecord, Owner, Record

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
    """The claimant of the log. `round` is the fencing token: the round that the claiming world is in now.

    `job_uid` is "" outside Kubernetes. `rendezvous` names the count that `round` belongs to; "" if the job's operator
    counts its rounds, or if there are none. A process with neither (plain `python`) takes the log from anybody.
    """

    writer: str
    round: int
    job_uid: str
    world_size: int
    at: str
    created: int = 0  # of the job, in seconds since the epoch; 0 is not known
    rendezvous: str = ""


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

    - Never an older round of the owner: a newer world of its job goes on without this process.
    - Never a job that another job has taken the log from: it was deleted and recreated under the same URL. Nor a
      rendezvous that another has: its store lost what it held, or a new run was started.
    - Never a job older than one that has opened it: a pod of a deleted job that starts late, for the first time.
    - Anyone else may: the owner's own newer (or same) round, a new job or rendezvous, a plain `python` run.
    """
    before = head.open
    owners = before.owners if before else ()
    if (refused := _older_than(owners, claim)) is not None:
        return Refuse(refused)
    if claim.job_uid or claim.rendezvous:
        mine = Owner(claim.job_uid, claim.round, claim.created, claim.rendezvous)
        owners = (*(o for o in owners if _key(o) != _key(mine)), mine)[-MAX_OWNERS:]
    record = OpenRecord(
        head.last + 1, claim.writer, claim.round, claim.job_uid, claim.world_size, claim.at, owners,
        before.n if before else NONE, head.commit, claim.rendezvous,
    )  # fmt: skip
    return Append(record, "the log is new" if before is None else f"takes over from record {before.n}")


def _older_than(owners: tuple[Owner, ...], claim: Claim) -> str | None:
    """Why an owner is newer than the claim; None if none is."""
    if not owners:
        return None
    last = owners[-1]
    if claim.job_uid and claim.job_uid != last.job_uid and any(o.job_uid == claim.job_uid for o in owners):
        return f"job {claim.job_uid} lost the log to {_named(last)}, which opened it later"
    known = next((o for o in owners if (claim.job_uid or claim.rendezvous) and _key(o) == _key(claim)), None)
    if known is not None and known != last:
        return (
            f"rendezvous {claim.rendezvous} lost the log to {_named(last)}, which opened it later; "
            "to go on from its commits, start the run under a new rendezvous id"
        )
    if known is not None and claim.round < known.round:
        older = f"round {claim.round} is older than round {known.round}, which has opened the log"
        if claim.job_uid:
            return older
        # A rendezvous whose store was put back to an older state gives the same numbers to other worlds.
        return (
            f"{older}: a newer world of this run goes on without this process; if there is none, the round store was "
            "put back to an older state: start the run under a new rendezvous id to go on from its commits"
        )
    newer = next((o for o in owners if claim.job_uid and 0 < claim.created < o.created), None)
    return None if newer is None else f"job {claim.job_uid} is older than {_named(newer)}, which has opened the log"


def _key(who: Owner | Claim) -> tuple[str, str]:
    """Identifies the numbering of an owner's rounds: only rounds of one numbering are comparable."""
    return who.job_uid, who.rendezvous


def _named(owner: Owner) -> str:
    if not owner.job_uid:
        return f"rendezvous {owner.rendezvous}"
    return f"job {owner.job_uid}" + (f", rendezvous {owner.rendezvous}" if owner.rendezvous else "")


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
    if same(attempted, found):
        return Done(attempted, "it was already there: the response to an earlier attempt was lost")
    if isinstance(attempted, CommitRecord) and isinstance(found, OpenRecord):
        return fenced_by(found)
    return Again(advance(head, found), f"record {found.n} was taken by another record")


def same(attempted: Record, found: Record | Unreadable) -> bool:
    """Whether `found` is the record that was attempted, or what compaction made of it since."""
    if isinstance(attempted, CommitRecord) and isinstance(found, CommitRecord) and is_compacted(found):
        return found == compacted(attempted)
    return found == attempted


def fenced_by(newer: OpenRecord) -> Refuse:
    """The refusal that a newer open record means."""
    job = f" of job {newer.job_uid}" if newer.job_uid else ""
    return Refuse(f"record {newer.n}: writer {newer.writer}{job}, round {newer.round}, opened the log at {newer.at}")
