"""Stores on which an object is visible while it is written: what reads it then waits, and nothing counts as damaged."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint.errors import FormatError, NoCommit, Occupied, SaveFailed
from everstep.checkpoint.flag import Flag
from everstep.checkpoint.format import wire
from everstep.checkpoint.format.complete import MOST_SECONDS, QUIET_SECONDS, read_complete
from everstep.checkpoint.format.layout import KEPT, alive_name, hold_name, metrics_name, part_name, record_name
from everstep.checkpoint.format.manifest import CommitRecord, OpenRecord, Part, encode_part, encode_record
from everstep.checkpoint.keep import Kept
from everstep.checkpoint.log.alive import Process, wait_for_owner
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.checkpoint.log.decisions import Claim
from everstep.checkpoint.retention.late_metrics import all_metrics
from everstep.checkpoint.retention.pins import held_commits, holds, read_kept
from everstep.checkpoint.save.parts import Staged, Wait, gather_parts
from everstep.storage import MemoryStore, ObjectStore, open_store
from everstep.storage.faults import FaultStore
from support.checkpoint.pieces import register

SAVE, HOLDER = "000000000000-aaaaaaaa-00000001", "0" * 16
OPEN = OpenRecord(0, "a" * 32, 1, "", 2, "2026-01-01T00:00:00Z", (), -1, -1)
COMMIT = CommitRecord(1, "a" * 32, 1, "", 5, SAVE, 2, "2026-01-01T00:00:00Z", 0, -1, (), (), {})
BESIDE: dict[str, wire.Json] = {"version": 1, "metrics": {"loss": 0.5}}
MARK: dict[str, Any] = {"version": 1, "n": 1, "step": 5, "at": 7, "metrics": {}, "why": ["best"]}
KEPT_NAME = hold_name(SAVE, KEPT, HOLDER)


def opened(folder: Path, between: Callable[[], object] = lambda: None, scheme: str = "inplace") -> Any:
    register()
    return open_store(f"{scheme}://{folder}", {"between": between}, single_committer=True)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def gathered(store: ObjectStore, timeout: float = 60.0) -> list[Part]:
    staged = Staged(5, SAVE, 0, 2, None, (), {}, {})
    return gather_parts(store, staged, Part(0, SAVE, None, (), {}), Wait(timeout), Flag())


READERS: dict[str, tuple[str, bytes, Callable[[ObjectStore], object], object]] = {
    "another rank's part": (
        part_name(SAVE, 1), encode_part(Part(1, SAVE, None, (), {})), lambda s: [p.rank for p in gathered(s)], [0, 1],
    ),
    "a log record": (record_name(1), encode_record(COMMIT), lambda s: CommitLog(s).read(1), COMMIT),
    "the end of the log": (record_name(1), encode_record(COMMIT), lambda s: CommitLog(s).head().commit, 1),
    "late metrics": (metrics_name(SAVE), wire.encode(BESIDE), lambda s: all_metrics(s, COMMIT), {"loss": 0.5}),
    "a mark of retention": (
        KEPT_NAME, wire.encode(MARK), lambda s: read_kept(s, SAVE, [KEPT_NAME]),
        Kept(SAVE, 1, 5, 7.0, {}, ("best",)),
    ),
    "what is held": (KEPT_NAME, wire.encode(MARK), lambda s: held_commits(s, holds(s)), [1]),
}  # fmt: skip


def test_integer_of_another_hand_that_no_float_can_hold_is_no_number() -> None:
    store = MemoryStore()
    huge = 10**400
    store.put(metrics_name(SAVE), wire.encode(BESIDE | {"metrics": {"loss": huge, "other": 2}}))
    store.put(KEPT_NAME, wire.encode(MARK | {"at": huge, "metrics": {"loss": huge}}))
    assert all_metrics(store, COMMIT) == {"other": 2.0}
    assert read_kept(store, SAVE, [KEPT_NAME]) == Kept(SAVE, 1, 5, 0.0, {}, ("best",))


@pytest.mark.parametrize("what", READERS)
def test_reader_of_a_record_that_is_being_written_waits_for_it(what: str, tmp_path: Path) -> None:
    name, data, read, want = READERS[what]
    found: list[Future[object]] = []

    def begin_to_read() -> None:
        """Go on when a reader that begins here has read what is there until now."""
        reader = FaultStore(opened(tmp_path))
        found.append(pool.submit(read, reader))
        until(lambda: f"get {name}" in reader.calls)

    with ThreadPoolExecutor(3) as pool:
        opened(tmp_path, begin_to_read).put(name, data)
        assert [future.result(60) for future in found] == [want] * 3


def test_owner_whose_sign_of_life_is_being_written_is_not_taken_for_dead(tmp_path: Path) -> None:
    elsewhere = Process("host", "machine", 1, "1")

    def sign(beat: int) -> bytes:
        return wire.encode({
            "version": 1, "n": 0, "beat": beat, "host": elsewhere.host, "machine": elsewhere.machine,
            "pid": elsewhere.pid, "started": elsewhere.started,
        })  # fmt: skip

    store, now, path = opened(tmp_path), 0.0, tmp_path / alive_name(0)
    store.put(alive_name(0), sign(0))

    def sleep(seconds: float) -> None:
        """Each look finds another stage of a sign that is renewed: half of it, none at all, and then all of it."""
        nonlocal now
        now += seconds
        looks, stage = divmod(round(now / 0.5), 3)
        if stage == 0:
            path.write_bytes(sign(looks)[:20])
        elif stage == 1:
            path.unlink()
        else:
            path.write_bytes(sign(looks))

    path.write_bytes(sign(0)[:20])
    with pytest.raises(Occupied, match="process 1 on host"):
        wait_for_owner(store, lambda: OPEN, Claim("b", 1, "", 1, ""), clock=lambda: now, sleep=sleep)


def test_part_that_stays_half_written_fails_the_save_and_is_named(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(part_name(SAVE, 1), encode_part(Part(1, SAVE, None, (), {}))[:-9])
    with pytest.raises(SaveFailed, match=r"not whole within 0 s: .*00001\.json.*checksum"):
        gathered(store, timeout=0.2)


class Changing(MemoryStore):
    """A store and its clock. One more byte of each object is visible after `every` seconds."""

    def __init__(self, every: float, whole: bool) -> None:
        super().__init__()
        self.now, self.every, self.whole = 0.0, every, whole

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, whole=self.whole)

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        return super().get(name, start, end)[: 1 + int(self.now / self.every)]

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("every", "whole", "seconds"),
    [(1.0, True, 0.0), (1e9, False, QUIET_SECONDS), (1.0, False, MOST_SECONDS)],
    ids=["one that is whole or not there", "one that does not change", "one that changes for ever"],
)
def test_bytes_that_do_not_decode_are_damage_after_a_while(every: float, whole: bool, seconds: float) -> None:
    store = Changing(every, whole)
    store.put("a", bytes(1000))
    with pytest.raises(FormatError, match="checksum"):
        read_complete(store, "a", lambda data: wire.decode(data, "a"), clock=lambda: store.now, sleep=store.sleep)
    assert store.now == pytest.approx(seconds, abs=0.2)


def test_record_that_is_written_byte_by_byte_is_read(tmp_path: Path) -> None:
    store = Changing(0.5, whole=False)
    store.put("a", wire.encode({"a": 1}))
    found = read_complete(store, "a", lambda data: wire.decode(data, "a"), clock=lambda: store.now, sleep=store.sleep)
    assert found == {"a": 1}


@pytest.mark.long_but("inplace")
@pytest.mark.parametrize("scheme", ["pieces", "refusing", "silent", "inplace"])
def test_readers_beside_a_run_see_whole_commits_that_only_grow_newer(scheme: str, tmp_path: Path) -> None:
    """Random pauses between the pieces, and readers that never stop; the run deletes what it does not keep."""
    chance, over = random.Random(16), threading.Event()

    def state(step: int) -> dict[str, Any]:
        return {"w": torch.full((300,), float(step)), "step": step}

    def look() -> list[int]:
        store, steps = opened(tmp_path, scheme=scheme), [0]
        while not over.is_set() or steps[-1] == 0:
            try:
                loaded = everstep.load(store=store)
            except NoCommit:
                assert steps == [0]
                continue
            assert set(loaded.state["w"].tolist()) == {float(loaded.step)} == {float(loaded.state["step"])}
            steps.append(loaded.step)
        return steps

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(look) for _ in range(2)]
        try:
            store = opened(tmp_path, lambda: time.sleep(chance.choice((0, 0, 0.001, 0.005))), scheme)
            with everstep.Checkpointer(store=store, keep=2) as run:
                run.restore(state(0))
                for step in range(1, 21):
                    run.save(step, state(step)).wait(30)
        finally:
            over.set()
        for future in found:
            steps = future.result(60)
            assert steps == sorted(steps)
            assert steps[-1] > 0
    assert list(tmp_path.rglob(".tmp-*")) == []
