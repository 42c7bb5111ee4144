"""A run that restores while a newer one takes the log: it goes on from what it read, or ends as one that is fenced."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

import everstep
from everstep.checkpoint import Fenced
from everstep.storage import MemoryStore, open_store
from everstep.storage.faults import FaultStore

T = TypeVar("T")


class Overtaken(FaultStore):
    """Before call `at`, something else happens to what the store holds."""

    def __init__(self, inner: MemoryStore, at: int, meanwhile: Callable[[], None]) -> None:
        super().__init__(inner)
        self._at, self._meanwhile = at, meanwhile
        self.happened = False

    def call(self, operation: str, name: str, do: Callable[[], T], *rest: Any) -> T:
        if len(self.calls) == self._at and not self.happened:
            self.happened = True
            self._meanwhile()
        return super().call(operation, name, do, *rest)


def test_restore_that_a_newer_run_overtakes_at_any_call_ends_as_fenced_and_blames_no_commit(runs: Any) -> None:
    begun = MemoryStore()
    runs(begun).save(1, 2, 3, keep=2)
    fenced = 0
    for at in itertools.count():
        inner = MemoryStore()
        inner.objects = dict(begun.objects)
        store = Overtaken(inner, at, lambda inner=inner: runs(inner).save(11, 12, keep=1))
        events: list[tuple[str, Any]] = []

        def note(kind: str, error: Any = None, *, to: list[tuple[str, Any]] = events, **_: Any) -> None:
            to.append((kind, error))

        try:
            _, step = runs(store).begin(on_event=note)
        except Fenced:
            fenced += 1
            assert "fenced" in [kind for kind, _ in events]
        else:
            assert step in (3, 12)
        assert [error for kind, error in events if kind == "stepped-over"] == []
        if not store.happened:
            break
    assert fenced > 0
    assert runs(begun).restored() == 3


def test_run_overtaken_by_a_newer_checkpointer_of_its_process_is_told_how_to_read_a_commit(tmp_path: Path) -> None:
    url, state = str(tmp_path / "commits"), {"a": 1}
    first = everstep.Checkpointer(url)
    first.restore(state)
    second = everstep.Checkpointer(url)
    second.restore({"a": 0})
    first.save(1, state)
    with pytest.raises(Fenced, match=r"a newer Checkpointer of this process, .* call everstep\.load\(url\)"):
        first.close()
    second.save(2, state)
    second.close()
    assert everstep.load(url).step == 2


def test_save_that_a_newer_run_overtakes_at_any_write_ends_as_fenced(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer run's clean-up takes away the files that the older one is writing: no failure of the store."""
    sync = os.fsync
    fenced = 0
    for at in itertools.count():
        url = str(tmp_path / str(at))
        older, _ = runs(open_store(url)).begin()
        calls = 0

        def overtaken(fd: int, *, at: int = at, url: str = url) -> None:
            nonlocal calls
            sync(fd)
            calls += 1
            if calls == at + 1:
                runs(open_store(url)).save(11, 12)

        monkeypatch.setattr(os, "fsync", overtaken)
        try:
            older.save(1, runs.state(1)).wait(30)
        except Fenced:
            fenced += 1
            with pytest.raises(Fenced, match="a newer Checkpointer of this process"):
                older.close()
        monkeypatch.setattr(os, "fsync", sync)
        if calls <= at:
            break
    assert fenced > 1
