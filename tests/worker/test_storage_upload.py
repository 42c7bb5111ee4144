"""Streaming writes and reads into a buffer, on memory and files, behind retries and under faults."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.storage import (
    Data,
    MemoryStore,
    NotFound,
    ObjectStore,
    RetryableError,
    RetryingStore,
    RetryPolicy,
    TerminalError,
    Truncated,
    open_store,
)
from everstep.storage.base import PART_SIZE, part_size_for
from everstep.storage.faults import Die, DieAfter, Fail, Fault, FaultStore, LoseResponse, Tear
from everstep.storage.upload import SpooledUpload, Upload

SIZES = [0, 1, PART_SIZE - 1, PART_SIZE, PART_SIZE + 1, 2 * PART_SIZE, 2 * PART_SIZE + 7]


class Spooling(MemoryStore):
    """A store whose parts wait on the disk."""

    def start_upload(self, name: str, size_hint: int | None = None) -> Upload:
        return SpooledUpload(self, name, PART_SIZE)


@pytest.fixture(params=["memory", "local", "spooling"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    match request.param:
        case "memory":
            return MemoryStore()
        case "local":
            return open_store(str(tmp_path / "store"))
        case _:
            return Spooling()


def pattern(size: int) -> bytes:
    return bytes(range(256)) * (size // 256) + bytes(range(size % 256))


def write(store: ObjectStore, name: str, data: Data, piece: int) -> None:
    with store.open_write(name) as writer:
        view = memoryview(data)
        for start in range(0, len(view), piece):
            scratch = bytearray(view[start : start + piece])
            writer.write(scratch)
            scratch[:] = bytes(len(scratch))  # the caller may use its buffer again
        writer.commit()


@pytest.mark.long_but("memory-5592405-33554432")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("piece", [PART_SIZE // 3, PART_SIZE, 3 * PART_SIZE])
def test_streamed_object_is_what_was_written_whatever_the_pieces(store: ObjectStore, size: int, piece: int) -> None:
    data = pattern(size)
    write(store, "a/b", data, piece)
    assert store.size("a/b") == size
    assert store.get("a/b") == data


@pytest.mark.parametrize("size", [10, 2 * PART_SIZE])
def test_writer_without_commit_leaves_nothing(store: ObjectStore, size: int) -> None:
    def body_that_raises() -> None:
        with store.open_write("a") as writer:
            writer.write(bytes(size))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body_that_raises()
    with store.open_write("a") as writer:
        writer.write(bytes(size))
    assert store.list() == []
    assert store.sweep_uploads(0) == 0
    with pytest.raises(TerminalError, match="writer of a is aborted"):
        writer.write(b"x")


@pytest.mark.parametrize("size", [10, 2 * PART_SIZE])
def test_streamed_object_replaces_what_had_its_name(store: ObjectStore, size: int) -> None:
    store.create("a", b"first")
    write(store, "a", pattern(size), size)
    assert store.get("a") == pattern(size)
    assert [i.name for i in store.list()] == ["a"]
    assert store.sweep_uploads(0) == 0


def test_commit_that_is_repeated_changes_nothing(store: ObjectStore) -> None:
    data = pattern(PART_SIZE + 5)
    upload = store.start_upload("a", len(data))
    for number in range(2):
        upload.write_part(number, data[number * PART_SIZE : (number + 1) * PART_SIZE])
    upload.commit()
    upload.commit()
    assert store.get("a") == data


def test_object_is_not_visible_before_its_commit(store: ObjectStore) -> None:
    with store.open_write("a") as writer:
        writer.write(bytes(2 * PART_SIZE))
        assert store.size("a") is None
        assert store.list() == []
        writer.commit()
    assert store.size("a") == 2 * PART_SIZE


def test_parts_come_out_of_order_and_twice(store: ObjectStore) -> None:
    data = pattern(2 * PART_SIZE + 5)
    upload = store.start_upload("a", len(data))
    assert upload.part_size == PART_SIZE
    for number in (2, 0, 1, 0):
        upload.write_part(number, memoryview(data)[number * PART_SIZE : (number + 1) * PART_SIZE])
    upload.commit()
    upload.abort()
    assert store.get("a") == data


def test_part_grows_with_an_object_of_too_many_parts() -> None:
    assert part_size_for(PART_SIZE, None) == PART_SIZE
    assert part_size_for(PART_SIZE, 10_000 * PART_SIZE) == PART_SIZE
    assert part_size_for(PART_SIZE, 10_000 * PART_SIZE + 1) == 17 * 2**20


def test_buffer_is_filled_from_the_given_byte(store: ObjectStore) -> None:
    store.put("a", b"0123456789")
    buffer = bytearray(b"....")
    store.get_into("a", 3, memoryview(buffer))
    assert buffer == b"3456"
    store.get_into("a", 10, memoryview(bytearray()))


def test_object_that_ends_before_the_buffer_is_full_says_where(store: ObjectStore) -> None:
    store.put("a", b"0123456789")
    with pytest.raises(Truncated, match="a ends after 10 bytes; bytes 8 to 12 were asked for"):
        store.get_into("a", 8, memoryview(bytearray(4)))
    with pytest.raises(NotFound):
        store.get_into("b", 0, memoryview(bytearray(4)))


@pytest.mark.long_but("memory-fault1")
@pytest.mark.parametrize("fault", [Fail(RetryableError("503")), LoseResponse()])
def test_failed_part_is_sent_again_and_no_other(store: ObjectStore, fault: Fault) -> None:
    data = pattern(3 * PART_SIZE)
    faulty = FaultStore(store, {2: fault, 3: fault})
    write(RetryingStore(faulty, RetryPolicy(), sleep=lambda _: None), "a", data, PART_SIZE)
    assert store.get("a") == data
    assert faulty.calls == ["start a", "part a#0", "part a#1", "part a#1", "part a#1", "part a#2", "commit a"]


@pytest.mark.long
@pytest.mark.parametrize("fault", [Die(), DieAfter(), Tear()])
def test_killed_at_every_part_boundary_leaves_the_whole_object_or_none(
    tmp_path: Path, in_child: Callable[..., int], fault: Fault
) -> None:
    data = pattern(2 * PART_SIZE + 9)
    counted = FaultStore(open_store(str(tmp_path / "count")))
    write(counted, "d/a", data, PART_SIZE)
    assert counted.calls == ["start d/a", "part d/a#0", "part d/a#1", "part d/a#2", "commit d/a"]
    for number in range(len(counted.calls)):
        store = open_store(str(tmp_path / str(number)))
        assert in_child(lambda s=store, n=number: write(FaultStore(s, {n: fault}), "d/a", data, PART_SIZE)) == -9
        committed = number == 4 and fault == DieAfter()
        assert [i.name for i in store.list()] == (["d/a"] if committed else [])
        if committed:
            assert store.get("d/a") == data
        left = [f for _, _, files in os.walk(tmp_path / str(number)) for f in files if f.startswith(".tmp-")]
        assert store.sweep_uploads(3600) == 0
        assert store.sweep_uploads(-1) == len(left)
        write(store, "d/b", b"x", 1)
