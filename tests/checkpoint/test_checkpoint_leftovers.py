"""What a killed or failed save leaves takes no room from the next one: a disk may hold `keep` + 1 states and no more.

Without that a job whose pod was killed in a save never saves again. Saves are cut off in real processes.
"""

import errno
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint import Fenced
from everstep.checkpoint.errors import SaveFailed
from everstep.checkpoint.format.layout import folder_of, record_name
from everstep.checkpoint.handle import Committed
from everstep.checkpoint.retention.catalog import Catalog
from everstep.storage import ObjectStore, RetryableError, StoreUnusable
from everstep.storage.backends.local import LocalStore
from everstep.storage.faults import Die, DieAfter, Fault, FaultStore

pytestmark = pytest.mark.timeout(180)

MIB = 2**20
PART = MIB
InChild = Callable[..., int]


def big(step: int) -> dict[str, Any]:
    """A state of 4 MiB, which is four parts."""
    return {"w": torch.full((MIB,), float(step))}


def steps_of(store: ObjectStore) -> list[int]:
    return [found.step for found in Catalog(store).list()]


def begun(store: ObjectStore, **options: Any) -> tuple[everstep.Checkpointer, int | None]:
    run = everstep.Checkpointer(store=store, max_loads=0, on_event=lambda kind, **_: None, **options)
    return run, run.restore(big(0))


class Killed(FaultStore):
    """Dies at the first call that matches `pattern`, or after it."""

    def __init__(self, inner: ObjectStore, pattern: str, *, after: bool) -> None:
        super().__init__(inner)
        self._pattern, self._after = pattern, after
        self.armed = False

    def call(self, operation: str, name: str, act: Callable[[], Any], tear: Callable[[], None] = lambda: None) -> Any:
        hit = self.armed and re.match(self._pattern, f"{operation} {name}") is not None
        done = act() if not hit or self._after else None
        if hit:
            os.kill(os.getpid(), signal.SIGKILL)
        return done


