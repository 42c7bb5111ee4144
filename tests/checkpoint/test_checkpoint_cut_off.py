"""A restore that is cut off leaves parts of two steps in the state: nobody commits that mixture."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint import CheckpointError, Damaged, StateMismatch
from everstep.checkpoint.handle import Committed
from everstep.storage import MemoryStore


class Part:
    """A stateful object that calls a hook before it loads."""

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((4,), float(value))
        self.hook: Callable[[], Any] | None = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"t": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        if self.hook is not None:
            hook, self.hook = self.hook, None
            hook()
        self.tensor = state["t"].clone()


def state(value: float) -> dict[str, Any]:
    return {"a": Part(value), "b": Part(value), "e": value}


def values(held: dict[str, Any]) -> set[float]:
    return {held["a"].tensor[0].item(), held["b"].tensor[0].item(), float(held["e"])}


def begun(store: MemoryStore) -> tuple[everstep.Checkpointer, dict[str, Any]]:
    """A run that has committed steps 5 and 10, and its state, which is that of step 10."""
    checkpointer = everstep.Checkpointer(store=store, keep=5, on_event=lambda *_, **__: None)
    held = state(0)
    checkpointer.restore(held)
    for step in (5, 10):
        held["a"].tensor, held["b"].tensor = torch.full((4,), float(step)), torch.full((4,), float(step))
        held["e"] = step
        checkpointer.save(step, held).wait(30)
    return checkpointer, held


def restored(store: MemoryStore) -> set[float]:
    """What the next run goes on from."""
    into = state(-1)
    with everstep.Checkpointer(store=store, on_event=lambda *_, **__: None) as checkpointer:
        checkpointer.restore(into)
    return values(into)


def fail(error: type[BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise error("cut off")

    return act


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError, StateMismatch),
        (ValueError, StateMismatch),
        (torch.OutOfMemoryError, torch.OutOfMemoryError),  # which says nothing about the state: no refusal
        (KeyboardInterrupt, KeyboardInterrupt),
    ],
)
def test_state_of_a_restore_that_was_cut_off_is_not_saved_until_one_succeeds(
    error: type[BaseException], raised: type[BaseException]
) -> None:
    store = MemoryStore()
    checkpointer, held = begun(store)
    held["b"].hook = fail(error)
    with pytest.raises(raised):
        checkpointer.restore(held, step=5)
    assert len(values(held)) == 2, "or the test says nothing"
    with pytest.raises(CheckpointError, match=r"step 10 was not saved.*cut off.*a, b, e may hold.*restore\(\) again"):
        checkpointer.save(10, held)
    assert restored(store) == {10.0}
    checkpointer, held = begun(MemoryStore())
    held["b"].hook = fail(error)
    with pytest.raises(raised):
        checkpointer.restore(held, step=5)
    assert checkpointer.restore(held, step=5) == 5
    assert isinstance(checkpointer.save(6, held).wait(30), Committed)


@pytest.fixture
def handled(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Sets what SIGUSR1 does."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda act: signal.signal(signal.SIGUSR1, lambda *_: act()) and None
    signal.signal(signal.SIGUSR1, before)


def test_handler_of_signals_within_a_restore_saves_no_mixture(handled: Callable[..., None]) -> None:
    store = MemoryStore()
    checkpointer, held = begun(store)
    heard: list[Exception] = []

    def save() -> None:
        with pytest.raises(CheckpointError) as raised:
            checkpointer.save(10, held)
        heard.append(raised.value)
        with pytest.raises(CheckpointError, match="another restore"):
            checkpointer.restore(held)

    handled(save)
    held["b"].hook = lambda: signal.raise_signal(signal.SIGUSR1)
    assert checkpointer.restore(held, step=5) == 5
    assert "restore() is under way" in str(heard[0])
    assert values(held) == {5.0}
    assert restored(store) == {10.0}


def test_refusal_before_anything_was_changed_forbids_no_save() -> None:
    store = MemoryStore()
    checkpointer, held = begun(store)
    with pytest.raises(StateMismatch):
        checkpointer.restore({**held, "more": torch.zeros(3)}, step=5)
    assert values(held) == {10.0}
    assert isinstance(checkpointer.save(11, held).wait(30), Committed)


def test_part_that_was_cut_off_is_whole_again_only_with_a_restore_of_that_part() -> None:
    checkpointer, held = begun(MemoryStore())
    held["b"].hook = fail(RuntimeError)
    with pytest.raises(StateMismatch):
        checkpointer.restore(held, step=5)
    checkpointer.restore(held, step=5, include=["a"])
    with pytest.raises(CheckpointError, match="cut off"):
        checkpointer.save(10, held)
    checkpointer.restore(held, step=5)
    assert isinstance(checkpointer.save(6, held).wait(30), Committed)


def test_tensors_that_hold_bytes_of_a_damaged_commit_are_not_saved() -> None:
    store = MemoryStore()
    checkpointer = everstep.Checkpointer(store=store, keep=5, on_event=lambda *_, **__: None)
    held = {"x": torch.zeros(2000)}
    checkpointer.restore(held)
    for step in (5, 10):
        held["x"].fill_(step)
        checkpointer.save(step, held).wait(30)
    (shard,) = (name for name in store.objects if "-00000001/" in name and name.endswith(".safetensors"))
    store.objects[shard] = store.objects[shard][:-1] + b"?"
    with pytest.raises(Damaged):
        checkpointer.restore(held, step=5)
    with pytest.raises(CheckpointError, match="x may hold parts of two steps"):
        checkpointer.save(11, held)
    assert checkpointer.restore(held) == 10
    assert isinstance(checkpointer.save(11, held).wait(30), Committed)
