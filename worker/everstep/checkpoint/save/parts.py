"""How the coordinator gathers the ranks' parts of one save, through the store alone.

Each rank writes its shard, then the description of it; the coordinator waits until every description is there. No
collective is used: a peer that died, or whose process group is gone, costs this save and nothing else. A rank that
fails says so in its description, so that nobody waits for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from everstep.checkpoint.errors import FormatError, SaveFailed, StateMismatch
from everstep.checkpoint.flag import Flag
from everstep.checkpoint.format.chunks import describe
from everstep.checkpoint.format.layout import part_name, save_folder, shard_name
from everstep.checkpoint.format.manifest import NONE, Entry, Part, PartFailed, Shard, decode_part, encode_part
from everstep.checkpoint.format.wire import Json
from everstep.checkpoint.state.finite import Checked, Nonfinite, nonfinite
from everstep.storage import Capabilities, NotFound, ObjectStore, Unsynced

# --- pipeline
# Turns staged bytes into a durable shard: its parts are written on a few threads while the caller's hashes its chunks.
# The threads wait in system calls or hash without the interpreter's lock, so the training thread is not held up.
# Invariants: a shard's name is that of one attempt of one rank, so that a request of it that arrives late, when the
# commit exists, writes the same bytes again; when `write_shard` returns or raises, nothing reads the staged bytes any
# more; no memory is used beside them but what the store takes for the parts under way.

log = logging.getLogger("everstep.checkpoint")

THREADS: Final = 4
_ATTEMPTS: Final = 3  # to write a shard whose bytes the disk has lost


def write_shard(store: ObjectStore, path: str, data: memoryview) -> Shard:
    """Write the shard and return the manifest's description of it. No other shard may ever have this path.

    Raises what the store raises.
    """
    # One request is enough for a shard of one part, and needed where the store takes no parts.
    if len(data) <= store.capabilities.part_size or not store.capabilities.multipart:
        return _at_once(store, path, data)
    for _ in range(_ATTEMPTS - 1):
        try:
            return _in_parts(store, path, data)
        except Unsynced as e:
            log.warning("%s; it is written again", e)
    return _in_parts(store, path, data)


def _at_once(store: ObjectStore, path: str, data: memoryview) -> Shard:
    with ThreadPoolExecutor(1, thread_name_prefix="everstep-write") as pool:
        written = pool.submit(store.put, path, data)
        shard = describe(path, data)
        written.result()
        return shard


def _in_parts(store: ObjectStore, path: str, data: memoryview) -> Shard:
    upload = store.start_upload(path, len(data))
    starts = range(0, len(data), upload.part_size)
    parts: list[Future[None]] = []
    failed = Flag()

    def write(number: int, start: int) -> None:
        if failed.is_set():
            return
        try:
            upload.write_part(number, data[start : start + upload.part_size])
        except BaseException:
            failed.set()  # here, because this thread may begin the next part before the caller sees the error
            raise

    try:
        with ThreadPoolExecutor(_threads(store.capabilities), thread_name_prefix="everstep-write") as pool:
            parts = [pool.submit(write, number, start) for number, start in enumerate(starts)]
            try:
                shard = describe(path, data)
                done, _ = futures.wait(parts, return_when=FIRST_EXCEPTION)
                for part in done:
                    part.result()
            finally:
                for part in parts:
                    part.cancel()  # those not begun, once one has failed
        upload.commit()
        return shard
    except BaseException:
        upload.abort()
        raise


def _threads(capabilities: Capabilities) -> int:
    # A store without parallel parts needs them in order: one thread writes them so.
    if not capabilities.parallel_parts:
        return 1
    # Each thread that writes a file keeps a core busy, and one core is left to training.
    return max(1, min(THREADS, _cores() - 1)) if capabilities.local else THREADS


def _cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- parts

_POLL_FIRST: Final = 0.02
_POLL_MOST: Final = 1.0
_READS: Final = 16  # parts that are read at the same time: a thread mostly waits for the store
PATIENCE: Final = 10.0  # seconds after which a wait for other ranks is logged, if this rank's own part took less time
_OWN_TIMES: Final = 3.0  # and otherwise so many times what its own part took: each rank writes about as much
_NAMED: Final = 16  # diverged parameters that a manifest names, for each rank; and ranks that a message names


@dataclass(frozen=True, slots=True)
class Staged:
    """One rank's part of a save, ready to be written. `data` is valid until the next save is staged."""

    step: int
    save_id: str
    rank: int
    world_size: int
    data: memoryview | None  # None: this rank holds nothing of the state
    entries: tuple[Entry, ...]
    own_values: dict[str, Json]
    values: dict[str, Json]  # the replicated values; a commit has the coordinator's
    checked: tuple[Checked, ...] = ()  # the parameters' bytes in `data`
    nonfinite: Nonfinite = "allow"
    digests: Mapping[str, int] = field(default_factory=dict)  # of the replicated state, where ranks compare it
    union: Mapping[str, Json] = field(default_factory=dict)  # this rank's content of unions, by key
    union_digests: Mapping[str, int] = field(default_factory=dict)  # of tensors in `union` that other ranks hold too
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the state; a commit has the coordinator's


