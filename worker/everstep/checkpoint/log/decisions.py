"""Decides which records may be appended to the commit log, without I/O: the protocol of docs/adr/0001 as functions.

The log is dense: record n is created conditionally at n = last + 1, so of all writers that saw the same end exactly
one appends. Invariants that these functions keep, whatever the interleaving:

- A commit is appended only by the writer of the newest open record below it. Whoever finds a newer open is fenced.
- Within one job, or one rendezvous outside of Kubernetes, the rounds of the open records never go down; a job or
  rendezvous that another took the log from never opens it again; and no job opens it after one that was created later.
- A damaged record that might be another's open stops whoever would have to know its owner: nobody takes the log
  over it, and nobody commits over it (docs/adr/0038).
- A writer whose record is already there (its response was lost) has appended it, once.

`append_*` in commitlog drives these functions against a store; the executable model drives the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import xxhash

from everstep.checkpoint.format.manifest import NONE, CommitRecord, OpenRecord, Owner, Record, compacted, is_compacted

MAX_OWNERS: Final = 64
# Beyond them an open record keeps 64 bits of each: 1.2 MB at most. Then no job or run that is new to the log opens it.
MAX_FORMER: Final = 2**16


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that exists but is damaged: its number is taken, and its content is unknown. `opens`: it might be an
    open record, whose owner nobody can read."""

    n: int
    reason: str
    opens: bool = True


@dataclass(frozen=True, slots=True)
class Head:
    """The end of the log as one reader saw it. It may be behind: then the next create meets a conflict."""

    last: int = NONE  # the greatest record number seen
    open: OpenRecord | None = None  # the newest open record at or below `last`
    commit: int = NONE  # the newest commit at or below `last`
    unreadable: int = NONE  # the newest damaged record above `open` that might be another open


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
    """Never try again: the log has another owner."""

    reason: str
    writer: str = ""  # of the newer record, if it is known


@dataclass(frozen=True, slots=True)
class Unknown:
    """Do not append: the owner of the log is unknown. If this was for a commit, only this save is lost."""

    reason: str


@dataclass(frozen=True, slots=True)
class Again:
    """Somebody else's record has the number: decide again from this head."""

    head: Head
    reason: str


def advance(head: Head, record: Record | Unreadable) -> Head:
    """The head after reading the next record. Records are read in order: `record.n` is `head.last + 1` or later."""
    match record:
        case OpenRecord():
            return Head(record.n, record, head.commit if head.commit > record.commit else record.commit)
        case CommitRecord():
            return replace(head, last=record.n, commit=record.n)
        case Unreadable():
            return replace(head, last=record.n, unreadable=record.n if record.opens else head.unreadable)


def resolve(
    damaged: Unreadable, copies: Sequence[OpenRecord | None], *, kind: str, known: bool
) -> OpenRecord | Unreadable:
    """What a damaged record was: the open record in its copy, no open record (`opens` is false), or unknown.

    Every writer writes a copy before it creates its open record, so a record without a copy is no open record.
    `copies` are those for this number, None for a damaged one. If the caller's own create of this record was refused,
    its own copy is not among them: the caller opens the log again under the next number. `kind` is the kind in the
    damaged bytes, "" if there is none. `known`: whether the newest open record below has a copy; if not, it may be of a
    release that wrote no copies.

    If several writers raced for the number and died, one of them has opened the log, and nobody knows which. Of one
    owner the newest round counts, of several jobs the one that was created last: it would have had the log next.
    """
    if kind == "commit":
        return replace(damaged, opens=False)
    if not copies:
        return replace(damaged, opens=kind == "open" or not known)
    opens = [copy for copy in copies if copy is not None]
    ages = {o.owners[-1].created if o.job_uid else 0 for o in opens}
    comparable = len({(o.job_uid, o.rendezvous) for o in opens}) == 1 or (len(ages) == len(opens) and 0 not in ages)
    if len(opens) < len(copies) or not comparable:
        return replace(damaged, reason=f"{damaged.reason}; {len(copies)} writers may have opened the log with it")
    return max(opens, key=lambda o: (o.owners[-1].created if o.owners else 0, o.round))


