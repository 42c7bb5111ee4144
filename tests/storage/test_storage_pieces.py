"""File systems on which a file is visible while it is written, through the backend for any scheme of fsspec."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.storage import AlreadyExists, NotFound, ObjectStore, RetryableError, RetryingStore, open_store
from everstep.storage.rate_limit import Pacer
from everstep.testing import StoreContract
from support.checkpoint import pieces

RENAMING = ["pieces", "refusing", "silent"]
OLD, NEW = b"old record", b"a new record, which is longer"


def opened(scheme: str, folder: Path, between: Callable[[], object] = lambda: None) -> Any:
    pieces.register()
    return open_store(f"{scheme}://{folder}", {"between": between}, single_committer=True)


class TestPieces(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return opened("pieces", tmp_path / "store")

    sweeps = False  # parts wait on the local disk, in a file without a name

    # Such stores have one committer: two creators that race may both be told that they won, and the probe may see it.
    test_twenty_racing_creators_have_one_winner = None  # type: ignore[assignment]
    test_probe_tells_whether_a_second_create_is_refused = None  # type: ignore[assignment]


@pytest.mark.parametrize("scheme", RENAMING)
def test_object_is_seen_whole_or_not_at_all_while_it_is_written(scheme: str, tmp_path: Path) -> None:
    reader = opened(scheme, tmp_path)
    seen: list[bytes | None] = []

    def look() -> None:
        try:
            seen.append(reader.get("log/0"))
        except NotFound:
            seen.append(None)
        assert [info.size for info in reader.list()] == ([] if seen[-1] is None else [len(seen[-1])])

    store = opened(scheme, tmp_path, look)
    store.create("log/0", OLD)
    assert seen == [None] * 3
    store.put("log/0", NEW)
    assert seen[3:] == [OLD] * 3
    with store.open_write("log/0") as writer:
        writer.write(OLD)
        writer.commit()
    assert seen[6:] == [NEW] * 3
    assert reader.get("log/0") == OLD
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["0"]


@pytest.mark.parametrize("scheme", [*RENAMING, "inplace"])
def test_create_over_an_object_changes_nothing(scheme: str, tmp_path: Path) -> None:
    store = opened(scheme, tmp_path)
    store.create("log/0", OLD)
    with pytest.raises(AlreadyExists):
        store.create("log/0", NEW)
    assert store.get("log/0") == OLD
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["0"]


def test_object_that_another_creates_meanwhile_is_kept(tmp_path: Path) -> None:
    other = opened("pieces", tmp_path)
    store = opened("pieces", tmp_path, lambda: other.put("log/0", OLD))
    with pytest.raises(AlreadyExists):
        store.create("log/0", NEW)
    assert other.get("log/0") == OLD


@pytest.mark.parametrize("scheme", [*RENAMING, "inplace"])
def test_create_keeps_an_object_that_the_server_does_not_show(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec's `exists` says no when a connection breaks."""
    store = opened(scheme, tmp_path)
    store.create("log/0", OLD)

    def breaks(*_: object, **__: object) -> None:
        raise ConnectionResetError("peer")

    with monkeypatch.context() as broken:
        broken.setattr(pieces.Pieces, "info", breaks)
        with pytest.raises(RetryableError, match="peer"):
            store.create("log/0", NEW)
    assert store.get("log/0") == OLD


def test_listing_that_breaks_off_in_a_folder_is_no_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's `find` leaves such a folder out."""
    store = opened("pieces", tmp_path)
    store.put("data/1/0", OLD)
    store.put("data/2/0", OLD)
    list_folder = pieces.Pieces.ls

    def breaks(self: Any, path: str, **options: Any) -> Any:
        if path.endswith("/2"):
            raise ConnectionResetError("peer")
        return list_folder(self, path, **options)

    with monkeypatch.context() as broken:
        broken.setattr(pieces.Pieces, "ls", breaks)
        with pytest.raises(RetryableError, match="peer"):
            store.list()
        assert [info.name for info in store.list("data/1/")] == ["data/1/0"]
    assert [info.name for info in store.list()] == ["data/1/0", "data/2/0"]
    assert store.list("data/3/") == store.list("data/1/0/") == []


@pytest.mark.parametrize("scheme", RENAMING)
def test_rename_whose_answer_is_lost_has_happened_once(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {"pieces": pieces.Pieces, "refusing": pieces.Refusing, "silent": pieces.Silent}[scheme]
    move, answers = kind.mv, [True, False, True, False]  # lost; not lost

    def loses(self: Any, one: str, other: str) -> None:
        move(self, one, other)
        if answers.pop(0):
            raise ConnectionResetError("peer")

    monkeypatch.setattr(kind, "mv", loses)
    store = RetryingStore(opened(scheme, tmp_path), pacer=Pacer(), sleep=lambda _: None)
    with pytest.raises(AlreadyExists):  # and the caller finds that the object is its own
        store.create("log/0", OLD)
    assert store.get("log/0") == OLD
    store.put("log/1", NEW)
    assert store.get("log/1") == NEW
    assert [path.name for path in sorted(tmp_path.rglob("*")) if path.is_file()] == ["0", "1"]


def test_what_a_dead_writer_left_is_hidden_and_swept_once_it_is_old(tmp_path: Path) -> None:
    store = opened("pieces", tmp_path)
    store.create("log/0", OLD)

    def copy() -> None:
        if len(left := list(tmp_path.glob("log/.tmp-*"))) == 1:
            other = f"{left[0].name[:-1]}{'1' if left[0].name.endswith('0') else '0'}"
            (left[0].parent / other).write_bytes(left[0].read_bytes())

    opened("pieces", tmp_path, copy).put("log/0", NEW)
    assert len(list(tmp_path.glob("log/.tmp-*"))) == 1
    assert [info.name for info in store.list()] == ["log/0"]
    assert store.sweep_uploads(3600) == 0
    assert store.sweep_uploads(-60) == 1
    assert [path.name for path in tmp_path.glob("log/*")] == ["0"]
