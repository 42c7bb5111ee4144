"""The store's part of the protocol: writers of any rounds, alive at any time, and one commit log.

The environment is the worst one: any writer may start at any moment, be paused for as long as it likes, and believe
that it is alone. Requests are messages that land when they like, also after their sender gave up or died. It knows
nothing of Kubernetes. What a writer decides is `decide`, the only link to the worker's code.

Invariant: records never change and leave no gap; a commit's shards are durable and of one save; every commit descends
from the newest valid commit before it; nobody commits after a newer open; a restore loses no commit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from enum import StrEnum
from typing import NamedTuple

PARTS = 2  # shards of a save: two ranks, so that one of them can be missing
NONE = -1  # no commit


class Rule(StrEnum):
    CONDITIONAL_CREATE = "a record is created only where there is none"
    OPEN_BEFORE_RESTORE = "a writer opens before it chooses the commit to restore"
    ROUND_ORDER = "an open of a round below the newest open's is refused"
    REREAD_ON_CONFLICT = "after a conflict the writer reads the tail again before it tries elsewhere"
    RECOGNISE_OWN = "an identical record of one's own is the answer to a lost response"
    SHARDS_FIRST = "a commit is sent when its shards are durable"
    UNIQUE_SAVES = "every save has an id of its own; shards are immutable"
    PROBE_PAST_LISTING = "the tail is the greatest listed number, then probed until absent"
    VERIFY_SHARDS = "a commit whose shards do not verify is stepped over"
    UNREADABLE_IS_NOT_INVALID = "a read that fails is tried again, it does not make a commit invalid"
    KEEP_UNANSWERED = "shards of a commit whose outcome is unknown are kept"
    CLEAN_ONLY_OLDER = "only left-over shards of writers that opened before oneself are deleted"


class Open(NamedTuple):
    writer: int
    round: int


class Commit(NamedTuple):
    writer: int
    save: tuple[int, int]  # the save id; (writer, how many saves it began) where ids are unique
    author: tuple[int, int]  # ghost: whose state this is
    base: int  # ghost: the commit that this state descends from


Record = Open | Commit


class Phase(StrEnum):
    NEW = "new"
    LOOK = "look"  # has a record to append and must read the tail
    SENT = "sent"  # waits for the answer to a conditional create
    RESTORE = "restore"
    TRAIN = "train"
    WRITE = "write"
    STOPPED = "stopped"


class Writer(NamedTuple):
    id: int
    round: int
    phase: Phase = Phase.NEW
    pending: Record | None = None
    tail: int = 0  # the number at which it believes the next record goes
    opened: int = NONE
    base: int = NONE  # ghost: the commit that its state descends from
    saves: int = 0  # begun so far
    parts: int = 0  # shards of the current save that are durable


class Put(NamedTuple):
    writer: int
    n: int
    record: Record


class Shard(NamedTuple):
    save: tuple[int, int]
    part: int
    author: tuple[int, int]


class Store(NamedTuple):
    log: tuple[Record | None, ...] = ()
    shards: frozenset[Shard] = frozenset()
    flying: frozenset[Put] = frozenset()
    writers: tuple[Writer, ...] = ()
    faults: int = 0
    rotten: frozenset[tuple[int, int]] = frozenset()  # ghost: saves whose bytes were damaged after they were written
    wrong: str = ""  # ghost: a step that broke an invariant


class Create(NamedTuple):
    n: int


class Done(NamedTuple):
    n: int


class Fenced(NamedTuple):
    by: int


Decision = Create | Done | Fenced
Decide = Callable[[tuple[Record | None, ...], Record, int], Decision]


class LogModel:
    """`rounds` gives one writer each; `saves` bounds how many saves each begins; `decide` is the writer's code."""

    def __init__(
        self,
        decide: Decide,
        off: frozenset[Rule] = frozenset(),
        *,
        rounds: tuple[int, ...] = (1, 2),
        saves: int = 2,
        faults: int = 2,
        cleaning: bool = True,
    ) -> None:
        self.decide = decide
        self.off = off
        self.rounds = rounds
        self.saves = saves
        self.faults = faults
        self.cleaning = cleaning

    def initial(self) -> Store:
        return Store(writers=tuple(Writer(i, r) for i, r in enumerate(self.rounds)), faults=self.faults)

    def canonical(self, s: Store) -> Hashable:
        return s

    def actions(self, s: Store) -> Iterator[tuple[str, Store]]:
        if s.wrong:
            return
        for w in s.writers:
            yield from self._writer_steps(s, w)
        for put in sorted(s.flying, key=repr):
            yield from self._lands(s, put)
        if s.faults:
            yield from self._faults(s._replace(faults=s.faults - 1))

    # -- writers

    def _writer_steps(self, s: Store, w: Writer) -> Iterator[tuple[str, Store]]:
        who = f"writer {w.id} (round {w.round})"
        match w.phase:
            case Phase.NEW:
                first = Phase.LOOK if Rule.OPEN_BEFORE_RESTORE not in self.off else Phase.RESTORE
                yield f"{who} starts", _put(s, w._replace(phase=first, pending=Open(w.id, w.round)))
            case Phase.LOOK:
                yield f"{who} reads the tail", self._decides(s, w, len(s.log))
                if Rule.PROBE_PAST_LISTING in self.off and s.faults and s.log:
                    stale = s._replace(faults=s.faults - 1)
                    yield f"{who} reads a stale listing of the tail", self._decides(stale, w, len(s.log) - 1)
            case Phase.RESTORE:
                yield from self._restores(s, w, who)
            case Phase.TRAIN:
                if w.saves < self.saves:
                    yield f"{who} begins a save", _put(s, w._replace(phase=Phase.WRITE, saves=w.saves + 1, parts=0))
                if self.cleaning:
                    yield from self._cleans(s, w, who)
            case Phase.WRITE:
                yield from self._writes(s, w, who)
            case Phase.SENT | Phase.STOPPED:
                pass

    def _decides(self, s: Store, w: Writer, seen: int) -> Store:
        """The tail as far as it was seen, the record to append, and the worker's decision."""
        assert w.pending is not None
        match self.decide(s.log[:seen], w.pending, w.opened):
            case Create(n):
                return self._sends(s, w, n)
            case Done(n):
                return self._appended(s, w, n)
            case Fenced():
                return _put(s, w._replace(phase=Phase.STOPPED, pending=None))

    def _sends(self, s: Store, w: Writer, n: int) -> Store:
        assert w.pending is not None
        after = s._replace(flying=s.flying | {Put(w.id, n, w.pending)})
        return _put(after, w._replace(phase=Phase.SENT, tail=n))

    def _appended(self, s: Store, w: Writer, n: int) -> Store:
        match w.pending:
            case Open():
                after = Phase.RESTORE if Rule.OPEN_BEFORE_RESTORE not in self.off else Phase.TRAIN
                return _put(s, w._replace(phase=after, opened=n, tail=n + 1, pending=None))
            case Commit():
                return _put(s, w._replace(phase=Phase.TRAIN, base=n, tail=n + 1, pending=None))
            case None:
                raise AssertionError(f"writer {w.id} appended nothing")

    def _restores(self, s: Store, w: Writer, who: str) -> Iterator[tuple[str, Store]]:
        below = w.opened if w.opened != NONE else len(s.log)
        commits = [n for n in range(below) if isinstance(s.log[n], Commit)]
        valid = [n for n in commits if whole(s, n)]
        best = valid[-1] if valid else NONE
        after = Phase.TRAIN if Rule.OPEN_BEFORE_RESTORE not in self.off else Phase.LOOK

        def takes(s: Store, n: int) -> Store:
            wrong = ""
            if n != NONE and not whole(s, n):
                wrong = f"writer {w.id} trains from the damaged commit {n}"
            elif n < best:
                wrong = f"writer {w.id} restored commit {n} although commit {best} is whole: committed steps are lost"
            return _put(s, w._replace(phase=after, base=n))._replace(wrong=wrong)

        chosen = best
        if Rule.VERIFY_SHARDS in self.off:
            chosen = commits[-1] if commits else NONE
        yield f"{who} restores commit {chosen}", takes(s, chosen)
        if not s.faults:
            return
        stale = s._replace(faults=s.faults - 1)
        older = [n for n in valid if n < below - 1]
        if Rule.PROBE_PAST_LISTING in self.off:
            yield f"{who} restores from a stale listing", takes(stale, max([n for n in older if n < best], default=NONE))
        if Rule.UNREADABLE_IS_NOT_INVALID in self.off and valid:
            yield f"{who} cannot read commit {best} and steps over it", takes(stale, valid[-2] if valid[1:] else NONE)

    def _writes(self, s: Store, w: Writer, who: str) -> Iterator[tuple[str, Store]]:
        author = (w.id, w.saves)
        save = author if Rule.UNIQUE_SAVES not in self.off else (0, w.saves)
        if w.parts < PARTS:
            rest = frozenset(x for x in s.shards if (x.save, x.part) != (save, w.parts))
            shard = Shard(save, w.parts, author)
            yield f"{who} writes shard {w.parts} of save {save}", _put(
                s._replace(shards=rest | {shard}), w._replace(parts=w.parts + 1)
            )
        if w.parts == PARTS or Rule.SHARDS_FIRST in self.off:
            # The first try goes where its own last record points, without looking: the log itself must refuse it.
            ready = w._replace(pending=Commit(w.id, save, author, w.base))
            yield f"{who} sends the commit of save {save} to {w.tail}", self._sends(s, ready, w.tail)

    def _cleans(self, s: Store, w: Writer, who: str) -> Iterator[tuple[str, Store]]:
        """Deletes left-over shards: of no commit that it knows of."""
        seen = s.log[: w.tail]
        known = {r.save for r in seen if isinstance(r, Commit)}
        older = {r.writer for r in seen[: max(w.opened, 0)] if isinstance(r, Open)} - {w.id}
        doomed = frozenset(
            x for x in s.shards if x.save not in known and (x.save[0] in older or Rule.CLEAN_ONLY_OLDER in self.off)
        )
        if doomed:
            yield f"{who} deletes left-over shards of {sorted({x.save for x in doomed})}", s._replace(
                shards=s.shards - doomed
            )

    # -- the store and its network

    def _lands(self, s: Store, put: Put) -> Iterator[tuple[str, Store]]:
        w = s.writers[put.writer]
        s = s._replace(flying=s.flying - {put})
        waits = w.phase is Phase.SENT and (w.tail, w.pending) == (put.n, put.record)
        label = f"writer {w.id}'s {type(put.record).__name__.lower()} arrives at {put.n}"
        if Rule.CONDITIONAL_CREATE not in self.off and put.n < len(s.log) and s.log[put.n] is not None:
            if not waits:
                yield f"{label}: refused, nobody waits", s
            elif Rule.REREAD_ON_CONFLICT in self.off:
                yield f"{label}: refused", self._sends(s, w, put.n + 1)
            else:
                yield f"{label}: refused", _put(s, w._replace(phase=Phase.LOOK))
            return
        log = [*s.log, *[None] * (put.n + 1 - len(s.log))]
        log[put.n] = put.record
        s = s._replace(log=tuple(log))
        yield label, self._appended(s, w, put.n) if waits else s
        if waits and s.faults:
            lost = _put(s._replace(faults=s.faults - 1), w._replace(phase=Phase.LOOK))
            yield f"{label}: the response is lost", lost

    def _faults(self, s: Store) -> Iterator[tuple[str, Store]]:
        for w in s.writers:
            if w.phase is Phase.SENT:
                yield f"writer {w.id} gives up waiting and looks again", _put(s, w._replace(phase=Phase.LOOK))
                if isinstance(w.pending, Commit):
                    yield f"writer {w.id} gives up waiting and abandons the save", self._abandons(s, w, w.pending)
            if w.phase not in (Phase.NEW, Phase.STOPPED):
                yield f"writer {w.id} is killed", _put(s, w._replace(phase=Phase.STOPPED, pending=None))
        alive = [w for w in s.writers if w.phase not in (Phase.NEW, Phase.STOPPED)]
        if len(alive) > 1:
            stopped = s
            for w in alive:
                stopped = _put(stopped, w._replace(phase=Phase.STOPPED, pending=None))
            yield "total restart: every writer is killed", stopped
        for n, record in enumerate(s.log):
            if isinstance(record, Commit) and whole(s, n):
                damaged = frozenset(x for x in s.shards if (x.save, x.part) != (record.save, 0))
                yield f"a shard of commit {n} rots", s._replace(shards=damaged, rotten=s.rotten | {record.save})

    def _abandons(self, s: Store, w: Writer, commit: Commit) -> Store:
        kept = s.shards
        if Rule.KEEP_UNANSWERED in self.off:
            kept = frozenset(x for x in kept if x.save != commit.save)
        return _put(s._replace(shards=kept), w._replace(phase=Phase.TRAIN, pending=None))

    # -- invariants

    def violation(self, s: Store) -> str | None:
        return s.wrong or _violation(s.log, s)