def decide_open(head: Head, claim: Claim) -> Append | Refuse | Unknown:
    """May this claim take the log, and with which record?

    - Never an older round of the owner: a newer world of its job goes on without this process.
    - Never a job that another job has taken the log from: it was deleted and recreated under the same URL. Nor a
      rendezvous that another has: its store lost what it held, or a new run was started.
    - Never a job older than one that has opened it: a pod of a deleted job that starts late, for the first time.
    - Nobody over a damaged record that might be the newest open: it might be of a newer round, and its writer alive.
    - Anyone else may: the owner's own newer (or same) round, a new job or rendezvous, a plain `python` run.
    """
    before = head.open
    owners, former = (before.owners, before.former) if before else ((), ())
    if (refused := _older_than(owners, former, claim)) is not None:
        return Refuse(refused)
    if head.unreadable > (before.n if before else NONE):
        return Unknown(
            f"record {head.unreadable} is damaged and might be the open record of a newer run, which would be fenced"
        )
    if claim.job_uid or claim.rendezvous:
        mine = Owner(claim.job_uid, claim.round, claim.created, claim.rendezvous)
        owners = (*(o for o in owners if _key(o) != _key(mine)), mine)
        former = tuple(sorted({*former, *(mark for o in owners[:-MAX_OWNERS] for mark in _marks(o))}))
        owners = owners[-MAX_OWNERS:]
        if len(former) > MAX_FORMER:
            return Unknown(
                f"{len(former)} marks of former owners leave no room for one more, who could not be told apart"
            )
    record = OpenRecord(
        head.last + 1, claim.writer, claim.round, claim.job_uid, claim.world_size, claim.at, owners,
        before.n if before else NONE, head.commit, claim.rendezvous, former,
    )  # fmt: skip
    return Append(record, "the log is new" if before is None else f"takes over from record {before.n}")


def _older_than(owners: tuple[Owner, ...], former: tuple[str, ...], claim: Claim) -> str | None:
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
    if known is None and (claim.job_uid or claim.rendezvous):
        of_job, of_key = _marks(claim)
        if of_key in former or (claim.job_uid != last.job_uid and of_job in former):
            whose = f"job {claim.job_uid}" if claim.job_uid else f"rendezvous {claim.rendezvous}"
            return f"{whose} lost the log long ago; {_named(last)} has it, which opened it later"
    newer = next((o for o in owners if claim.job_uid and 0 < claim.created < o.created), None)
    return None if newer is None else f"job {claim.job_uid} is older than {_named(newer)}, which has opened the log"


def _key(who: Owner | Claim) -> tuple[str, str]:
    """Identifies the numbering of an owner's rounds: only rounds of one numbering are comparable."""
    return who.job_uid, who.rendezvous


def _marks(who: Owner | Claim) -> tuple[str, str]:
    """64 bits each for the job (of a run without one, its rendezvous) and for the key of a former owner."""
    texts = (f"job {who.job_uid}" if who.job_uid else f"run {who.rendezvous}", f"{who.job_uid} {who.rendezvous}")
    return xxhash.xxh3_64_hexdigest(_bytes(texts[0])), xxhash.xxh3_64_hexdigest(_bytes(texts[1]))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


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


def after_conflict(head: Head, attempted: Record, existing: Record | Unreadable) -> Done | Refuse | Again:
    """What to do when the create of `attempted` was refused, because `existing` has its number.

    The same record means that an earlier attempt succeeded and its response was lost. For a commit, an open that is
    not its own means fenced. Anything else moves the head, and the decision is made again. That ends: a commit can
    conflict without limit only with another writer's open, which fences it, or with itself after a lost response.
    """
    if same(attempted, existing):
        return Done(attempted, "it was already there: the response to an earlier attempt was lost")
    if isinstance(attempted, CommitRecord) and isinstance(existing, OpenRecord):
        return fenced_by(existing)
    return Again(advance(head, existing), f"record {existing.n} was taken by another record")


def same(attempted: Record, existing: Record | Unreadable) -> bool:
    """Whether `existing` is the record that was attempted, or its compacted form."""
    if isinstance(attempted, CommitRecord) and isinstance(existing, CommitRecord) and is_compacted(existing):
        return existing == compacted(attempted)
    return existing == attempted


def fenced_by(newer: OpenRecord) -> Refuse:
    """The refusal that a newer open record means."""
    job = f" of job {newer.job_uid}" if newer.job_uid else ""
    opened = f"record {newer.n}: writer {newer.writer}{job}, round {newer.round}, opened the log at {newer.at}"
    return Refuse(opened, newer.writer)
