"""The start-up probe refuses a store whose create looks first and writes then, and one whose creates both succeed."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from everstep.storage import AlreadyExists, MemoryStore, RetryingStore, StoreUnusable, open_store, probe
from everstep.storage.backends.local import LocalStore
from everstep.storage.upload import Data

WINDOW = 0.001  # seconds between the look and the write: a request to a server of a network mount


def test_folder_whose_link_looks_first_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: str | Path, target: str | Path) -> None:
        if os.path.exists(target):
            raise FileExistsError(errno.EEXIST, "exists", str(target))
        time.sleep(WINDOW)
        os.rename(source, target)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreUnusable, match=r"creators that raced.*not atomic.*single_committer"):
        probe(RetryingStore(LocalStore(tmp_path)))


class LooksFirst(MemoryStore):
    """As a look-alike of S3 that honours If-None-Match without a lock."""

    def create(self, name: str, data: Data) -> None:
        if self.size(name) is not None:
            raise AlreadyExists(f"{self.url}: {name} exists")
        time.sleep(WINDOW)
        self.put(name, data)


class OftenAtomic(MemoryStore):
    """One create in ten looks first."""

    def __init__(self) -> None:
        super().__init__()
        self._creates, self._counting = 0, threading.Lock()

    def create(self, name: str, data: Data) -> None:
        with self._counting:
            self._creates += 1
            number = self._creates
        if number > 8 and number // 8 % 10 == 0:
            LooksFirst.create(self, name, data)  # type: ignore[arg-type]
        else:
            super().create(name, data)


@pytest.mark.parametrize("store", [LooksFirst(), OftenAtomic()], ids=lambda s: type(s).__name__)
def test_store_that_looks_before_it_writes_is_refused(store: MemoryStore) -> None:
    with pytest.raises(StoreUnusable, match="not atomic"):
        probe(store)


def test_store_that_ignores_the_condition_is_refused_though_nobody_races() -> None:
    class Ignores(MemoryStore):
        def create(self, name: str, data: Data) -> None:
            self.put(name, data)

    with pytest.raises(StoreUnusable, match="ignores conditional creates"):
        probe(Ignores())


def test_file_system_of_fsspec_that_looks_first_is_refused() -> None:
    class Plain(MemoryFileSystem):
        protocol = "plain-memory"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

    import fsspec  # noqa: PLC0415

    fsspec.register_implementation("plain-memory", Plain, clobber=True)
    with pytest.raises(StoreUnusable, match="single_committer"):
        probe(open_store("plain-memory://bucket/run", None, single_committer=False))


def test_races_are_run_once_for_a_url_and_leave_two_objects() -> None:
    class Counts(MemoryStore):
        creates = 0

        def create(self, name: str, data: Data) -> None:
            self.creates += 1
            super().create(name, data)

    store = Counts()
    probe(store)
    assert sorted(store.objects) == ["probe/conditional-create", "probe/raced"]
    raced, store.creates = store.creates, 0
    probe(store)
    assert (raced > 8, store.creates) == (True, 1)


@pytest.mark.parametrize("lost", [AlreadyExists, StoreUnusable])
def test_error_that_is_no_refusal_ends_the_probe(lost: type[Exception]) -> None:
    class Fails(MemoryStore):
        def create(self, name: str, data: Data) -> None:
            if "race" in name:
                raise lost("never")
            super().create(name, data)

    if lost is StoreUnusable:
        with pytest.raises(StoreUnusable, match="never"):
            probe(Fails())
    else:
        probe(Fails())  # nobody has won: that is slow, and safe
