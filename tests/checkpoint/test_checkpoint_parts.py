"""A process that dies at any storage call or part of a save leaves the previous or the new checkpoint, whole
(failure mode 68).

On every kind of store, with a shard of several parts. The calls are enumerated: a first run counts them, then one real
process after another gets SIGKILL before each, or, where a store can tear them, in the middle of a write. To die after
a call is to die before the next. Another store is another class of three lines at the end: `make test` has files,
`make nightly` all.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import everstep
from everstep.storage import ObjectStore
from everstep.storage.faults import Die, Fault, FaultStore, Tear

SMALL, LARGE = 1000, 3 * 2**20  # elements: 4 kB, and 12 MB in at least three parts


def state_to_fill() -> dict[str, Any]:
    return {"t": {"w": None}, "step": 0}  # of any size


def state_of(step: int) -> dict[str, Any]:
    return {"t": {"w": torch.full((LARGE if step == 2 else SMALL,), float(step))}, "step": step}


def save(store: ObjectStore, step: int, keep: int = 3) -> None:
    with everstep.Checkpointer(store=store, keep=keep, on_event=lambda kind, **_: None) as checkpointer:
        checkpointer.restore(state_to_fill())
        checkpointer.save(step, state_of(step)).wait(60)


def restored(store: ObjectStore) -> int | None:
    """The step that a new run restores; fails if the state is not that of exactly one step."""
    state = state_to_fill()
    with everstep.Checkpointer(store=store, on_event=lambda kind, **_: None) as checkpointer:
        step = checkpointer.restore(state)
    assert torch.equal(state["t"]["w"], state_of(step or 0)["t"]["w"])
    assert state["step"] == (step or 0)
    return step


class Dying:
    """What every store must hold. A subclass names the fixture of its server."""

    server = "local"
    tears = False  # whether a write can be left half done under its name

    @pytest.mark.timeout(600)
    def test_kill_at_any_call_or_part_of_a_save_leaves_one_whole_checkpoint(
        self, place: Callable[[str], Callable[..., ObjectStore]], in_child: Callable[[Callable[[], None]], int]
    ) -> None:
        opened = place(self.server)
        save(opened("count"), 1)
        counted = FaultStore(opened("count"))
        save(counted, 2, keep=1)
        calls = counted.calls
        first = next(n for n, call in enumerate(calls) if call.startswith(("start data/", "put data/")))
        commit = calls.index("create log/000000000003.json")
        assert any(call.startswith("delete data/") for call in calls[commit:])
        if opened("count").capabilities.multipart:
            assert sum(call.startswith("part data/") for call in calls) >= 3

        for number, call in enumerate(calls[first:], first):
            kinds: list[Fault] = [Die()]
            if call.startswith("part ") or (self.tears and call.startswith(("put ", "create "))):
                kinds.append(Tear())
            for kind in kinds:
                name = f"{type(kind).__name__}-{number}"
                save(opened(name), 1)
                faults: dict[int, Fault] = {number: kind}
                code = in_child(lambda n=name, f=faults: save(FaultStore(opened(n), f), 2, keep=1))  # type: ignore[misc]
                assert code == -9, (kind, call)
                assert restored(opened(name)) == (2 if number > commit else 1), (kind, number, call)
                sizes = {i.size for i in opened(name).list("data/") if i.name.endswith(".safetensors")}
                assert all(size < 2**16 or size > 4 * LARGE for size in sizes), "a part is never an object"


class TestLocal(Dying):
    tears = True

    def test_run_after_a_crash_cleans_up_what_it_left(
        self, place: Callable[[str], Callable[..., ObjectStore]], in_child: Callable[[Callable[[], None]], int]
    ) -> None:
        # Case 70: nothing of the dead save stays, but what is younger than a day and may be somebody's.
        store = place("local")("crash")
        save(store, 1)
        counted = FaultStore(store)
        save(counted, 2)
        died = next(n for n, call in enumerate(counted.calls) if call.startswith("part data/"))
        assert in_child(lambda: save(FaultStore(store, {died: Die()}), 2)) == -9
        save(store, 3, keep=1)
        assert len({i.name.split("/")[1] for i in store.list("data/")}) == 1


@pytest.mark.long
@pytest.mark.s3
@pytest.mark.usefixtures("s3_server")
class TestS3(Dying):
    server = "s3_server"


@pytest.mark.long
@pytest.mark.s3
@pytest.mark.usefixtures("careless_s3_server")
class TestS3ThatIgnoresConditions(Dying):
    """In the mode for a single committer."""

    server = "careless_s3_server"


@pytest.mark.long
@pytest.mark.usefixtures("gcs_server")
class TestGcs(Dying):
    server = "gcs_server"


@pytest.mark.long
@pytest.mark.usefixtures("azure_server")
class TestAzure(Dying):
    server = "azure_server"