def write_part(store: ObjectStore, staged: Staged) -> Part:
    """Write the shard, then its description. The names are this save's own, so repeating it is harmless.

    Raises `SaveFailed` if parameters hold NaN or infinity and such a state is to be refused.
    """
    shard = None
    # The check runs while the shard is written. A diverged state is rare, so a shard is seldom written in vain.
    with ThreadPoolExecutor(1, thread_name_prefix="everstep-finite") as pool:
        check = pool.submit(_nonfinite, staged)
        if staged.data is not None:
            shard = write_shard(store, shard_name(staged.save_id, staged.rank), staged.data)
        bad = check.result()
    part = Part(
        staged.rank, staged.save_id, shard, staged.entries, dict(staged.own_values), bad, dict(staged.digests),
        dict(staged.union), dict(staged.union_digests), staged.step,
    )  # fmt: skip
    if staged.world_size > 1:
        store.put(part_name(staged.save_id, staged.rank), encode_part(part))
    return part


def _nonfinite(staged: Staged) -> tuple[str, ...]:
    """The parameters that hold NaN or infinity, at most `_NAMED` of them; none where they are allowed."""
    if staged.nonfinite == "allow" or staged.data is None:
        return ()
    bad = nonfinite(staged.data, staged.checked)
    if bad and staged.nonfinite == "refuse":
        raise SaveFailed(
            f"step {staged.step} was not saved: {', '.join(bad[:3])}{' and more' * (len(bad) > 3)} hold NaN or "
            "infinity, and a run must not go back to that; pass nonfinite='mark' or 'allow' to save such states"
        )
    return tuple(bad[:_NAMED])


def give_up_part(store: ObjectStore, save_id: str, rank: int, reason: str) -> None:
    """Tell the coordinator that this rank's part will not come."""
    store.put(part_name(save_id, rank), encode_part(PartFailed(rank, save_id, reason)))


@dataclass(frozen=True, slots=True)
class Wait:
    """How long the coordinator waits for the other ranks' parts, and what it logs meanwhile. `own`: the seconds that
    its own part took. `called_at`: the script's line that called `save`; empty if a session did, on all ranks alike."""

    timeout: float
    own: float = 0.0
    called_at: str = ""

    @property
    def patience(self) -> float:
        return max(PATIENCE, _OWN_TIMES * self.own)

    @property
    def remedy(self) -> str:
        """What to write if the other ranks have not called `save`."""
        if not self.called_at:
            return ""
        return (
            f". Every rank calls save(), not rank 0 alone: look at {self.called_at}, and take an `if rank == 0` around "
            "it away"
        )


