"""The kernel reports once that bytes could not be written, and drops them: what was refused is written anew.

`Disk` plays Linux: a failed fsync leaves the file's pages clean and lost, and the next one says that all is well.
"""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint.handle import Committed
from everstep.storage import ObjectWriter, RetryingStore, RetryPolicy, Unsynced
from everstep.storage.backends.local import LocalStore

PART = 2**20
SIZE = 3 * PART + 17
QUICK = RetryPolicy(first=0.001, most=0.001, outage=5.0)


class Disk:
    """Refuses one fsync, of the first file or folder that `refuses` says, with an error of the kernel's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = errno.EIO) -> None:
        self.refuses: Callable[[os.stat_result, Path], bool] = lambda *_: False
        self.refused = 0
        self._code = code
        self._names: set[Path] = set()  # that no fsync of their folder has made durable
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._sync)
        for name in ("link", "replace"):
            monkeypatch.setattr(os, name, self._naming(getattr(os, name)))
        mkdir = os.mkdir

        def made(path: Any, *arguments: Any, **named: Any) -> None:
            mkdir(path, *arguments, **named)
            self._names.add(Path(path))

        monkeypatch.setattr(os, "mkdir", made)

    def _naming(self, does: Callable[..., None]) -> Callable[..., None]:
        def act(source: Any, target: Any, *arguments: Any, **named: Any) -> None:
            does(source, target, *arguments, **named)
            self._names.add(Path(target))

        return act

    def _sync(self, descriptor: int) -> None:
        path, found = Path(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor)
        if not self.refused and self.refuses(found, path):
            self.refused += 1
            if stat.S_ISREG(found.st_mode):
                os.ftruncate(descriptor, 0)
                os.ftruncate(descriptor, found.st_size)  # of its size, and empty: nothing of it came to the disk
            raise OSError(self._code, os.strerror(self._code))
        self._fsync(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self._names = {name for name in self._names if name.parent != path}

    def stop(self) -> None:
        """The machine stops: names that were not synced are gone."""
        for name in sorted(self._names, reverse=True):
            if name.is_dir():
                for below in sorted(name.rglob("*"), reverse=True):
                    below.rmdir() if below.is_dir() else below.unlink()
                name.rmdir()
            else:
                name.unlink(missing_ok=True)


def is_shard(found: os.stat_result, _: Path) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_size > PART // 2


def is_folder(name: str) -> Callable[[os.stat_result, Path], bool]:
    return lambda found, path: stat.S_ISDIR(found.st_mode) and path.name == name


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("size", [PART - 5, SIZE], ids=["in one piece", "in parts"])
def test_shard_whose_fsync_failed_once_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, code: int
) -> None:
    disk = Disk(monkeypatch, code)
    store = RetryingStore(LocalStore(tmp_path, PART), QUICK)
    state = {"x": torch.arange(size % 251, size % 251 + size, dtype=torch.int64).to(torch.uint8)}
    with everstep.Checkpointer(store=store, on_event=lambda *_, **__: None) as checkpointer:
        checkpointer.restore({"x": torch.zeros(size, dtype=torch.uint8)})
        disk.refuses = is_shard
        assert isinstance(checkpointer.save(1, state).wait(60), Committed)
        assert disk.refused == 1
        assert checkpointer.verify() == ()
    into = {"x": torch.zeros(size, dtype=torch.uint8)}
    with everstep.Checkpointer(store=store, on_event=lambda *_, **__: None) as checkpointer:
        assert checkpointer.restore(into) == 1
    assert torch.equal(into["x"], state["x"])


def test_save_whose_every_fsync_fails_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RetryingStore(LocalStore(tmp_path, PART), QUICK)
    state = {"x": torch.ones(SIZE, dtype=torch.uint8)}
    checkpointer = everstep.Checkpointer(store=store, on_event=lambda *_, **__: None)
    checkpointer.restore(state)
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if os.fstat(descriptor).st_size > PART:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(everstep.checkpoint.SaveFailed, match="could not be made durable"):
        checkpointer.save(1, state).wait(60)
    assert checkpointer.list() == ()
    assert not list(tmp_path.rglob(".tmp-*"))
    monkeypatch.undo()
    assert isinstance(checkpointer.save(2, state).wait(60), Committed)
    checkpointer.close()


def test_stream_whose_fsync_failed_is_not_there_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    store = RetryingStore(LocalStore(tmp_path, PART), QUICK)
    disk.refuses = is_shard
    with ObjectWriter(store, "data/a", PART) as writer:
        writer.write(bytes(SIZE))
        with pytest.raises(Unsynced, match=r"data/a: .*could not be made durable.*write it anew"):
            writer.commit()
    assert store.size("data/a") is None
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize("folder", ["log", "data"])
def test_name_that_was_not_synced_is_synced_before_a_create_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    # The record is linked, the sync of its folder fails, and the repeated create meets its own record.
    disk = Disk(monkeypatch)
    store = RetryingStore(LocalStore(tmp_path, PART), QUICK)
    state = {"x": torch.ones(SIZE, dtype=torch.uint8)}
    checkpointer = everstep.Checkpointer(store=store, on_event=lambda *_, **__: None)
    checkpointer.restore(state)
    disk.refuses = is_folder(folder)
    assert isinstance(checkpointer.save(1, state).wait(60), Committed)
    checkpointer.close()
    assert disk.refused == 1
    disk.stop()
    found = everstep.Checkpointer(store=store).list()
    assert [commit.step for commit in found] == [1]
    assert found[0].missing == ()


def test_upload_whose_name_was_not_synced_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    store = RetryingStore(LocalStore(tmp_path, PART), QUICK)
    upload = store.start_upload("data/a", 5)
    upload.write_part(0, b"bytes")
    disk.refuses = is_folder("data")
    with pytest.raises(Unsynced):
        upload.commit()
    upload.abort()
    store.put("data/a", b"anew")
    disk.stop()
    assert store.get("data/a") == b"anew"
