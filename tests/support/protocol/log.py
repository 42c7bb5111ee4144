"""The store's part of the protocol: writers of any rounds, alive at any time, and one commit log.

The environment is the worst one: any writer may start at any moment, be paused for as long as it likes, and believe
that it is alone. Requests are messages that land when they like, also after their sender gave up or died. It knows
nothing of Kubernetes. What a writer decides is the worker's own code (`code`); the records are the worker's records.

Ghosts, which no decision reads: a commit's `values` is the number of the commit that its training state descends
from, and its `step` is the how-many-eth save of its writer it is.

Invariant: the log has no gap; a commit's shards are durable and of one save; every commit descends from the newest
commit before it; nobody commits after another's open; a restore loses no commit; clean-up spares what is needed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from enum import StrEnum
from typing import NamedTuple

from everstep.checkpoint.format.manifest import NONE, CommitRecord, OpenRecord, Record, is_compacted
from everstep.checkpoint.log.decisions import Again, Append, Claim, Done, Head, Refuse, Unknown, advance
from support.protocol.code import WriterCode
from support.protocol.lineage import Damaged, Deleted, Log, Shard, broken, commits_below, whole
from support.protocol.rules import LogRule as Rule

KEEP = 1  # commits that retention keeps: the hardest setting
Claimed = tuple[int, str, int]  # a round, its job, and when that job was created


class Phase(StrEnum):
    NEW = "new"
    LOOK = "look"  # must read the tail in order to open
    SENT = "sent"  # waits for the answer to a conditional create
    RESTORE = "restore"
    TRAIN = "train"
    WRITE = "write"
    STOPPED = "stopped"


class Writer(NamedTuple):
    id: int
    round: int
    job: str = "a"
    created: int = 0  # of the job
    phase: Phase = Phase.NEW
    head: Head = Head()
    own: OpenRecord | None = None
    attempt: Record | None = None
    base: int = NONE  # ghost: the commit that its state descends from
    saves: int = 0  # begun so far
    parts: int = 0  # shards of the current save that are durable
    committed: int = 0  # which of its saves was committed last

    @property
    def name(self) -> str:
        return f"{self.id:08x}"  # as long as the writer's part of a save id: clean-up knows only such ids

    @property
    def alive(self) -> bool:
        return self.phase not in (Phase.NEW, Phase.STOPPED)

    def __str__(self) -> str:
        return f"writer {self.id} (job {self.job}, round {self.round})"


class Put(NamedTuple):
    """A conditional create on its way."""

    writer: int
    record: Record


class Store(NamedTuple):
    log: Log = ()
    shards: frozenset[Shard] = frozenset()
    flying: tuple[Put, ...] = ()  # sorted; the same request may fly twice
    writers: tuple[Writer, ...] = ()
    faults: int = 0  # how many may still happen
    rotten: frozenset[str] = frozenset()  # ghost: saves whose bytes were damaged after they were written
    retired: frozenset[str] = frozenset()  # ghost: saves of older commits that retention removed
    copies: frozenset[OpenRecord] | None = None  # of opens; None where no record can be damaged, or nobody writes any
    wrong: str = ""  # ghost: a step that broke an invariant


class LogModel:
    """`claims` gives one writer each, as (round, job, created); `saves` bounds how many saves each of them begins.

    `parts` is the number of shards of a save: two, so that one of them can be missing while the other is there.
    `damage`: a fault may damage a record. `copies`: writers put copies of their open records, as all releases but the
    first ones do.
    """

    def __init__(
        self,
        off: frozenset[Rule] = frozenset(),
        *,
        claims: tuple[Claimed, ...] = ((1, "a", 1), (2, "a", 1)),
        saves: int = 2,
        faults: int = 2,
        parts: int = 2,
        damage: bool = False,
        copies: bool = True,
    ) -> None:
        self.off = off
        self.code = WriterCode(off)
        self.damage = damage
        self.copies = copies
        self.claims = claims
        self.saves = saves
        self.faults = faults
        self.parts = parts

    def initial(self) -> Store:
        writers = tuple(Writer(i, *claim) for i, claim in enumerate(self.claims))
        return Store(writers=writers, faults=self.faults, copies=frozenset() if self.damage and self.copies else None)

    def canonical(self, s: Store) -> Hashable:
        return s

    def violation(self, s: Store) -> str | None:
        return s.wrong or broken(s.log, s.shards, s.rotten | s.retired)

    def actions(self, s: Store) -> Iterator[tuple[str, Store]]:
        if s.wrong:
            return
        for w in s.writers:
            yield from self._writer_steps(s, w)
        for put in dict.fromkeys(s.flying):
            yield from self._lands(s, put)
        yield from self._compacts(s)
        if s.faults:
            yield from self._faults(s._replace(faults=s.faults - 1))

    # -- writers

    def _writer_steps(self, s: Store, w: Writer) -> Iterator[tuple[str, Store]]:
        match w.phase:
            case Phase.NEW:
                first = Phase.LOOK if Rule.OPEN_BEFORE_RESTORE not in self.off else Phase.RESTORE
                yield f"{w} starts", put(s, w._replace(phase=first))
            case Phase.LOOK:
                yield f"{w} reads the tail", self._opens(s, w, self.code.head_of(s.log, s.copies))
            case Phase.RESTORE:
                yield from self._restores(s, w)
            case Phase.TRAIN:
                if w.saves < self.saves:
                    yield f"{w} begins a save", put(s, w._replace(phase=Phase.WRITE, saves=w.saves + 1, parts=0))
                yield from self._cleans(s, w)
                yield from self._makes_room(s, w)
            case Phase.WRITE:
                yield from self._writes(s, w)
            case Phase.SENT | Phase.STOPPED:
                pass

    def _opens(self, s: Store, w: Writer, head: Head) -> Store:
        match self.code.open(head, Claim(w.name, w.round, w.job, self.parts, "", w.created)):
            case Append(record):
                return _send(s, w._replace(head=head), record)
            case Refuse() | Unknown():
                return put(s, stopped(w))

    def _commits(self, s: Store, w: Writer, head: Head, draft: CommitRecord) -> Store:
        assert w.own is not None
        match self.code.commit(head, w.own, draft):
            case Append(record):
                return _send(s, w._replace(head=head), record)
            case Refuse():
                return put(s, stopped(w))
            case Unknown():  # this save is given up, training goes on
                return put(s, w._replace(phase=Phase.TRAIN, head=head, attempt=None))

    def _appended(self, s: Store, w: Writer, record: Record) -> Store:
        head = advance(w.head, record)
        match record:
            case OpenRecord():
                after = Phase.RESTORE if Rule.OPEN_BEFORE_RESTORE not in self.off else Phase.TRAIN
                return put(s, w._replace(phase=after, head=head, own=record, attempt=None))
            case CommitRecord():
                done = w._replace(phase=Phase.TRAIN, head=head, attempt=None, committed=record.step)
                return put(s, done._replace(base=record.n))

    def _restores(self, s: Store, w: Writer) -> Iterator[tuple[str, Store]]:
        commits = commits_below(s.log, w.own.n if w.own else len(s.log))
        valid = [c for c in commits if whole(c, s.shards)]
        best = valid[-1].n if valid else NONE
        after = Phase.TRAIN if Rule.OPEN_BEFORE_RESTORE not in self.off else Phase.LOOK

        def takes(s: Store, n: int, damaged: bool = False) -> Store:
            wrong = ""
            if damaged:
                wrong = f"{w} trains from the damaged commit {n}"
            elif n < best:
                wrong = f"{w} restored commit {n} although commit {best} is whole: committed steps are lost"
            return put(s, w._replace(phase=after, base=n))._replace(wrong=wrong)

        if Rule.VERIFY_SHARDS in self.off and commits:
            yield f"{w} restores commit {commits[-1].n}", takes(s, commits[-1].n, commits[-1] not in valid)
        else:
            yield f"{w} restores commit {best}", takes(s, best)
        if s.faults and valid:
            worse = s._replace(faults=s.faults - 1)
            older = valid[-2].n if valid[1:] else NONE
            if Rule.PROBE_PAST_LISTING in self.off:
                yield f"{w} restores from a stale listing", takes(worse, older)
            if Rule.UNREADABLE_IS_NOT_DAMAGED in self.off:
                yield f"{w} cannot read commit {best} and steps over it", takes(worse, older)

    def _writes(self, s: Store, w: Writer) -> Iterator[tuple[str, Store]]:
        assert w.own is not None
        save = self.code.save_id(w.own, w.saves)
        if w.parts < self.parts:
            rest = frozenset(x for x in s.shards if (x.save, x.part) != (save, w.parts))
            durable = rest | {Shard(save, w.parts, w.name)}
            yield (
                f"{w} writes shard {w.parts} of save {save}",
                put(s._replace(shards=durable), w._replace(parts=w.parts + 1)),
            )
        if w.parts == self.parts or Rule.SHARDS_FIRST in self.off:
            draft = CommitRecord(
                NONE, w.name, w.round, w.job, w.saves, save, self.parts, "", NONE, NONE, (), (), w.base
            )
            yield f"{w} sends the commit of save {save}", self._commits(s, w, w.head, draft)

    def _cleans(self, s: Store, w: Writer) -> Iterator[tuple[str, Store]]:
        """Retention, by what this writer knows of the log: it may have been fenced long ago."""
        if w.own is None or not (w.committed or Rule.CLEAN_ONLY_OLDER in self.off):
            return
        known = commits_below(s.log, w.head.last + 1)[::-1]
        damaged = frozenset(c.n for c in known if not whole(c, s.shards))
        doomed = self.code.left_over({x.save for x in s.shards}, known, KEEP, damaged, w.own.n, w.committed)
        if not doomed:
            return
        fenced = _owner(s.log) != w.own
        if fenced and Rule.CLEAN_WHILE_OWNER not in self.off:
            return  # it looks before it deletes; how long that counts is a matter of clocks, which are not modelled
        there = [c for c in commits_below(s.log, len(s.log)) if whole(c, s.shards)]
        lost = [c.n for c in there[-KEEP:] if c.save_id in doomed]
        wrong = f"{w} deleted the shards of commit {lost[0]}, the newest whole one" if lost else ""
        if fenced and any(c.save_id in doomed for c in there):
            wrong = wrong or f"{w} deleted commits that the newer owner may keep"
        after = s._replace(shards=frozenset(x for x in s.shards if x.save not in doomed), wrong=wrong)
        retired = frozenset(c.save_id for c in there if c.save_id in doomed)
        yield f"{w} deletes the shards of {sorted(doomed)}", after._replace(retired=s.retired | retired)

    def _makes_room(self, s: Store, w: Writer) -> Iterator[tuple[str, Store]]:
        """Before its first commit a writer deletes what earlier ones left, for a disk that is full."""
        if w.own is None or w.committed or (_owner(s.log) != w.own and Rule.CLEAN_WHILE_OWNER not in self.off):
            return
        doomed = self.code.void_below({x.save for x in s.shards}, s.log, w.own.n)
        if not doomed:
            return
        lost = [r.was.n for r in s.log if isinstance(r, Damaged) and getattr(r.was, "save_id", None) in doomed]
        wrong = f"{w} deleted the shards of commit {lost[0]}, whose record is damaged" if lost else ""
        after = s._replace(shards=frozenset(x for x in s.shards if x.save not in doomed), wrong=wrong)
        yield f"{w} makes room: it deletes the shards of {sorted(doomed)}", after

    def _compacts(self, s: Store) -> Iterator[tuple[str, Store]]:
        """Anybody may compact at any time, however old what it has read is: of each commit it needs to know only that
        there is a newer one, and that its shards are deleted."""
        there = {x.save for x in s.shards}
        for commit in commits_below(s.log, len(s.log))[:-1]:
            gone = commit.save_id not in there or Rule.COMPACT_WHAT_IS_GONE in self.off
            if gone and not is_compacted(commit):
                log = (*s.log[: commit.n], self.code.compact(commit), *s.log[commit.n + 1 :])
                yield f"record {commit.n} is compacted", s._replace(log=log)

    # -- the store and its network

    def _lands(self, s: Store, message: Put) -> Iterator[tuple[str, Store]]:
        record = message.record
        w = s.writers[message.writer]
        flying = list(s.flying)
        flying.remove(message)
        s = s._replace(flying=tuple(flying))
        waits = w.phase is Phase.SENT and w.attempt == record
        what = "open" if isinstance(record, OpenRecord) else "commit"
        label = f"writer {w.id}'s {what} arrives at {record.n}"
        there = s.log[record.n] if record.n < len(s.log) else None  # a damaged record has its place
        if there is not None and not isinstance(there, Deleted) and Rule.CONDITIONAL_CREATE not in self.off:
            yield f"{label}: refused", self._refused(s, w, record, there) if waits else s
            return
        log = [*s.log, *[None] * (record.n + 1 - len(s.log))]
        log[record.n] = record
        s = s._replace(log=tuple(log))
        yield label, self._appended(s, w, record) if waits else s
        if waits and s.faults:
            # It cannot know, so it sends the same again.
            yield f"{label}: the response is lost", _send(s._replace(faults=s.faults - 1), w, record)

    def _refused(self, s: Store, w: Writer, attempt: Record, there: Record | Damaged) -> Store:
        found = self.code.seen(attempt.n, there, s.copies, w.head.open, w.name)
        outcome = self.code.conflict(w.head, attempt, found)
        known = not isinstance(there, Damaged) and not isinstance(outcome, Done)
        if isinstance(attempt, OpenRecord) and known and s.copies is not None:
            s = s._replace(copies=s.copies - {attempt})
        match outcome:
            case Done():
                return self._appended(s, w, attempt)
            case Refuse():
                return put(s, stopped(w))
            case Again(head):
                if isinstance(attempt, OpenRecord):
                    return self._opens(s, w, head)
                return self._commits(s, w, head, attempt)

    def _faults(self, s: Store) -> Iterator[tuple[str, Store]]:
        for w in s.writers:
            if w.phase is Phase.LOOK and s.log and Rule.PROBE_PAST_LISTING in self.off:
                yield f"{w} reads a stale listing", self._opens(s, w, self.code.head_of(s.log[:-1], s.copies))
            if w.phase is Phase.SENT and w.attempt is not None:
                yield f"{w} hears nothing and sends again", _send(s, w, w.attempt)
                if isinstance(w.attempt, CommitRecord):
                    yield f"{w} hears nothing and abandons the save", self._abandons(s, w, w.attempt)
            if w.alive:
                yield f"{w} is killed", put(s, stopped(w))
        if sum(w.alive for w in s.writers) > 1:
            yield (
                "total restart: every writer is killed",
                s._replace(writers=tuple(stopped(w) if w.alive else w for w in s.writers)),
            )
        for commit in commits_below(s.log, len(s.log)):
            if whole(commit, s.shards):
                damaged = frozenset(x for x in s.shards if (x.save, x.part) != (commit.save_id, 0))
                yield (
                    f"a shard of commit {commit.n} rots",
                    s._replace(shards=damaged, rotten=s.rotten | {commit.save_id}),
                )

        for n, record in enumerate(s.log) if self.damage else ():
            if isinstance(record, OpenRecord | CommitRecord):
                after = s._replace(log=(*s.log[:n], Damaged(record), *s.log[n + 1 :]))
                lost = {record.save_id} if isinstance(record, CommitRecord) else set()
                yield f"record {n} is damaged", after._replace(rotten=s.rotten | lost)

    def _abandons(self, s: Store, w: Writer, attempt: CommitRecord) -> Store:
        kept = s.shards
        if Rule.KEEP_UNANSWERED in self.off:
            kept = frozenset(x for x in kept if x.save != attempt.save_id)
        return put(s._replace(shards=kept), w._replace(phase=Phase.TRAIN, attempt=None))


def put(s: Store, w: Writer) -> Store:
    """The state with this writer in its place."""
    return s._replace(writers=(*s.writers[: w.id], w, *s.writers[w.id + 1 :]))


def _owner(log: Log) -> OpenRecord | None:
    """The newest open of the log, whether it can be read or not."""
    found = next((r.was if isinstance(r, Damaged) else r for r in log[::-1] if _opens(r)), None)
    return found if isinstance(found, OpenRecord) else None


def _opens(found: object) -> bool:
    return isinstance(found.was if isinstance(found, Damaged) else found, OpenRecord)


def stopped(w: Writer) -> Writer:
    """The writer, dead. All that it knew is forgotten: states that differ only in it are one."""
    return Writer(w.id, w.round, w.job, w.created, Phase.STOPPED)


def _send(s: Store, w: Writer, record: Record) -> Store:
    if isinstance(record, OpenRecord) and s.copies is not None:
        s = s._replace(copies=s.copies | {record})
    flying = sorted((*s.flying, Put(w.id, record)), key=lambda p: (p.writer, p.record.n, repr(p.record)))
    return put(s._replace(flying=tuple(flying)), w._replace(phase=Phase.SENT, attempt=record))


def progresses(model: LogModel, s: Store, claim: Claimed) -> str | None:
    """Whether a writer that starts now commits if nothing more goes wrong; the reason if it does not.

    The schedule: it reads the tail, then everything in flight arrives, so that its own open may come second; then it
    goes on alone, as every other writer is dead or fenced. Bounded by what is in flight.
    """
    me = len(s.writers)
    newcomer = Writer(me, *claim, Phase.LOOK)
    s = s._replace(writers=(*s.writers, newcomer), faults=0)
    alone = LogModel(model.off, saves=1, faults=0, parts=model.parts)
    in_flight = len(s.flying)
    before = len(commits_below(s.log, len(s.log)))
    for _ in range(2 * in_flight + model.parts + 12):
        w = s.writers[me]
        committed = commits_below(s.log, len(s.log))
        if w.phase is Phase.TRAIN and w.saves:
            return None if committed[-1].writer == w.name else f"{w} ended without a commit"
        foreign = [p for p in s.flying if p.writer != me]
        steps = [x for p in foreign for x in alone._lands(s, p)] if w.phase is Phase.SENT else []
        steps += [x for p in s.flying if p.writer == me for x in alone._lands(s, p)]
        steps += [x for x in alone._writer_steps(s, w) if "deletes" not in x[0]]
        if not steps:
            return f"{w} is stuck in phase {w.phase} with {len(committed) - before} new commits"
        s = steps[0][1]
    return f"{s.writers[me]} has not committed within the bound"
