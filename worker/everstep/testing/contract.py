"""The promises of `everstep.storage.ObjectStore` as tests, for every backend to inherit.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self) -> ObjectStore:
            return MyStore(...)  # empty, and of no other test

A server that ignores preconditions is not skipped: `conditional = False` turns the promise of a single winner into the
expectation that the probe refuses the store.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from everstep.storage.base import ObjectStore
from everstep.storage.errors import AlreadyExists, InvalidName, NotFound, StoreUnusable, TerminalError, Truncated
from everstep.storage.faults import FaultStore, LoseResponse
from everstep.storage.probe import probe
from everstep.storage.rate_limit import Pacer
from everstep.storage.retry import RetryingStore
from everstep.storage.upload import Data

BAD_NAMES = ("", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "a\\b", "a\nb", "ü", "x" * 600)
FORK_SECONDS = 60.0
LARGEST = 64 * 2**20 + 50  # bytes of a log record: docs/reference/commit-format.md


class StoreContract:
    """Inherit it and give a `store` fixture.

    `conditional`: whether the server honours preconditions. `listed`: how many objects the listing test makes, more
    than a page of the server's listing. `sweeps`: whether an abandoned upload can be found and removed. `whole`:
    whether an object is replaced in one step; if not, `Capabilities.whole` has to say so.
    """

    conditional: ClassVar[bool] = True
    listed: ClassVar[int] = 1100
    sweeps: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    def test_created_object_reads_back_whole_and_by_range(self, store: ObjectStore) -> None:
        store.create("log/1.json", b"0123456789")
        assert store.get("log/1.json") == b"0123456789"
        assert store.get("log/1.json", 2, 5) == b"234"
        assert store.get("log/1.json", 7) == b"789"
        assert store.get("log/1.json", 8, 99) == b"89"
        assert store.get("log/1.json", 50, 60) == b""
        assert store.get("log/1.json", 3, 3) == b""
        assert store.size("log/1.json") == 10

    def test_probe_tells_whether_a_second_create_is_refused(self, store: ObjectStore) -> None:
        if self.conditional:
            for _ in range(3):
                probe(store)
            # The object that is created again, and the mark that creators have raced here.
            assert len(store.list()) == 2
        else:
            with pytest.raises(StoreUnusable, match=r"ignores conditional creates.*single_committer"):
                probe(store)

    def test_create_over_an_object_is_refused_and_changes_nothing(self, store: ObjectStore) -> None:
        store.create("a", b"first")
        if self.conditional:
            with pytest.raises(AlreadyExists):
                store.create("a", b"second")
            assert store.get("a") == b"first"
        else:
            store.create("a", b"second")  # what the probe refuses such a store for
            assert store.get("a") == b"second"

    def test_twenty_racing_creators_have_one_winner(self, store: ObjectStore) -> None:
        outcomes: list[str] = []
        barrier = threading.Barrier(20)

        def create(number: int) -> None:
            barrier.wait()
            try:
                store.create("log/0", str(number).encode())
                outcomes.append(f"won {number}")
            except AlreadyExists:
                outcomes.append("lost")

        with ThreadPoolExecutor(20) as pool:
            list(pool.map(create, range(20)))
        winners = [o.removeprefix("won ") for o in outcomes if o != "lost"]
        assert len(outcomes) == 20
        if self.conditional:
            assert winners == [store.get("log/0").decode()]
        else:
            assert len(winners) > 1  # nor does such a store promise that a race leaves one writer's bytes

    def test_put_over_an_object_replaces_it(self, store: ObjectStore) -> None:
        store.put("a/b", bytearray(b"first, and longer"))
        store.put("a/b", memoryview(b"second"))
        assert store.get("a/b") == b"second"

    def test_reader_beside_a_writer_meets_only_whole_objects(self, store: ObjectStore) -> None:
        """The old bytes or the new ones: of objects in one piece, and of those in parts."""
        if not self.whole:
            assert not store.capabilities.whole
            return
        small, other, large = b"1" * 100, b"2" * 70_000, b"3" * (store.capabilities.part_size + 1)
        store.put("a/b", small)
        over = threading.Event()

        def read() -> bool:
            while True:
                last = over.is_set()
                assert store.get("a/b") in (small, other, large)
                assert [info.size in map(len, (small, other, large)) for info in store.list("a/")] == [True]
                if last:
                    return True

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read)
            try:
                for data in (other, small, other, small):
                    store.put("a/b", data)
                for data in (large, small):
                    stream(store, "a/b", data, 2**22)
            finally:
                over.set()
            assert reader.result(60)

    def test_missing_object_is_not_found_and_has_no_size(self, store: ObjectStore) -> None:
        with pytest.raises(NotFound):
            store.get("nothing/here")
        with pytest.raises(NotFound):
            store.get_into("nothing/here", 0, memoryview(bytearray(4)))
        assert store.size("nothing/here") is None
        assert store.size("nothing") is None
        assert store.list("nothing/") == []
        store.delete("nothing/here")

    def test_folder_is_not_an_object(self, store: ObjectStore) -> None:
        store.put("data/x/1", b"1")
        assert store.size("data") is None
        assert store.size("data/x") is None
        with pytest.raises(NotFound):
            store.get("data/x")

    def test_list_is_sorted_and_keeps_to_its_folder(self, store: ObjectStore) -> None:
        for name in ("log/2", "log/10", "logs/1", "data/x/1", "log/sub/1"):
            store.put(name, name.encode())
        assert [i.name for i in store.list("log/")] == ["log/10", "log/2", "log/sub/1"]
        assert [(i.name, i.size) for i in store.list("data/")] == [("data/x/1", 8)]
        assert [i.name for i in store.list()] == ["data/x/1", "log/10", "log/2", "log/sub/1", "logs/1"]

    def test_listing_of_several_pages_is_whole(self, store: ObjectStore) -> None:
        names = [f"log/{n:020}.json" for n in range(self.listed)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put(name, b"{}"), names))
        assert [i.name for i in store.list("log/")] == names

    def test_deleted_object_is_gone_and_can_be_created_again(self, store: ObjectStore) -> None:
        store.create("data/x/1", b"1")
        store.delete("data/x/1")
        assert store.list() == []
        store.create("data/x/1", b"2")
        assert store.get("data/x/1") == b"2"

    def test_empty_object_is_an_object(self, store: ObjectStore) -> None:
        store.create("empty", b"")
        assert store.size("empty") == 0
        assert store.get("empty") == b""

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_name_that_could_leave_the_prefix_is_refused_by_every_call(self, store: ObjectStore, name: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.create(name, b""),
            lambda: store.put(name, b""),
            lambda: store.get(name),
            lambda: store.get_into(name, 0, memoryview(bytearray(1))),
            lambda: store.size(name),
            lambda: store.delete(name),
            lambda: store.open_write(name),
            lambda: store.start_upload(name),
            lambda: store.list(f"{name}/"),
        ]
        for call in calls:
            with pytest.raises(InvalidName):
                call()

    def test_buffer_is_filled_from_the_given_byte(self, store: ObjectStore) -> None:
        store.put("a", b"0123456789")
        buffer = bytearray(b"....")
        store.get_into("a", 3, memoryview(buffer))
        assert buffer == b"3456"
        store.get_into("a", 6, memoryview(buffer))
        assert buffer == b"6789"

    @pytest.mark.parametrize("size", [1, 200_000])
    def test_buffers_are_filled_one_after_the_other(self, store: ObjectStore, size: int) -> None:
        data = pattern(4 * size)
        store.put("a", data)
        first, second, third = bytearray(size), bytearray(), bytearray(2 * size)
        store.get_into("a", size, memoryview(first), memoryview(second), memoryview(third))
        assert first + third == data[size:]
        with pytest.raises(Truncated):
            store.get_into("a", 2 * size, memoryview(first), memoryview(third))

    @pytest.mark.parametrize("start", [8, 10, 50])
    def test_object_that_ends_before_the_buffer_is_full_says_where(self, store: ObjectStore, start: int) -> None:
        store.put("a", b"0123456789")
        with pytest.raises(Truncated, match=rf"a ends .*; bytes {start} to {start + 4} were asked for"):
            store.get_into("a", start, memoryview(bytearray(4)))

    @pytest.mark.parametrize("over", [-1, 0, 1])
    def test_streamed_object_is_what_was_written_at_every_edge_of_a_part(self, store: ObjectStore, over: int) -> None:
        size = store.capabilities.part_size
        for parts, piece in ((0, 1), (1, size // 3), (2, 3 * size)):
            data = pattern(max(0, parts * size + over))
            stream(store, f"a/{parts}", data, piece)
            assert store.size(f"a/{parts}") == len(data)
            back = bytearray(len(data))
            store.get_into(f"a/{parts}", 0, memoryview(back))
            assert back == data

    @pytest.mark.parametrize("parts", [0, 2])
    def test_writer_without_commit_leaves_nothing(self, store: ObjectStore, parts: int) -> None:
        size = parts * store.capabilities.part_size + 10

        def body_that_raises() -> None:
            with store.open_write("a") as writer:
                writer.write(bytes(size))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            body_that_raises()
        with store.open_write("a") as writer:
            writer.write(bytes(size))
        assert store.list() == []
        assert store.sweep_uploads(-60) == 0
        with pytest.raises(TerminalError, match="writer of a is aborted"):
            writer.write(b"x")

    def test_object_is_not_visible_before_its_commit(self, store: ObjectStore) -> None:
        size = 2 * store.capabilities.part_size
        with store.open_write("a") as writer:
            writer.write(bytes(size))
            assert store.size("a") is None
            assert store.list() == []
            writer.commit()
        assert store.size("a") == size

    @pytest.mark.parametrize("parts", [0, 2])
    def test_streamed_object_replaces_what_had_its_name(self, store: ObjectStore, parts: int) -> None:
        store.create("a", b"first")
        data = pattern(parts * store.capabilities.part_size + 10)
        stream(store, "a", data, 2**22)
        assert store.get("a") == data
        assert [i.name for i in store.list()] == ["a"]
        assert store.sweep_uploads(-60) == 0

    def test_part_written_twice_counts_once(self, store: ObjectStore) -> None:
        data = pattern(2 * store.capabilities.part_size + 5)
        upload = store.start_upload("a", len(data))
        size = upload.part_size
        order = (2, 0, 1, 0) if store.capabilities.parallel_parts else (0, 1, 1, 2)
        for number in order:
            upload.write_part(number, memoryview(data)[number * size : (number + 1) * size])
        upload.commit()
        upload.abort()
        assert store.get("a") == data

    def test_commit_whose_answer_was_lost_is_repeated_and_done(self, store: ObjectStore) -> None:
        data = pattern(store.capabilities.part_size + 5)
        faulty = FaultStore(store, {3: LoseResponse()})
        stream(RetryingStore(faulty, pacer=Pacer(), sleep=lambda _: None), "a", data, len(data))
        assert faulty.calls == ["start a", "part a#0", "part a#1", "commit a", "commit a"]
        assert store.get("a") == data
        assert store.sweep_uploads(-60) == 0

    def test_create_of_the_largest_record_is_conditional_too(self, store: ObjectStore) -> None:
        data = bytearray(LARGEST)
        data[-1] = 7
        store.create("big", data)
        assert store.size("big") == LARGEST
        assert store.get("big", LARGEST - 2) == b"\x00\x07"
        if self.conditional:
            with pytest.raises(AlreadyExists):
                store.create("big", bytes(LARGEST))
            assert store.get("big", LARGEST - 1) == b"\x07"

    def test_abandoned_upload_is_swept_once_it_is_old(self, store: ObjectStore) -> None:
        upload = store.start_upload("a")
        upload.write_part(0, bytes(upload.part_size))
        assert store.list() == []
        assert store.sweep_uploads(3600) == 0
        if self.sweeps:
            assert store.sweep_uploads(-60) == 1
        assert store.sweep_uploads(-60) == 0
        assert store.size("a") is None
        for name in ("of/dead", "of/living"):
            store.start_upload(name).write_part(0, bytes(upload.part_size))
        assert store.sweep_uploads(3600, lambda name: name == "of/dead") == int(self.sweeps)
        assert store.sweep_uploads(-60) == int(self.sweeps)
        stream(store, "a", b"another", 7)
        assert store.get("a") == b"another"

    def test_forked_child_uses_the_store_that_its_parent_uses(self, store: ObjectStore) -> None:
        store.put("of/parent", b"parent")
        threads = [threading.Thread(target=store.list) for _ in range(4)]  # at work while the child is made
        for thread in threads:
            thread.start()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert store.get("of/parent") == b"parent"
                store.put("of/child", b"child")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        for thread in threads:
            thread.join()
        assert _ended(child) == 0
        if store.url.startswith("memory:"):
            return  # a forked child has a copy of this process's memory
        assert store.get("of/child") == b"child"


def pattern(size: int) -> bytes:
    """Bytes whose every place is recognisable, so that parts in a wrong order are seen."""
    return array("Q", range(size // 8 + 1)).tobytes()[:size]


def stream(store: ObjectStore, name: str, data: Data, piece: int) -> None:
    """Write through `open_write`, a piece at a time, and use the buffer again after each."""
    with store.open_write(name) as writer:
        view = memoryview(data)
        for start in range(0, len(view), piece):
            scratch = bytearray(view[start : start + piece])
            writer.write(scratch)
            scratch[:] = bytes(len(scratch))
        writer.commit()


def _ended(child: int) -> int:
    deadline = time.monotonic() + FORK_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"the forked child did not end within {FORK_SECONDS} s: it hangs in the store")
