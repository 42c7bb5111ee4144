"""The place of the log is deleted, emptied, replaced or unmounted while a run saves there: no save says that all is
well, and nobody else's log is written to."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.checkpoint import Fenced, SaveFailed
from everstep.checkpoint.handle import Committed
from everstep.storage import MemoryStore, ObjectStore, RetryingStore, RetryPolicy, TerminalError, open_store


def folder(path: Path) -> ObjectStore:
    return RetryingStore(open_store(str(path)), RetryPolicy(first=0.01, most=0.01, outage=0.1))


@pytest.mark.parametrize("leaves", ["nothing", "an empty mount point"])
def test_saves_into_a_place_whose_mount_fell_away_fail_until_it_is_back(tmp_path: Path, runs: Any, leaves: str) -> None:
    place, away = tmp_path / "run", tmp_path / "away"
    run, _ = runs(folder(place)).begin()
    run.save(1, runs.state(1)).wait(30)
    runs.settle(run)
    place.rename(away)
    if leaves != "nothing":
        place.mkdir()
    for step in (2, 3):
        with pytest.raises(SaveFailed, match=r"gone.*mount has fallen away.*Bring it back"):
            run.save(step, runs.state(step)).wait(30)
    assert [p for p in tmp_path.rglob("*") if p.is_file() and away not in p.parents] == []
    if leaves != "nothing":
        place.rmdir()
    away.rename(place)
    assert isinstance(run.save(4, runs.state(4)).wait(30), Committed)
    run.close()
    assert runs(folder(place)).restored() == 4


def test_checkpointer_of_a_url_makes_its_folder_once(tmp_path: Path, runs: Any) -> None:
    # With the sign of life, which is written every 3 s.
    run = everstep.Checkpointer(tmp_path / "run", on_event=lambda *_, **__: None)
    run.restore(runs.state())
    run.save(1, runs.state(1)).wait(30)
    runs.settle(run)
    (tmp_path / "run").rename(tmp_path / "away")
    run.save(2, runs.state(2))
    with pytest.raises(SaveFailed, match="mount has fallen away"):
        run.close()
    assert not (tmp_path / "run").exists()


def test_store_that_has_read_from_a_folder_makes_no_new_one(tmp_path: Path) -> None:
    open_store(str(tmp_path / "run")).put("a", b"a")
    store = open_store(str(tmp_path / "run"))
    assert store.get("a") == b"a"
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(TerminalError, match="was there, and is gone"):
        store.put("b", b"b")
    assert not (tmp_path / "run").exists()


def test_folder_whose_last_object_is_deleted_stays(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"))
    store.put("a", b"a")
    store.delete("a")
    store.put("b", b"b")
    assert [info.name for info in store.list()] == ["b"]


@pytest.mark.parametrize("where", ["file", "memory"])
def test_forgotten_owner_of_an_emptied_place_commits_nothing_to_the_log_of_the_next_run(
    tmp_path: Path, runs: Any, where: str
) -> None:
    store = folder(tmp_path) if where == "file" else MemoryStore()
    wipe: Callable[[], Any] = store.objects.clear if isinstance(store, MemoryStore) else lambda: empty(tmp_path)
    make = (lambda: store) if isinstance(store, MemoryStore) else (lambda: folder(tmp_path))
    forgotten, _ = runs(store).begin(keep=1)
    for step in (1, 2, 3):
        forgotten.save(step, runs.state(step)).wait(30)
    runs.settle(forgotten)
    wipe()
    younger, step = runs(make()).begin(keep=3)
    assert step is None, "it starts over"
    for step in (1, 2):
        younger.save(step, runs.state(step)).wait(30)
    with pytest.raises(Fenced, match="emptied, and a newer run has begun"):
        forgotten.save(4, runs.state(4)).wait(30)
    with pytest.raises(Fenced):
        forgotten.save(5, runs.state(5))
    assert isinstance(younger.save(3, runs.state(3)).wait(30), Committed)
    younger.close()
    assert [found.step for found in everstep.Checkpointer(store=make()).list()] == [3, 2, 1]
    assert runs(make()).restored() == 3


def test_log_that_was_wiped_alone_takes_no_commit(tmp_path: Path, runs: Any) -> None:
    run, _ = runs(folder(tmp_path)).begin()
    run.save(1, runs.state(1)).wait(30)
    runs.settle(run)
    for record in (tmp_path / "log").iterdir():
        os.unlink(record)
    with pytest.raises(SaveFailed, match="deleted, emptied or replaced"):
        run.save(2, runs.state(2)).wait(30)
    assert list((tmp_path / "log").iterdir()) == []


def empty(path: Path) -> None:
    for below in path.iterdir():
        shutil.rmtree(below)
