"""A state whose parameters hold NaN or infinity does not become the one that a run goes back to (failure mode 77)."""

import math
from typing import Any

import pytest
import torch

import everstep
from everstep.checkpoint import CheckpointError, SaveFailed
from everstep.storage import MemoryStore


def model(value: float = 1.0) -> torch.nn.Module:
    found = torch.nn.Linear(40, 30)
    found.register_buffer("mask", torch.full((5,), -math.inf))
    with torch.no_grad():
        found.weight.fill_(value)
    return found


def saved(store: MemoryStore, *states: tuple[int, torch.nn.Module], events: Any = None, **options: Any) -> None:
    hook = events or (lambda kind, **_: None)
    with everstep.Checkpointer(store=store, on_event=hook, **options) as checkpointer:
        checkpointer.restore({"model": model()})
        for step, network in states:
            checkpointer.save(step, {"model": network}).wait(30)
            checkpointer.wait(30)


def restored(store: MemoryStore, events: Any = None, **options: Any) -> tuple[int | None, float]:
    into = model(0.0)
    checkpointer = everstep.Checkpointer(store=store, on_event=events or (lambda kind, **_: None), **options)
    step = checkpointer.restore({"model": into})
    checkpointer.close()
    return step, float(into.weight.detach()[0, 0])


def broken(value: float = math.nan) -> torch.nn.Module:
    found = model()
    with torch.no_grad():
        found.weight[3, 7] = value
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_diverged_state_is_refused_by_name_and_the_commit_before_stays_the_latest(value: float, events: Any) -> None:
    store = MemoryStore()
    with everstep.Checkpointer(store=store, on_event=events) as checkpointer:
        checkpointer.restore({"model": model()})
        checkpointer.save(1, {"model": model(1.0)}).wait(30)
        with pytest.raises(SaveFailed, match=r"step 2 .*model/weight hold NaN or infinity.*nonfinite="):
            checkpointer.save(2, {"model": broken(value)}).wait(30)
        checkpointer.save(3, {"model": model(3.0)}).wait(30)
    assert [f["step"] for f in events.of("save-failed")] == [2]
    assert restored(store) == (3, 3.0)


def test_infinity_in_a_buffer_and_sums_that_overflow_are_fine() -> None:
    # Causal masks are buffers full of -inf; the check adds up large finite values.
    store = MemoryStore()
    saved(store, (1, model(torch.finfo(torch.float32).max)))
    assert restored(store)[0] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_parameters_of_every_floating_type_are_looked_at(dtype: torch.dtype) -> None:
    with pytest.raises(SaveFailed, match="model/weight"):
        saved(MemoryStore(), (1, broken().to(dtype)))


def test_marked_state_is_kept_for_people_and_stepped_over_by_runs(events: Any) -> None:
    store = MemoryStore()
    saved(store, (1, model(1.0)), (2, broken()), events=events, nonfinite="mark")
    assert [(f["step"], f["names"]) for f in events.of("nonfinite")] == [(2, ["model/weight"])]
    assert restored(store, events) == (1, 1.0)
    assert ["model/weight hold NaN or infinity" in f["error"] for f in events.of("stepped-over")] == [True]
    catalog = everstep.Checkpointer(store=store)
    assert [(f.step, f.nonfinite) for f in catalog.list()] == [(2, ("model/weight",)), (1, ())]
    assert restored(store, nonfinite="allow")[0] == 2


def test_marked_states_never_push_out_the_last_good_ones() -> None:
    store = MemoryStore()
    bad = [(step, broken()) for step in range(3, 12)]
    saved(store, (1, model(1.0)), (2, model(2.0)), *bad, nonfinite="mark", keep=2)
    assert [f.step for f in everstep.Checkpointer(store=store).list()] == [11, 10, 2, 1]
    assert restored(store) == (2, 2.0)


def test_nothing_but_marked_states_is_an_error_and_not_a_new_start() -> None:
    store = MemoryStore()
    saved(store, (1, broken()), nonfinite="mark")
    with pytest.raises(CheckpointError, match=r"no commit can be taken.*NaN"):
        restored(store)


def test_allowed_state_is_a_commit_like_any_other() -> None:
    store = MemoryStore()
    saved(store, (1, broken()), nonfinite="allow")
    assert restored(store)[0] == 1


def test_policy_comes_from_the_environment_too_and_must_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_CHECKPOINT_NONFINITE", "allow")
    store = MemoryStore()
    saved(store, (1, broken()))
    assert restored(store)[0] == 1
    with pytest.raises(CheckpointError, match="nonfinite='never'"):
        everstep.Checkpointer(store=store, nonfinite="never")  # type: ignore[arg-type]