def gather_parts(store: ObjectStore, staged: Staged, own: Part, wait: Wait, stop: Flag) -> list[Part]:
    """Every rank's part in rank order. Raises `SaveFailed` naming the ranks that failed or did not come in
    time, and `StateMismatch` for a rank whose save of this number is of another step."""
    with ThreadPoolExecutor(_READS, thread_name_prefix="everstep-parts") as pool:
        return _gather(store, staged, own, wait, stop, pool)


def _gather(store: ObjectStore, staged: Staged, own: Part, wait: Wait, stop: Flag, pool: Executor) -> list[Part]:
    parts = {own.rank: own}
    torn: dict[int, FormatError] = {}
    began, pause, is_logged = time.monotonic(), _POLL_FIRST, False
    while len(parts) < staged.world_size:
        listed = {info.name for info in store.list(save_folder(staged.save_id))}
        before = len(parts)
        wanted = [r for r in range(staged.world_size) if r not in parts and part_name(staged.save_id, r) in listed]
        for rank, part in _read_all(store, staged.save_id, wanted, pool):
            match part:
                case Part():
                    if part.step not in (NONE, staged.step):
                        raise _of_another_step(staged, part)
                    parts[rank] = part
                case PartFailed(_, _, reason):
                    raise SaveFailed(f"step {staged.step}: rank {rank} gave up: {reason}")
                case FormatError() as e:
                    if store.capabilities.whole:
                        raise e
                    torn[rank] = e  # perhaps it is still being written
                case None:
                    pass  # a listing from before a deletion
        if len(parts) == staged.world_size:
            break
        waited = time.monotonic() - began
        absent = [r for r in range(staged.world_size) if r not in parts]
        if waited > wait.patience and not is_logged:
            is_logged = True
            log.warning(
                "the save of step %d: after %.0f s there is no part from ranks %s: they still write, or have not "
                "called save(). The save fails after %.0f s%s",
                staged.step, waited, absent[:_NAMED], wait.timeout, wait.remedy,
            )  # fmt: skip
        if waited > wait.timeout:
            raise _too_late(staged.step, absent, torn, wait)
        pause = _POLL_FIRST if len(parts) > before else min(_POLL_MOST, pause * 2)
        if stop.wait(pause):
            raise SaveFailed(f"step {staged.step}: closed while waiting for the other ranks")
    return [parts[rank] for rank in range(staged.world_size)]


def _too_late(step: int, absent: Sequence[int], torn: Mapping[int, FormatError], wait: Wait) -> SaveFailed:
    if unreadable := [torn[rank] for rank in absent if rank in torn]:
        return SaveFailed(f"step {step}: not whole within {wait.timeout:.0f} s: {unreadable[0]}")
    return SaveFailed(f"step {step}: no part from ranks {absent[:_NAMED]} within {wait.timeout:.0f} s{wait.remedy}")


def _of_another_step(staged: Staged, part: Part) -> StateMismatch:
    """A rank numbers its saves without asking the others. One that leaves out a save is a number behind from then on,
    and its parts would lie beside those of another step."""
    return StateMismatch(
        f"rank {part.rank} saved step {part.step} where rank {staged.rank} saved step {staged.step}: no commit was "
        "made of the two. One of them left out a save, as by `continue`, a clock or a loss of its own. Call save() for "
        "the same steps on all ranks: decide by the step, by should_save(), or by a number that all ranks have reduced"
    )


_Read = Part | PartFailed | FormatError | None


def _read_all(store: ObjectStore, save_id: str, ranks: Sequence[int], pool: Executor) -> Iterator[tuple[int, _Read]]:
    """Each rank's part, in the order of `ranks`. Raises the store's error for the first rank that has one."""
    return zip(ranks, pool.map(partial(_read, store, save_id), ranks), strict=True)


def _read(store: ObjectStore, save_id: str, rank: int) -> _Read:
    name = part_name(save_id, rank)
    try:
        return decode_part(store.get(name), rank, save_id, name)
    except NotFound:
        return None
    except FormatError as e:
        return e
