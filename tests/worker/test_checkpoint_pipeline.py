"""Shards on their way to a store: in parts and at once, met again, broken off."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from everstep.checkpoint.format.chunks import problems
from everstep.checkpoint.save.parts import THREADS, write_shard
from everstep.storage import (
    Capabilities,
    Data,
    ObjectStore,
    RetryableError,
    RetryingStore,
    RetryPolicy,
    TerminalError,
    open_store,
)
from everstep.storage.faults import Fail, FaultStore, LoseResponse
from everstep.storage.upload import Upload

NAME = "data/save/00000.safetensors"
PART = 16 * 2**20


def noise(size: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(np.random.default_rng(seed).bytes(size)))


def quick(store: ObjectStore) -> RetryingStore:
    return RetryingStore(store, RetryPolicy(first=0.001, most=0.01, outage=1.0))


@pytest.mark.long_but("16777216")
@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART, 5 * PART // 2])
def test_shard_of_any_size_is_written_and_described(tmp_path: Path, size: int) -> None:
    store, data = open_store(str(tmp_path)), noise(size)
    shard = write_shard(store, NAME, data)
    assert store.get(NAME) == data
    assert problems(store, shard) == ()


@pytest.mark.long
@pytest.mark.parametrize("size", [1000, 2 * PART + 5])
def test_answer_that_was_lost_is_success(tmp_path: Path, size: int) -> None:
    inner, data = open_store(str(tmp_path)), noise(size)
    count = len(recorded(inner, data))
    for number in range(count):
        inner.delete(NAME)
        shard = write_shard(quick(FaultStore(inner, {number: LoseResponse()})), NAME, data)
        assert inner.get(NAME) == data
        assert problems(inner, shard) == (), f"after the lost answer to call {number}"


def recorded(inner: ObjectStore, data: memoryview) -> list[str]:
    store = FaultStore(inner)
    write_shard(store, NAME, data)
    return store.calls


@pytest.mark.parametrize("size", [1000, 2 * PART + 5])
def test_answer_that_was_lost_has_nothing_read_back(tmp_path: Path, size: int) -> None:
    inner = open_store(str(tmp_path))
    last = len(recorded(inner, noise(size))) - 1
    faulty = FaultStore(inner, {last: LoseResponse()})
    write_shard(quick(faulty), NAME, noise(size))
    assert faulty.calls[last:] == [faulty.calls[last]] * 2


def test_no_part_begins_after_one_has_failed(tmp_path: Path) -> None:
    # Each waits out the whole time of an outage: a second one would double the time in which the save fails.
    class InOrder(FaultStore):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, parallel_parts=False)

    faulty = InOrder(open_store(str(tmp_path)), {1: Fail(TerminalError("the disk is gone"))})
    with pytest.raises(TerminalError, match="disk is gone"):
        write_shard(faulty, NAME, noise(6 * PART))
    assert faulty.calls == [f"start {NAME}", f"part {NAME}#0", f"abort {NAME}"]


def test_part_that_fails_for_good_leaves_nothing(tmp_path: Path) -> None:
    inner, data = open_store(str(tmp_path)), noise(6 * PART)
    calls = recorded(inner, data)
    inner.delete(NAME)
    for number in [n for n, call in enumerate(calls) if call.startswith(("part", "commit"))]:
        with pytest.raises(TerminalError, match="disk is gone"):
            write_shard(FaultStore(inner, {number: Fail(TerminalError("the disk is gone"))}), NAME, data)
        assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_no_part_is_read_after_the_failure_was_reported(tmp_path: Path) -> None:
    store = Slow(open_store(str(tmp_path)))  # type: ignore[abstract]  # it has what a shard's writer uses
    with pytest.raises(RetryableError):
        write_shard(store, NAME, noise(6 * PART))
    assert store.writing == 0, "a part was still being sent from the buffer that the next save fills"


class PassedOn:
    """An upload that another one does."""

    def __init__(self, inner: Upload) -> None:
        self.inner, self.part_size = inner, inner.part_size

    def write_part(self, number: int, data: Data) -> None:
        self.inner.write_part(number, data)

    def commit(self) -> None:
        self.inner.commit()

    def abort(self) -> None:
        self.inner.abort()


class Slow(ObjectStore):
    """A store whose first part fails while others are still on their way."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner, self.writing = inner, 0
        self.others = threading.Event()

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, local=False)  # several threads, on one core, too

    def start_upload(self, name: str, size_hint: int | None = None) -> Upload:
        return SlowUpload(self, self.inner.start_upload(name, size_hint))


class SlowUpload(PassedOn):
    def __init__(self, store: Slow, inner: Upload) -> None:
        super().__init__(inner)
        self.store = store

    def write_part(self, number: int, data: Data) -> None:
        if number == 0:
            assert self.store.others.wait(30)
            raise RetryableError("part 0 failed")
        self.store.writing += 1
        self.store.others.set()
        try:
            threading.Event().wait(0.2)
            super().write_part(number, data)
        finally:
            self.store.writing -= 1


@pytest.fixture
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.long_but("True-1")
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(("local", "threads"), [(True, 1), (False, THREADS)])
def test_threads_that_write_files_leave_a_core_to_training(tmp_path: Path, local: bool, threads: int) -> None:
    """Over a network they only wait, and the more there are, the better."""
    store = Counted(open_store(str(tmp_path)), local, threads)  # type: ignore[abstract]  # the same
    write_shard(store, NAME, noise(2 * threads * PART))
    assert len(store.threads) == threads


class Counted(ObjectStore):
    """A store that takes parts only from that many threads at once, and says who they were."""

    def __init__(self, inner: ObjectStore, local: bool, threads: int) -> None:
        self.inner, self.local = inner, local
        self.together, self.threads = threading.Barrier(threads, timeout=30), set[int]()

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, local=self.local)

    def start_upload(self, name: str, size_hint: int | None = None) -> Upload:
        return CountedUpload(self, self.inner.start_upload(name, size_hint))


class CountedUpload(PassedOn):
    def __init__(self, store: Counted, inner: Upload) -> None:
        super().__init__(inner)
        self.store = store

    def write_part(self, number: int, data: Data) -> None:
        self.store.together.wait()
        self.store.threads.add(threading.get_ident())
        super().write_part(number, data)
