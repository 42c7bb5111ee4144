"""What is particular to files: links, leftovers, folders, file systems without hard links."""

import errno
import os
from pathlib import Path

import pytest

from everstep.storage import AlreadyExists, StoreUnusable, TerminalError, open_store, probe


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


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links, as vfat and many FUSE mounts are: `link` says EPERM there."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("no_links")
def test_file_system_without_hard_links_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable, match=r"no hard links.*single_committer=True"):
        probe(open_store(str(tmp_path)))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.usefixtures("no_links")
def test_file_system_without_hard_links_serves_a_single_committer(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), single_committer=True)
    store.create("a", b"first")
    with pytest.raises(AlreadyExists):
        store.create("a", b"second")
    assert store.get("a") == b"first"
    assert [p.name for p in tmp_path.rglob("*")] == ["a"]


def test_folder_that_cannot_be_written_is_unusable_and_named() -> None:
    # /proc refuses new folders even to root, for whom permission bits mean nothing.
    with pytest.raises((StoreUnusable, TerminalError), match="/proc/everstep"):
        probe(open_store("/proc/everstep"))


def test_temporary_file_of_a_process_of_the_same_number_takes_no_name(tmp_path: Path) -> None:
    # Two containers that share a folder both begin to count their processes at 1; one of them died in a write.
    store = open_store(str(tmp_path))
    (tmp_path / "log").mkdir()
    for n in range(3000):
        (tmp_path / "log" / f".tmp-{os.getpid()}-{n}-7.json").touch()
    store.create("log/7.json", b"seven")
    assert store.get("log/7.json") == b"seven"


def test_sweep_leaves_what_other_programs_have_put_below_the_folder(tmp_path: Path) -> None:
    foreign = [tmp_path / ".tmp-notes.txt", tmp_path / "other/.tmp-0123456789abcdef"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    store = open_store(str(tmp_path))
    store.start_upload("a").write_part(0, b"part")
    assert store.sweep_uploads(-60) == 1
    assert [path.read_text() for path in foreign] == ["mine", "mine"]
