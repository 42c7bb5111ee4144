"""Every backend keeps the promises of everstep.storage.base: memory, files and a real S3 server."""

import threading
from pathlib import Path

import pytest

from everstep.storage import AlreadyExists, InvalidName, MemoryStore, NotFound, ObjectStore, open_store, probe


@pytest.fixture(params=["memory", "local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    match request.param:
        case "memory":
            return MemoryStore()
        case "local":
            return open_store(str(tmp_path / "store"))
        case _:
            return open_store(request.getfixturevalue("s3_url"))


def test_created_object_reads_back_whole_and_by_range(store: ObjectStore) -> None:
    store.create("log/1.json", b"0123456789")
    assert store.get("log/1.json") == b"0123456789"
    assert store.get("log/1.json", 2, 5) == b"234"
    assert store.get("log/1.json", 7) == b"789"
    assert store.get("log/1.json", 8, 99) == b"89"
    assert store.get("log/1.json", 50, 60) == b""
    assert store.get("log/1.json", 3, 3) == b""
    assert store.size("log/1.json") == 10


def test_create_over_an_object_is_refused_and_changes_nothing(store: ObjectStore) -> None:
    store.create("a", b"first")
    with pytest.raises(AlreadyExists):
        store.create("a", b"second")
    assert store.get("a") == b"first"


def test_put_over_an_object_replaces_it(store: ObjectStore) -> None:
    store.put("a/b", bytearray(b"first, and longer"))
    store.put("a/b", memoryview(b"second"))
    assert store.get("a/b") == b"second"


def test_missing_object_is_not_found_and_has_no_size(store: ObjectStore) -> None:
    with pytest.raises(NotFound):
        store.get("nothing/here")
    assert store.size("nothing/here") is None
    assert store.list("nothing/") == []
    store.delete("nothing/here")


def test_list_is_sorted_and_keeps_to_its_folder(store: ObjectStore) -> None:
    for name in ("log/2", "log/10", "logs/1", "data/x/1", "log/sub/1"):
        store.put(name, name.encode())
    assert [i.name for i in store.list("log/")] == ["log/10", "log/2", "log/sub/1"]
    assert [(i.name, i.size) for i in store.list("data/")] == [("data/x/1", 8)]
    assert [i.name for i in store.list()] == ["data/x/1", "log/10", "log/2", "log/sub/1", "logs/1"]


def test_deleted_object_is_gone_and_can_be_created_again(store: ObjectStore) -> None:
    store.create("data/x/1", b"1")
    store.delete("data/x/1")
    assert store.list() == []
    store.create("data/x/1", b"2")
    assert store.get("data/x/1") == b"2"


def test_empty_object_is_an_object(store: ObjectStore) -> None:
    store.create("empty", b"")
    assert store.size("empty") == 0
    assert store.get("empty") == b""


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "a\\b", "a\nb", "ü", "x" * 600])
def test_name_that_could_leave_the_prefix_is_refused_by_every_call(store: ObjectStore, name: str) -> None:
    for call in (lambda: store.create(name, b""), lambda: store.put(name, b""), lambda: store.get(name)):
        with pytest.raises(InvalidName):
            call()
    with pytest.raises(InvalidName):
        store.size(name)
    with pytest.raises(InvalidName):
        store.delete(name)
    with pytest.raises(InvalidName):
        store.list("../")


def test_twenty_racing_creators_have_one_winner(store: ObjectStore) -> None:
    outcomes: list[str] = []
    barrier = threading.Barrier(20)

    def create(number: int) -> None:
        barrier.wait()
        try:
            store.create("log/0", str(number).encode())
            outcomes.append(f"won {number}")
        except AlreadyExists:
            outcomes.append("lost")

    threads = [threading.Thread(target=create, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [o.removeprefix("won ") for o in outcomes if o != "lost"]
    assert len(outcomes) == 20
    assert winners == [store.get("log/0").decode()]


def test_store_with_conditional_create_passes_the_probe_again_and_again(store: ObjectStore) -> None:
    for _ in range(3):
        probe(store)
    assert len(store.list()) == 1


def test_large_create_is_conditional_too(s3_url: str) -> None:
    # From 100 MiB s3fs uploads in parts: the condition must hold at their completion.
    store = open_store(s3_url)
    data = bytearray(101 * 2**20)
    data[-1] = 7
    store.create("big", data)
    with pytest.raises(AlreadyExists):
        store.create("big", bytearray(101 * 2**20))
    assert store.size("big") == len(data)
    assert store.get("big", len(data) - 2) == b"\x00\x07"


def test_file_that_was_being_written_at_a_crash_is_not_listed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("log/1", b"x")
    (tmp_path / "log" / ".tmp-1-1-2").write_bytes(b"half")
    assert [i.name for i in store.list()] == ["log/1"]


def test_link_to_the_outside_is_not_followed_by_a_listing(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"x")
    store = open_store(str(tmp_path / "in"))
    store.put("log/1", b"x")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "outside", target_is_directory=True)
    assert "link/secret" not in [i.name for i in store.list()]
