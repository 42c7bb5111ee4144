"""Worlds that form anew in living processes, and one commit log: who may claim the log for which round.

The rendezvous gives rounds, one after the other, each with its members; a member hears of a round late or never. A
process that a newer round leaves out, or that is paused, does not know it: it goes on with whatever it had begun, and
its requests land when they like. Processes are started before any round, or while a round runs, and come into later
ones in which their memory lives on. Everything may be lost at once: all processes (a suspend, a node that held them
all), or what the rendezvous held.

What a writer decides is the worker's own code (`code`). A training state is the number of its steps: a step that is
taken again after a loss gives the same state. A world is known by its place in `worlds`, which no decision reads: there
they stand in the order in which they were formed, whatever numbers they have.

Invariant: the log is opened by worlds in the order in which they were formed, commits never go back, a restore takes
the newest commit, and rank 0 of the newest world is never refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from enum import StrEnum
from typing import NamedTuple

from everstep.checkpoint.format.manifest import NONE, CommitRecord, OpenRecord, Record
from everstep.checkpoint.log.decisions import Again, Append, Claim, Done, Head, Refuse, Unknown, advance
from support.protocol.code import WriterCode
from support.protocol.rules import WorldRule as Rule


class Counted(StrEnum):
    """By whom rounds are counted."""

    OPERATOR = "the operator, in the job's status: no number is given twice"
    ETCD = "a document in etcd, for a TrainingJob"
    RUN = "a document in etcd, outside of Kubernetes"


class Phase(StrEnum):
    OUT = "out"  # in no round yet, or on the way into the newest
    MET = "met"  # in its round, whose members are not at one state yet
    IDLE = "idle"  # trains
    LOOK = "look"  # must read the end of the log in order to open
    SENT = "sent"  # waits for the answer to a conditional create
    RESTORE = "restore"
    WRITTEN = "written"  # the shards of a save are durable
    DEAD = "dead"


class World(NamedTuple):
    rendezvous: int
    number: int
    members: tuple[int, ...]  # in rank order


class Process(NamedTuple):
    id: int
    told: int = 0  # the round that its agent was in when it started this process; 0: none
    world: int = -1
    phase: Phase = Phase.OUT
    steps: int = -1  # of the state that it holds; -1: it holds none
    saving: int = -1  # the steps of the save that it has begun; -1: it opens in order to restore
    saved: int = 0  # of its newest save in this world, whatever became of it: bounds the model, and nothing else
    head: Head = Head()
    own: OpenRecord | None = None
    attempt: Record | None = None

    @property
    def alive(self) -> bool:
        return self.phase is not Phase.DEAD


class Put(NamedTuple):
    """A conditional create on its way."""

    process: int
    record: Record


class State(NamedTuple):
    log: tuple[Record, ...] = ()
    flying: tuple[Put, ...] = ()
    processes: tuple[Process, ...] = ()
    worlds: tuple[World, ...] = ()
    rendezvous: int = 0  # how often it has lost what it held
    faults: int = 0  # how many may still happen
    wrong: str = ""  # ghost: a step that broke an invariant


class WorldsModel:
    """`processes` and `worlds` bound how many there ever are; `steps` how far training goes."""

    def __init__(
        self,
        off: frozenset[Rule] = frozenset(),
        *,
        counted: Counted = Counted.OPERATOR,
        processes: int = 3,
        worlds: int = 3,
        steps: int = 1,
        faults: int = 1,
    ) -> None:
        self.off = off
        self.code = WriterCode()
        self.counted = counted
        self.processes, self.worlds, self.steps, self.faults = processes, worlds, steps, faults

    def initial(self) -> State:
        return State(faults=self.faults)

    def canonical(self, s: State) -> Hashable:
        return s

    def violation(self, s: State) -> str | None:
        return s.wrong or _out_of_order(s.log)

    def actions(self, s: State) -> Iterator[tuple[str, State]]:
        if s.wrong:
            return
        yield from self._starts(s)
        yield from self._forms(s)
        for p in s.processes:
            yield from self._process_steps(s, p)
        for message in dict.fromkeys(s.flying):
            yield from self._lands(s, message)
        if s.faults:
            yield from self._faults(s._replace(faults=s.faults - 1))

    # -- rounds

    def _starts(self, s: State) -> Iterator[tuple[str, State]]:
        if len(s.processes) < self.processes:
            newest = s.worlds[-1].number if s.worlds and s.worlds[-1].rendezvous == s.rendezvous else 0
            for told in sorted({0, newest}):
                p = Process(len(s.processes), told)
                when = f"in round {told}" if told else "before its first round"
                yield f"process {p.id} is started {when}", s._replace(processes=(*s.processes, p))

    def _forms(self, s: State) -> Iterator[tuple[str, State]]:
        """Of any one or two processes that live: the others were evicted, rightly or not."""
        if len(s.worlds) == self.worlds:
            return
        before = s.worlds[-1].members if s.worlds else ()
        here = [p.id for p in s.processes if p.alive]
        for size in (1, 2):
            for members in itertools.combinations(here, size):
                ranked = sorted(members, key=lambda i: (i not in before, before.index(i) if i in before else i))
                world = World(s.rendezvous, self._next_number(s), tuple(ranked))
                yield f"round {world.number} of {ranked} forms", s._replace(worlds=(*s.worlds, world))

    def _next_number(self, s: State) -> int:
        if self.counted is Counted.OPERATOR:
            return len(s.worlds) + 1
        return sum(w.rendezvous == s.rendezvous for w in s.worlds) + 1

    # -- processes

    def _process_steps(self, s: State, p: Process) -> Iterator[tuple[str, State]]:
        if not p.alive:
            return
        newest = len(s.worlds) - 1
        if s.worlds and p.world != newest and p.id in s.worlds[newest].members:
            # Whatever it did is given up; what it sent may still land.
            entered = Process(p.id, p.told, newest, Phase.MET, p.steps)
            yield f"process {p.id} enters round {s.worlds[newest].number}", put(s, entered)
        if p.world < 0:
            return
        world = s.worlds[p.world]
        if p.id != world.members[0]:
            return  # what the world does together is played by its rank 0
        members = [s.processes[i] for i in world.members]
        together = all(m.alive and m.world == p.world for m in members)
        name = f"rank 0 of round {world.number}"
        match p.phase:
            case Phase.MET if together:
                yield from self._settles(s, p, members, name)
            case Phase.IDLE if together:
                if p.steps < self.steps:
                    yield f"round {world.number} trains", _all(s, members, steps=p.steps + 1)
                if p.steps > p.saved:
                    after = Phase.LOOK if p.own is None else Phase.WRITTEN
                    saving = p._replace(phase=after, saving=p.steps, saved=p.steps)
                    yield f"round {world.number} begins a save", put(s, saving)
            case Phase.LOOK:
                yield f"{name} reads the end of the log", self._opens(s, p, self.code.head_of(s.log))
            case Phase.RESTORE if together:
                assert p.own is not None
                found = s.log[p.own.commit] if p.own.commit != NONE else None
                steps = found.step if isinstance(found, CommitRecord) else 0
                label = f"round {world.number} restores {steps} steps"
                yield label, _all(s, members, steps=steps, phase=Phase.IDLE)
            case Phase.WRITTEN:
                yield f"{name} sends the commit of {p.saving} steps", self._commits(s, p, p.head)
            case _:
                pass

    def _settles(self, s: State, p: Process, members: list[Process], name: str) -> Iterator[tuple[str, State]]:
        best = max(m.steps for m in members)
        if best >= 0:
            # Nobody looks at the store, which may be away: of what others have saved meanwhile the first save tells.
            yield f"{name}: all go on from {best} steps", _all(s, members, steps=best, phase=Phase.IDLE)
        else:
            yield f"{name}: all restore", put(s, p._replace(phase=Phase.LOOK, saving=-1))

    def _claim(self, s: State, p: Process) -> Claim:
        world = s.worlds[p.world]
        number = world.number
        if Rule.CLAIM_THE_PRESENT_ROUND in self.off:
            number = max(s.processes[i].told for i in world.members)
        job = "" if self.counted is Counted.RUN else "a"
        rendezvous = "" if self.counted is Counted.OPERATOR else f"r{world.rendezvous}"
        if Rule.RENDEZVOUS_OWNS in self.off:
            rendezvous = ""
        elif Rule.NEW_RENDEZVOUS_NEW_OWNER in self.off and rendezvous:
            rendezvous = "the run's id"
        return Claim(f"{p.id:02x}{p.world:02x}0000", number, job, len(world.members), "", 1, rendezvous)

    def _opens(self, s: State, p: Process, head: Head) -> State:
        match self.code.open(head, self._claim(s, p)):
            case Append(record):
                return _send(s, p._replace(head=head), record)
            case Refuse(reason) | Unknown(reason):
                return _refused(s, p, reason)

    def _commits(self, s: State, p: Process, head: Head) -> State:
        assert p.own is not None
        save = self.code.save_id(p.own, max(1, p.saving))
        draft = CommitRecord(
            NONE, p.own.writer, p.own.round, p.own.job_uid, p.saving, save, 1, "", NONE, NONE, (), (), 0
        )
        match self.code.commit(head, p.own, draft):
            case Append(record):
                return _send(s, p._replace(head=head), record)
            case Refuse(reason):
                return _refused(s, p, reason)
            case Unknown():
                return put(s, p._replace(phase=Phase.IDLE, attempt=None))

    def _appended(self, s: State, p: Process, record: Record) -> State:
        head = advance(p.head, record)
        match record:
            case OpenRecord():
                newest = s.log[record.commit] if record.commit != NONE else None
                behind = isinstance(newest, CommitRecord) and p.saving < newest.step
                if Rule.COMPARE_UNDER_OWN_OPEN in self.off:
                    behind = False
                after = Phase.RESTORE if p.saving < 0 or behind else Phase.WRITTEN
                return put(s, p._replace(phase=after, head=head, own=record, attempt=None))
            case CommitRecord():
                return put(s, p._replace(phase=Phase.IDLE, head=head, attempt=None))

    # -- the store and its network

    def _lands(self, s: State, message: Put) -> Iterator[tuple[str, State]]:
        record, p = message.record, s.processes[message.process]
        flying = list(s.flying)
        flying.remove(message)
        s = s._replace(flying=tuple(flying))
        waits = p.phase is Phase.SENT and p.attempt == record
        what = "open" if isinstance(record, OpenRecord) else "commit"
        label = f"the {what} of process {p.id}, round {record.round}, arrives at {record.n}"
        if record.n < len(s.log):
            yield f"{label}: refused", self._meets(s, p, record, s.log[record.n]) if waits else s
            return
        s = s._replace(log=(*s.log, record))
        yield label, self._appended(s, p, record) if waits else s
        if waits and s.faults:
            yield f"{label}: the response is lost", _send(s._replace(faults=s.faults - 1), p, record)

    def _meets(self, s: State, p: Process, attempt: Record, found: Record) -> State:
        match self.code.conflict(p.head, attempt, found):
            case Done():
                return self._appended(s, p, attempt)
            case Refuse(reason):
                return _refused(s, p, reason)
            case Again(head):
                return self._opens(s, p, head) if isinstance(attempt, OpenRecord) else self._commits(s, p, head)

    def _faults(self, s: State) -> Iterator[tuple[str, State]]:
        alive = [p for p in s.processes if p.alive]
        for p in alive:
            yield f"process {p.id} is killed", put(s, _dead(p))
        if len(alive) > 1:
            yield "total loss: every process is killed", total_loss(s)
        # Not before it has opened the log: a rendezvous that nobody has heard of has no place in its order (ADR 0001).
        known = {s.worlds[_world_of(r)].rendezvous for r in s.log if isinstance(r, OpenRecord)}
        if self.counted is not Counted.OPERATOR and s.rendezvous in known:
            yield "the rendezvous loses what it held", s._replace(rendezvous=s.rendezvous + 1)


def total_loss(s: State) -> State:
    """Without any process: what a suspend leaves, or a node that held them all."""
    return s._replace(processes=tuple(_dead(p) if p.alive else p for p in s.processes))


def put(s: State, p: Process) -> State:
    """The state with this process in its place."""
    return s._replace(processes=(*s.processes[: p.id], p, *s.processes[p.id + 1 :]))


def _all(s: State, members: list[Process], **changed: object) -> State:
    for m in members:
        s = put(s, m._replace(**changed))  # type: ignore[arg-type]
    return s


def _dead(p: Process) -> Process:
    """All that it knew is forgotten: states that differ only in it are one."""
    return Process(p.id, p.told, phase=Phase.DEAD)


def _refused(s: State, p: Process, reason: str) -> State:
    wrong = f"rank 0 of the newest world is refused: {reason}" if p.world == len(s.worlds) - 1 else ""
    return put(s, _dead(p))._replace(wrong=wrong)


def _send(s: State, p: Process, record: Record) -> State:
    flying = sorted((*s.flying, Put(p.id, record)), key=lambda m: (m.process, m.record.n, repr(m.record)))
    return put(s._replace(flying=tuple(flying)), p._replace(phase=Phase.SENT, attempt=record))


def _world_of(record: Record) -> int:
    """Ghost: the place in `worlds` of the world that made the record."""
    return int(record.writer[2:4], 16)


def _out_of_order(log: tuple[Record, ...]) -> str | None:
    owner: Record | None = None
    steps = 0
    for record in log:
        match record:
            case OpenRecord():
                if owner is not None and _world_of(record) < _world_of(owner):
                    return f"an older world opened the log at {record.n}, after a newer one: the newer one is fenced"
                owner = record
            case CommitRecord():
                if owner is None or owner.writer != record.writer:
                    return f"record {record.n} is the commit of a writer that does not own the log"
                if record.step < steps:
                    return f"commit {record.n} goes back from {steps} steps to {record.step}"
                steps = record.step
    return None


def goes_on(model: WorldsModel, s: State, *, lost: bool) -> str | None:
    """Whether a process that is started now trains and commits, if nothing more goes wrong; why not, if it does not.

    `lost`: after all others were killed. Else it is in a world of its own, and the others do not hear of that, as if
    all were cut off.
    """
    s = (total_loss(s) if lost else s)._replace(faults=0)
    saved = [r.step for r in (*s.log, *(m.record for m in s.flying)) if isinstance(r, CommitRecord)]
    free = WorldsModel(model.off, counted=model.counted, steps=max(saved, default=0) + 1)
    me = len(s.processes)
    s = s._replace(processes=(*s.processes, Process(me)))
    s = s._replace(worlds=(*s.worlds, World(s.rendezvous, free._next_number(s), (me,))))
    for _ in range(24 + 2 * len(s.flying)):
        p = s.processes[me]
        if s.wrong:
            return s.wrong
        if p.phase is Phase.IDLE and any(isinstance(r, CommitRecord) and _world_of(r) == p.world for r in s.log):
            return None
        # What others have sent comes first, so that it is in the way wherever it can be.
        steps = [x for m in s.flying if m.process != me for x in free._lands(s, m)]
        steps += [x for m in s.flying if m.process == me for x in free._lands(s, m)]
        steps += list(free._process_steps(s, p))
        if not steps:
            return f"process {me} is stuck in phase {p.phase}"
        s = steps[0][1]
    return f"process {me} has not committed within the bound"
