"""Which save a run waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.checkpoint import Checkpointer
from everstep.storage.backends.memory import MemoryStore
from everstep.train.coordination.save_schedule import SaveSchedule


class Held(MemoryStore):
    """Takes no new object while it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()

    def create(self, *arguments: Any, **options: Any) -> Any:
        assert self.free.wait(60)
        return super().create(*arguments, **options)


def nothing() -> None:
    """Every peer is there."""


@pytest.fixture
def schedule() -> Callable[[Held], SaveSchedule]:
    def make(store: Held) -> SaveSchedule:
        made = SaveSchedule(Checkpointer(store=store, every_steps=1000), every_seconds=0.01)
        made.restore({"w": torch.zeros(3)})
        return made

    return make


def test_a_save_that_comes_while_one_is_in_flight_is_the_one_to_wait_for(
    schedule: Callable[[Held], SaveSchedule],
) -> None:
    store = Held()
    kept = schedule(store)
    state = {"w": torch.ones(3)}
    store.free.clear()
    kept.save(1, state)
    kept.save(2, state)
    assert not kept.durable(2, 0.1, nothing)
    assert not kept.due(), "while a save is in flight"
    store.free.set()
    assert kept.durable(2, 30, nothing)
    assert kept.newest() == 2
    kept.checkpointer.close()


@pytest.mark.parametrize("checkpoint", ["", "memory"])
def test_option_that_there_is_not_is_refused_with_and_without_a_place_to_save(checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'rehearsal'"):
        SaveSchedule.find(checkpoint and str(tmp_path), None, None, {"rehearsal": False}, {})
