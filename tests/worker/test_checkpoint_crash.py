"""A process that dies at any storage call of a save leaves the previous or the new checkpoint, whole (failure mode 68).

The calls are enumerated, not sampled: a first run counts them, then one real process after another is killed with
SIGKILL before each, after each, and in the middle of each write. Damage to any object is found and stepped over, by
name (failure modes 73, 74).
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from aiobotocore.session import AioSession

import everstep
from everstep.checkpoint import CheckpointError
from everstep.storage import ObjectStore, open_store
from everstep.storage.faults import Die, DieAfter, Fault, FaultStore, Tear

InChild = Callable[..., int]


def state_at(step: int) -> dict[str, object]:
    """A state that says in every tensor which step it is of: one that mixes two steps is seen."""
    return {"w": torch.full((300,), float(step)), "b": torch.full((7,), step, dtype=torch.int64), "step": step}


def save_steps(store: ObjectStore, steps: list[int], keep: int = 3) -> None:
    with everstep.Checkpointer(store=store, keep=keep) as checkpointer:
        checkpointer.restore(state_at(0))
        for step in steps:
            checkpointer.save(step, state_at(step)).wait(60)


def restored(store: ObjectStore) -> int | None:
    """The step that a new process restores; fails if the state is not that of exactly one step."""
    state = state_at(0)
    step = everstep.Checkpointer(store=store).restore(state)
    w, b = state["w"], state["b"]
    assert isinstance(w, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    assert set(w.tolist()) == {float(step or 0)}
    assert set(b.tolist()) == {step or 0}
    assert state["step"] == (step or 0)
    return step


def opened(url: str, session: object) -> ObjectStore:
    return open_store(url, {"session": session} if url.startswith("s3://") else None)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_kill_at_every_storage_call_leaves_the_previous_or_the_new_checkpoint(url: str, in_child: InChild) -> None:
    session = AioSession()  # botocore reads its service models once instead of once a child
    save_steps(opened(f"{url}/count", session), [1])
    counted = FaultStore(opened(f"{url}/count", session))
    save_steps(counted, [2], keep=1)
    calls = counted.calls
    commit = calls.index("create log/000000000003.json")
    assert any(c.startswith("delete data/") for c in calls[commit:])

    for kind in (Die(), DieAfter(), Tear()):
        for number, call in enumerate(calls):
            # A torn write needs a store whose writes can tear: an S3 server's cannot.
            if isinstance(kind, Tear) and (url.startswith("s3://") or not call.startswith(("put", "create"))):
                continue
            place = f"{url}/{type(kind).__name__}-{number}"
            save_steps(opened(place, session), [1])
            faults: dict[int, Fault] = {number: kind}
            code = in_child(lambda p=place, f=faults: save_steps(FaultStore(opened(p, session), f), [2], keep=1))
            assert code == -9, (kind, call)
            committed = number > commit or (number == commit and isinstance(kind, DieAfter))
            assert restored(opened(place, session)) == (2 if committed else 1), (kind, number, call)


@pytest.mark.long
def test_kill_during_the_first_save_ever_leaves_none(tmp_path: Path, in_child: InChild) -> None:
    counted = FaultStore(open_store(str(tmp_path / "count")))
    save_steps(counted, [1])
    commit = counted.calls.index("create log/000000000001.json")
    for number in range(commit + 1):
        store = open_store(str(tmp_path / str(number)))
        faults: dict[int, Fault] = {number: Die()}
        assert in_child(lambda s=store, f=faults: save_steps(FaultStore(s, f), [1])) == -9
        assert restored(store) is None


@pytest.mark.long_but("local-flip")
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "delete", "empty", "swap"])
def test_damage_to_any_object_of_the_newest_commit_falls_back_one_commit_and_names_the_file(
    url: str, damage: str, events: object
) -> None:
    store = open_store(url)
    save_steps(store, [1, 2])
    step_two = [i.name for i in store.list("data/") if "-00000002/" in i.name] + ["log/000000000002.json"]
    for name in step_two:
        good = store.get(name)
        other = store.get(name.replace("-00000002/", "-00000001/").replace("000000000002.json", "000000000001.json"))
        match damage:
            case "flip":
                store.put(name, bytes([*good[:-60], good[-60] ^ 0x10, *good[-59:]]))
            case "cut":
                store.put(name, good[:-1])
            case "grow":
                store.put(name, good + b"\0")
            case "empty":
                store.put(name, b"")
            case "swap":
                store.put(name, other)
            case _:
                store.delete(name)
        state = state_at(0)
        step = everstep.Checkpointer(store=store, on_event=events).restore(state)  # type: ignore[arg-type]
        assert (step, state["step"]) == (1, 1), name
        told = [e["error"] for e in events.of("stepped-over")]  # type: ignore[attr-defined]
        assert any(name in text for text in told), (name, told)
        events.seen.clear()  # type: ignore[attr-defined]
        store.put(name, good)
        assert restored(store) == 2


def test_next_save_after_a_fallback_becomes_the_latest_and_the_damaged_one_is_cleaned(url: str) -> None:
    store = open_store(url)
    save_steps(store, [1, 2])
    shard = next(i.name for i in store.list("data/") if "-00000002/" in i.name)
    store.put(shard, store.get(shard)[:-8])
    with everstep.Checkpointer(store=store) as checkpointer:
        assert checkpointer.restore(state_at(0)) == 1
        checkpointer.save(3, state_at(3)).wait(60)
    assert restored(store) == 3
    assert shard not in [i.name for i in store.list("data/")]


def test_no_commit_that_can_be_read_is_an_error_and_not_a_new_start(url: str) -> None:
    store = open_store(url)
    save_steps(store, [1])
    for info in store.list("data/"):
        store.delete(info.name)
    with pytest.raises(CheckpointError, match="none of the 1 commits"):
        restored(store)


def test_verify_names_every_damaged_shard(url: str) -> None:
    store = open_store(url)
    save_steps(store, [1])
    checkpointer = everstep.Checkpointer(store=store)
    assert checkpointer.verify() == ()
    shard = store.list("data/")[0].name
    data = bytearray(store.get(shard))
    data[-1] ^= 1
    store.put(shard, data)
    assert [shard in problem for problem in checkpointer.verify()] == [True]
