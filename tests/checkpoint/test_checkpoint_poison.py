"""A state that is whole and still kills whoever loads it is stepped over after some deaths (failure mode 76); nothing
else is.

A run of these tests that is forgotten died, as far as the store can tell. One test uses processes that really die.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint import CheckpointError, StateMismatch
from everstep.checkpoint.log.loads import SURVIVED_STEPS
from everstep.storage import MemoryStore, RetryableError, open_store
from everstep.storage.faults import Fail, FaultStore


def marks(store: MemoryStore) -> list[str]:
    return [name for name in store.objects if name.startswith("loads/")]


def test_commit_that_three_runs_died_of_is_stepped_over_and_reported(runs: Any, events: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    for _ in range(3):
        assert runs(store).begin()[1] == 2
    assert runs(store).begin(on_event=events)[1] == 1
    (told,) = events.of("stepped-over")
    assert (told["n"], told["error"]) == (2, "step 2: 3 runs loaded it and ended without another commit")
    # And after as many more deaths the next older: one step back a time.
    for _ in range(2):
        assert runs(store).begin()[1] == 1
    assert runs(store).begin(on_event=events)[1] == 2, "when all are poison, the newest is tried again"


def test_next_commit_makes_the_deaths_before_it_history(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    for _ in range(2):
        runs(store).begin()
    run, step = runs(store).begin()
    assert step == 2
    run.save(3, runs.state(3)).wait(30)
    run.wait(30)
    run.close()
    assert marks(store) == []
    assert runs(store).restored() == 3


def test_suspected_commit_does_not_count_as_kept_and_is_not_deleted_for_it(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    for _ in range(3):
        runs(store).begin()
    runs(store).save(3, keep=2)
    assert [f.step for f in everstep.Checkpointer(store=store).list()] == [3, 2, 1], "2 is whole, and 1 is kept for it"
    runs(store).save(4, 5, keep=2)
    assert [f.step for f in everstep.Checkpointer(store=store).list()] == [5, 4], "it is old, as any other"


@pytest.mark.parametrize("steps", [SURVIVED_STEPS - 1, SURVIVED_STEPS])
def test_run_that_has_made_its_steps_did_not_die_of_the_load(steps: int, runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    run, _ = runs(store).begin(every_steps=1000)
    for step in range(3, 3 + steps):
        assert run.should_save(step) is False
    run._writer.later(lambda: None)
    run._writer.close(10)
    assert len(marks(store)) == (1 if steps < SURVIVED_STEPS else 0)


def test_run_that_ends_in_order_leaves_no_mark(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1)
    assert runs(store).restored() == 1
    assert marks(store) == []


def test_only_commit_there_is_gets_tried_however_often(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1)
    for _ in range(5):
        assert runs(store).begin()[1] == 1


def test_zero_loads_means_never_to_step_over(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    for _ in range(5):
        assert runs(store).begin(max_loads=0)[1] == 2
    assert marks(store) == []


def test_number_of_loads_is_the_operators_or_the_scripts_to_say(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    monkeypatch.setenv("EVERSTEP_CHECKPOINT_MAX_LOADS", "1")
    assert [runs(store).begin()[1] for _ in range(2)] == [2, 1]
    with pytest.raises(CheckpointError, match="max_loads=-1"):
        everstep.Checkpointer(store=store, max_loads=-1)


def test_script_that_does_not_fit_the_commit_is_no_poison(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    for _ in range(4):
        with pytest.raises(StateMismatch):
            everstep.Checkpointer(store=store).restore({"other": 1})
    assert runs(store).restored() == 2


def test_store_that_fails_during_the_load_is_no_poison(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    counted = FaultStore(store)
    everstep.Checkpointer(store=counted).restore(runs.state())
    number = next(i for i, call in enumerate(counted.calls) if call.startswith("get_into data/"))
    for name in marks(store):
        store.delete(name)
    for _ in range(4):
        with pytest.raises(RetryableError):
            everstep.Checkpointer(store=FaultStore(store, {number: Fail(RetryableError("503"))})).restore(runs.state())
    assert marks(store) == []


class Deadly:
    """A part of the state that kills the process that loads a certain value, as a broken native library would."""

    def __init__(self, value: int) -> None:
        self.value = torch.tensor([value])

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if int(state["value"]) == 13:
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        self.value = state["value"]


def run_in_child(url: str, found: Path) -> int:
    """A real process that restores, says what, and trains on; its wait status."""
    child = os.fork()
    if child == 0:
        try:
            checkpointer = everstep.Checkpointer(store=open_store(url), on_event=lambda kind, **_: None)
            step = checkpointer.restore({"deadly": Deadly(0)})
            checkpointer.close()
            found.write_text(str(step))
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_processes_that_crash_while_loading_give_up_on_that_commit_after_three(tmp_path: Path) -> None:
    url, found = str(tmp_path / "store"), tmp_path / "found"
    with everstep.Checkpointer(url, on_event=lambda kind, **_: None) as checkpointer:
        checkpointer.restore({"deadly": Deadly(0)})
        for step, value in ((1, 1), (2, 13)):
            checkpointer.save(step, {"deadly": Deadly(value)}).wait(30)
            checkpointer.wait(30)
    codes = [run_in_child(url, found) for _ in range(4)]
    assert codes == [-signal.SIGKILL] * 3 + [0]
    assert found.read_text() == "1"


def test_restore_after_the_end_of_the_run_leaves_no_mark(runs: Any) -> None:
    # An evaluation at the script's end, of the newest or the best state.
    store = MemoryStore()
    runs(store).save(1, 2)
    for _ in range(4):
        run, step = runs(store).begin()
        assert step == 2
        run.close()
        assert run.restore(runs.state()) == 2
        assert marks(store) == []


def test_commit_that_a_later_restore_finds_damaged_does_not_count_as_kept(runs: Any) -> None:
    store = MemoryStore()
    run, _ = runs(store).begin(keep=2)
    for step in (1, 2, 3):
        run.save(step, runs.state(step)).wait(30)
    runs.settle(run)
    (shard,) = (name for name in store.objects if "-00000003/" in name and name.endswith(".safetensors"))
    store.objects[shard] = store.objects[shard][:-1] + b"?"
    assert run.restore(runs.state()) == 2, "or the test says nothing"
    run.save(3, runs.state(3)).wait(30)
    run.close()
    kept = everstep.Checkpointer(store=store)
    whole = [found.step for found in kept.list() if kept.verify(n=found.n) == ()]
    assert whole == [3, 2]