def die_in_save(root: Path, step: int, pattern: str, *, after: bool = False) -> None:
    """A run that is killed in a save."""
    store = Killed(LocalStore(root, part_size=PART), pattern, after=after)
    run, _ = begun(store, keep=1)
    store.armed = True
    raise AssertionError(f"not killed: {run.save(step, big(step)).wait(60)}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for two states of 4 MiB, and not for three."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root mounts a small file system")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "none", place], check=False)
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A log with commits 1 to 3, of which 1 is pinned and 2 tagged."""
    root = tmp_path / "run"
    store = LocalStore(root, part_size=PART)
    run, _ = begun(store, keep=3)
    with run:
        for step in (1, 2, 3):
            run.save(step, big(step)).wait(60)
    Catalog(store).pin(1)
    Catalog(store).tag("good", 2)
    return root


@pytest.mark.parametrize(
    ("call", "after"),
    [("part .*#3", True), ("commit data/", False), (r"create log/\d+", False)],
    ids=["in its last part", "before the file has its name", "before the record"],
)
def test_disk_with_room_for_one_more_state_saves_after_two_killed_saves(
    disk: Path, in_child: InChild, call: str, after: bool
) -> None:
    root = disk / "run"
    store = LocalStore(root, part_size=PART)
    run, _ = begun(store, keep=1)
    with run:
        run.save(1, big(1)).wait(60)
    for _ in range(2):
        assert in_child(lambda: die_in_save(root, 2, call, after=after)) == -signal.SIGKILL
    run, step = begun(store, keep=1)
    assert step == 1
    with run:
        assert isinstance(run.save(2, big(2)).wait(60), Committed)
    assert steps_of(store) == [2]
    assert list(root.rglob(".tmp-*")) == []
    assert len(list((root / "data").iterdir())) == 1


@pytest.mark.long_but("local")
@pytest.mark.parametrize("where", ["local", "s3_server"])
def test_unfinished_upload_of_a_killed_save_is_gone_before_the_next_save(
    where: str, place: Callable[[str], Callable[..., ObjectStore]], in_child: InChild
) -> None:
    opened = place(where)

    def state(step: int) -> dict[str, Any]:
        return {"w": torch.full((3 * MIB,), float(step))}

    def die() -> None:
        store = Killed(opened("run"), "commit data/", after=False)
        with everstep.Checkpointer(store=store, keep=1, on_event=lambda kind, **_: None) as run:
            run.restore(state(0))
            store.armed = True
            run.save(1, state(1)).wait(60)

    assert in_child(die) == -signal.SIGKILL
    store = opened("run")
    looked: list[int] = []

    class Looks(FaultStore):
        def call(self, operation: str, name: str, act: Callable[[], Any], tear: Any = lambda: None) -> Any:
            if operation == "start":
                looked.append(store.sweep_uploads(-60))
            return super().call(operation, name, act, tear)

    with everstep.Checkpointer(store=Looks(store), keep=1, on_event=lambda kind, **_: None) as run:
        run.restore(state(0))
        assert isinstance(run.save(2, state(2)).wait(60), Committed)
    assert looked == [0]
    assert steps_of(store) == [2]


@pytest.mark.parametrize("step", [1, 4])
def test_first_save_costs_two_listings_and_a_read_of_each_commit_with_data(tmp_path: Path, step: int) -> None:
    store = FaultStore(LocalStore(tmp_path, part_size=PART))
    run, _ = begun(store, keep=3)
    if step > 1:
        with run:
            for before in range(1, step):
                run.save(before, big(before)).wait(60)
        run, _ = begun(store, keep=3)
    calls = len(store.calls)
    run.save(step, big(step)).wait(60)
    assert run._owner.record is not None
    own = f"get {record_name(run._owner.record.n)}"  # is looked at before each save
    made = [call for call in store.calls[calls:] if call != own]
    until = next(n for n, call in enumerate(made) if call.startswith("start data/"))
    reads = [f"get {record_name(n)}" for n in (3, 2, 1)]
    expected = ["sweep ", "list data/", "list pins/", *reads] if step > 1 else ["sweep "]
    assert made[:until] == expected
    run.close()


def test_kill_between_commit_and_clean_up_costs_a_full_disk_one_save(disk: Path, in_child: InChild) -> None:
    root = disk / "run"
    store = LocalStore(root, part_size=PART)
    run, _ = begun(store, keep=1)
    with run:
        run.save(1, big(1)).wait(60)
    assert in_child(lambda: die_in_save(root, 2, r"create log/\d+", after=True)) == -signal.SIGKILL
    assert steps_of(store) == [2, 1]
    run, step = begun(store, keep=1)
    assert step == 2
    with pytest.raises(SaveFailed, match="No space left"):
        run.save(3, big(3)).wait(60)
    assert list(root.rglob(".tmp-*")) == []  # what failed has left nothing
    assert isinstance(run.save(4, big(4)).wait(60), Committed)
    run.close()
    assert steps_of(store) == [4]


def test_save_that_was_refused_takes_no_room_from_the_next_one(disk: Path) -> None:
    # Its parameters are looked at beside the writing, so its shard may be whole before it is refused.
    store = LocalStore(disk / "run", part_size=PART)
    model = torch.nn.Linear(1024, 1024)
    run = everstep.Checkpointer(store=store, keep=1, on_event=lambda kind, **_: None)
    run.restore({"m": model})
    run.save(1, {"m": model}).wait(60)
    good = model.weight.detach().clone()
    for step in (2, 3):
        torch.nn.init.constant_(model.weight, float("nan"))
        with pytest.raises(SaveFailed, match="hold NaN"):
            run.save(step, {"m": model}).wait(60)
    with torch.no_grad():
        model.weight.copy_(good)
    assert isinstance(run.save(4, {"m": model}).wait(60), Committed)
    run.close()
    assert steps_of(store) == [4]
    assert len(list((disk / "run" / "data").iterdir())) == 1


def test_failed_save_of_a_living_run_leaves_no_room_taken(disk: Path) -> None:
    # Its shard is whole, and then the disk has no block for the record.

    class Refuses(FaultStore):
        refuses = False

        def call(self, operation: str, name: str, act: Callable[[], Any], tear: Any = lambda: None) -> Any:
            if self.refuses and operation == "create":
                raise RetryableError("No space left") from OSError(errno.ENOSPC, "No space left")
            return super().call(operation, name, act, tear)

    store = Refuses(LocalStore(disk / "run", part_size=PART))
    run, _ = begun(store, keep=1)
    run.save(1, big(1)).wait(60)
    store.refuses = True
    for step in (2, 3):
        with pytest.raises(SaveFailed, match="No space left"):
            run.save(step, big(step)).wait(60)
    store.refuses = False
    assert isinstance(run.save(4, big(4)).wait(60), Committed)
    run.close()
    assert steps_of(store) == [4]


def test_save_after_an_outage_is_not_delayed_by_a_clean_up(tmp_path: Path) -> None:
    class Away(FaultStore):
        away = False

        def call(self, operation: str, name: str, act: Callable[[], Any], tear: Any = lambda: None) -> Any:
            if self.away and operation == "part":
                raise RetryableError("away")
            return super().call(operation, name, act, tear)

    store = Away(LocalStore(tmp_path, part_size=PART))
    run, _ = begun(store, keep=1)
    run.save(1, big(1)).wait(60)
    store.away = True
    for step in (2, 3):
        with pytest.raises(SaveFailed, match="away"):
            run.save(step, big(step)).wait(60)
    run.wait(60)
    assert store.calls.count("sweep ") == 1  # before the first save
    store.away = False
    assert isinstance(run.save(4, big(4)).wait(60), Committed)
    run.close()


def test_commits_that_somebody_counts_on_stay_until_the_first_commit(root: Path, in_child: InChild) -> None:
    assert in_child(lambda: die_in_save(root, 4, r"create log/\d+")) == -signal.SIGKILL
    store = FaultStore(LocalStore(root, part_size=PART))
    run, step = begun(store, keep=1)
    assert step == 3
    run.save(4, big(4)).wait(60)
    run.close()
    before = store.calls[: next(n for n, call in enumerate(store.calls) if call.startswith("start data/"))]
    deleted = {folder_of(call.split()[1]) for call in before if call.startswith("delete data/")}
    assert len(deleted) == 1  # that of the save that was killed
    assert not deleted & {Catalog(store).find(n=n).save_id for n in (1, 2)}
    assert steps_of(store) == [4, 2, 1]


def test_nothing_below_a_damaged_record_goes_before_the_first_commit(root: Path, in_child: InChild) -> None:
    # Record 3 is the commit of step 3. Damaged, it names no save, and its data may be the newest state.
    (root / record_name(3)).write_bytes(b"damaged")
    there = set((root / "data").iterdir())
    store = LocalStore(root, part_size=PART)
    run, step = begun(store, keep=1)
    assert step == 2
    assert run._writer is not None
    run._writer._cleaner.make_room(frozenset(), failed=True)
    assert set((root / "data").iterdir()) == there
    run.save(4, big(4)).wait(60)
    run.close()
    assert steps_of(store) == [4, 2, 1]


def test_commit_that_a_run_went_back_to_stays_until_its_first_commit(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, part_size=PART)
    run, _ = begun(store, keep=3)
    with run:
        for step in (1, 2, 3):
            run.save(step, big(step)).wait(60)
    run = everstep.Checkpointer(store=store, keep=1, on_event=lambda kind, **_: None)
    assert run.restore(big(0), step=1) == 1
    assert run._writer is not None
    run._writer._cleaner.make_room(frozenset(), failed=True)
    assert steps_of(store) == [3, 1]
    run.close()


@pytest.mark.long
def test_dying_at_any_call_of_the_clean_up_before_a_save_loses_nothing(root: Path, in_child: InChild) -> None:
    assert in_child(lambda: die_in_save(root, 4, r"create log/\d+")) == -signal.SIGKILL
    assert in_child(lambda: die_in_save(root, 4, "commit data/")) == -signal.SIGKILL
    for fault in (Die(), DieAfter()):
        for number in itertools.count():
            copy = root.parent / f"{type(fault).__name__}{number}"
            shutil.copytree(root, copy)
            if in_child(partial(die_in_clean_up, copy, number, fault)) == 0:
                break
            store = LocalStore(copy, part_size=PART)
            assert steps_of(store) == [3, 2, 1]
            run, step = begun(store, keep=3)
            assert step == 3
            with run:
                run.save(5, big(5)).wait(60)
            assert steps_of(store) == [5, 3, 2, 1]
            assert list(copy.rglob(".tmp-*")) == []
            assert len(list((copy / "data").iterdir())) == 4
            shutil.rmtree(copy)
        assert number > 5


def die_in_clean_up(root: Path, number: int, fault: Fault) -> None:
    """Dies at this call of the clean-up; not at all if there is none."""
    store = FaultStore(LocalStore(root, part_size=PART))
    run, _ = begun(store, keep=3)
    assert run._writer is not None
    store._faults = {len(store.calls) + number: fault}
    run._writer._cleaner.make_room(frozenset(), failed=True)


@pytest.mark.parametrize("error", [RetryableError("away"), StoreUnusable("forbidden"), ValueError("a backend's own")])
def test_no_error_of_the_clean_up_fails_a_save(root: Path, error: Exception) -> None:
    class Refuses(FaultStore):
        def call(self, operation: str, name: str, act: Callable[[], Any], tear: Any = lambda: None) -> Any:
            if operation in ("sweep", "delete") or (operation, name) in (("list", "data/"), ("list", "pins/")):
                raise error
            return super().call(operation, name, act, tear)

    run, step = begun(Refuses(LocalStore(root, part_size=PART)), keep=3)
    assert step == 3
    assert isinstance(run.save(4, big(4)).wait(60), Committed)
    run.close()


def test_writer_that_is_overtaken_while_it_makes_room_deletes_nothing_of_the_log(root: Path, in_child: InChild) -> None:
    assert in_child(lambda: die_in_save(root, 4, r"create log/\d+")) == -signal.SIGKILL
    store = LocalStore(root, part_size=PART)
    slow, _ = begun(store, keep=1)
    there = set((root / "data").iterdir())
    other, step = begun(store, keep=3)  # takes the log before the first one saves
    assert step == 3
    assert slow._writer is not None
    slow._writer._cleaner.make_room(frozenset(), failed=True)
    assert set((root / "data").iterdir()) == there
    with pytest.raises(Fenced):
        slow.save(4, big(4)).wait(60)
    with other:
        other.save(4, big(4)).wait(60)
    assert steps_of(store) == [4, 3, 2, 1]


def test_run_that_restores_while_a_newer_one_makes_room_loses_no_commit(root: Path, in_child: InChild) -> None:
    assert in_child(lambda: die_in_save(root, 4, "commit data/")) == -signal.SIGKILL
    store = LocalStore(root, part_size=PART)

    class Overtaken(FaultStore):
        done = False

        def call(self, operation: str, name: str, act: Callable[[], Any], tear: Any = lambda: None) -> Any:
            if operation == "get_into" and not self.done:
                self.done = True
                newer, _ = begun(store, keep=1)
                newer._writer._cleaner.make_room(frozenset(), failed=False)  # type: ignore[union-attr]
            return super().call(operation, name, act, tear)

    run, step = begun(Overtaken(store), keep=1)
    assert step == 3
    with pytest.raises(Fenced):
        run.save(4, big(4)).wait(60)
    assert steps_of(store) == [3, 2, 1]