def whole(s: Store, n: int) -> bool:
    """Whether commit n's shards are all there and all of the save that its author wrote."""
    commit = s.log[n]
    assert isinstance(commit, Commit)
    return all(Shard(commit.save, part, commit.author) in s.shards for part in range(PARTS))


def _violation(log: tuple[Record | None, ...], s: Store) -> str | None:
    owner: Open | None = None
    previous = NONE  # the newest commit that was not damaged from outside
    saves: set[tuple[int, int]] = set()
    for n, record in enumerate(log):
        match record:
            case None:
                return f"the log has a gap at {n}"
            case Open():
                if owner is not None and record.round < owner.round:
                    return f"round {record.round} opened at {n} after round {owner.round}: the newer round is fenced"
                owner = record
            case Commit():
                if record.save not in s.rotten and not whole(s, n):
                    return f"commit {n} is torn"
                if owner is None or owner.writer != record.writer:
                    return f"writer {record.writer} committed {n} after {owner} had taken over"
                if record.author in saves:
                    return f"save {record.author} was committed twice"
                if record.base != previous and not _only_rot_between(s, record.base, n):
                    return f"fork: commit {n} continues {record.base}, not {previous}"
                saves.add(record.author)
                previous = n
    return None


def _only_rot_between(s: Store, base: int, n: int) -> bool:
    between = [r for r in s.log[base + 1 : n] if isinstance(r, Commit)]
    return base < n and all(r.save in s.rotten for r in between)


def _put(s: Store, w: Writer) -> Store:
    return s._replace(writers=(*s.writers[: w.id], w, *s.writers[w.id + 1 :]))
