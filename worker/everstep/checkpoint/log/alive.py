"""A sign of life of the run that owns the log, so that a second run on its URL is refused before it does harm.

Two runs that do not know of each other would both be right by the log's rules: the younger takes the log, goes on from
the older one's state, and the older one is fenced. So the owner writes a small object anew every `BEAT_SECONDS`, and
a run that wants to take the log from somebody else watches it for a change. Only a change that was seen counts: no
clocks are compared, and an owner that is stopped, slow or cut off counts as dead.

Invariant: this is advice. A wrong answer costs a wait or a start, never state: the log's records alone say who may
write (`log`).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from everstep.checkpoint.errors import FormatError, Occupied
from everstep.checkpoint.flag import Flag
from everstep.checkpoint.format import wire
from everstep.checkpoint.format.layout import ALIVE, alive_name, alive_number
from everstep.checkpoint.format.manifest import NONE, VERSION, OpenRecord
from everstep.checkpoint.format.wire import Fields
from everstep.checkpoint.log.decisions import Claim
from everstep.storage import NotFound, ObjectStore, StorageError

log = logging.getLogger("everstep.checkpoint")

BEAT_SECONDS: Final = 3.0
QUIET_SECONDS: Final = 8.0  # without a change: nobody is there, or nobody who will write soon
# A job that was deleted has its grace period to end in; the job that was made anew for the same URL waits for it.
PATIENCE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.5
_MOST_OWNERS: Final = 3  # owners that may take the log one after another while this run waits
_LOOKS: Final = 3  # reads of a sign, which may be half written, or absent for a moment while it is replaced


@dataclass(frozen=True, slots=True)
class Process:
    """Identifies a process, so that another one on the same machine can find out whether it still runs."""

    host: str  # for people
    machine: str  # one kernel and one space of pids; "" where that is not known
    pid: int
    started: str  # the start time as the kernel counts it, because pids are reused

    @classmethod
    def this(cls) -> Process:
        return cls(socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()) or "")

    def runs(self) -> bool | None:
        """Whether the process runs; None if this process cannot know that."""
        if not self.machine or not self.started or self.machine != _machine():
            return None
        return _started(self.pid) == self.started


_UNREADABLE: Final = Process("a machine that its damaged sign of life does not tell", "", 0, "")


class Sign:
    """Writes the sign of life of this process, which made the open record `own`, from a thread of its own."""

    def __init__(self, store: ObjectStore, own: OpenRecord) -> None:
        self._store = store
        self._own = own
        self.stop = Flag()
        self._thread = threading.Thread(target=self._run, name="everstep-alive", daemon=True)
        self._thread.start()
        _signs.add(self)

    def end(self, timeout: float = 0.0) -> None:
        """Stop writing the sign. Wait at most `timeout` seconds until it is deleted from the store."""
        self.stop.set()
        if timeout:
            self._thread.join(timeout)

    def _run(self) -> None:
        who, beat, name = Process.this(), 0, alive_name(self._own.n)
        while True:
            body: dict[str, wire.Json] = {
                "version": VERSION, "n": self._own.n, "beat": beat, "host": who.host, "machine": who.machine,
                "pid": who.pid, "started": who.started,
            }  # fmt: skip
            try:
                self._store.put(name, wire.encode(body))
                if beat == 0:
                    self._sweep()
            except StorageError as e:
                log.debug("the sign of life was not written: %s", e)
            if self.stop.wait(BEAT_SECONDS):
                break
            beat += 1
        try:
            self._store.delete(name)
        except StorageError as e:
            log.debug("the sign of life cannot be removed, and is not renewed any more: %s", e)

    def _sweep(self) -> None:
        for info in self._store.list(ALIVE):
            if (n := alive_number(info.name)) is not None and n < self._own.n:
                self._store.delete(info.name)


_signs: Final[weakref.WeakSet[Sign]] = weakref.WeakSet()


def end_all(timeout: float) -> None:
    """End all signs of this process, as if it had ended in order. Waits at most `timeout` seconds for each."""
    for sign in list(_signs):
        sign.end(timeout)


def wait_for_owner(
    store: ObjectStore,
    newest_open: Callable[[], OpenRecord | None],
    claim: Claim,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when no other run that owns the log is alive. Raises `Occupied`, naming the owner, if one is.

    Does not wait if the owner is an earlier start of the same job or rendezvous, a run that ended in order, a process
    of this machine that is gone, or this process itself. Else it waits at most `QUIET_SECONDS`; a job waits up to
    `PATIENCE_SECONDS` more for the end of another one.
    """
    before = NONE
    for _ in range(_MOST_OWNERS):
        owner = newest_open()
        if owner is None or owner.n == before or _is_same(owner, claim):
            return
        if not _waited(store, owner, claim, clock, sleep):
            return
        before = owner.n


def _waited(
    store: ObjectStore, owner: OpenRecord, claim: Claim, clock: Callable[[], float], sleep: Callable[[float], None]
) -> bool:
    """Wait until the owner has ended or gives no sign any more. False if it need not be waited for."""
    sign = _read(store, owner, sleep)
    if sign is None:
        return False
    last, who = sign
    if who == Process.this() or who.runs() is False:
        return False
    named = _named(owner, who)
    log.warning("%s: record %d is of %s; waiting up to %g s for a sign of life", store.url, owner.n, named,
                QUIET_SECONDS)  # fmt: skip
    began = changed = clock()
    alive = False
    patience = PATIENCE_SECONDS if claim.job_uid else 0.0
    while clock() - changed < QUIET_SECONDS:
        sleep(_POLL_SECONDS)
        sign = _read(store, owner, sleep)
        if sign is None:
            log.warning("%s: %s has ended", store.url, named)
            return True
        if sign[0] != last:
            last, changed, alive = sign[0], clock(), True
        if alive and clock() - began >= patience:
            raise Occupied(
                f"{store.url}: {named} has the log (record {owner.n}, opened at {owner.at}) and was seen alive "
                f"{clock() - changed:.1f} s ago. It would be fenced if this run took the log. Give this run another "
                "URL, or end that one and start again"
            )
    log.warning("%s: %s gave no sign of life in %g s; it is fenced now", store.url, named, QUIET_SECONDS)
    return True


def _is_same(owner: OpenRecord, claim: Claim) -> bool:
    """Whether the claim is of the owner's own job, or of its own run outside Kubernetes."""
    if claim.job_uid or owner.job_uid:
        return claim.job_uid == owner.job_uid
    return bool(claim.rendezvous) and claim.rendezvous == owner.rendezvous


def _named(owner: OpenRecord, who: Process) -> str:
    job = f"job {owner.job_uid}, " if owner.job_uid else ""
    if who == _UNREADABLE:
        return f"{job}writer {owner.writer}"
    return f"{job}process {who.pid} on {who.host}"


def _read(store: ObjectStore, owner: OpenRecord, sleep: Callable[[float], None]) -> tuple[int, Process] | None:
    """The number of the newest beat, and the process that wrote it; None if there is no sign.

    An unreadable sign does not mean that its owner is dead: a live owner writes it again. So it counts as a sign, with
    the beat -1.
    """
    name = alive_name(owner.n)
    data: bytes | None = None
    for left in range(0 if store.capabilities.whole else _LOOKS - 1, -1, -1):
        try:
            data = store.get(name)
            fields = Fields(wire.decode(data, name), name)
            who = Process(fields.text("host"), fields.text("machine"), fields.integer("pid"), fields.text("started"))
            return fields.integer("beat"), who
        except (NotFound, FormatError) as e:
            data = None if isinstance(e, NotFound) else data
            if left:
                sleep(_POLL_SECONDS)
    return None if data is None else (-1, _UNREADABLE)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When the process was started, in ticks since the kernel started; None if it does not run."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else rest[18]
