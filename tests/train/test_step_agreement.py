"""What two ranks agree on between their steps."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count

import pytest
from torch._C import _distributed_c10d as c10d

from everstep.recovery.errors import LoopError
from everstep.train.coordination.step_agreement import MAX_STRIDE, StepAgreement, StepRequest


def test_a_wish_for_a_save_that_lasts_until_it_is_granted_is_granted_once_and_at_one_boundary_on_all_ranks() -> None:
    """A rank wishes by its clock, which is set back by the save: at the boundary that grants it, it still wishes."""
    store, name = c10d.HashStore(), uuid.uuid4().hex

    def rank(number: int) -> list[int]:
        own = c10d.PrefixStore(name, store)
        intent = StepAgreement(c10d.ProcessGroupGloo(own, number, 2, timedelta(seconds=30)))
        saved: list[int] = []
        for boundary in range(6 * MAX_STRIDE):
            wishes = number == 0 and len(saved) < 1 + (boundary >= 3 * MAX_STRIDE)
            if intent.at_boundary(StepRequest(save=wishes)).save:
                saved.append(boundary)
        intent.finish()
        return saved

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert first == second
    assert len(first) == 2
    assert first[0] < 3 * MAX_STRIDE <= first[1]


@pytest.mark.parametrize("at", range(5 * MAX_STRIDE, 6 * MAX_STRIDE, 9))
def test_wish_is_granted_at_the_boundary_after_the_one_that_told_it_however_rarely_ranks_agree(at: int) -> None:
    """Where agreeing is dear, a wish waits for the next agreement, and not for another stride until that is read."""
    store, name = c10d.HashStore(), uuid.uuid4().hex

    def rank(number: int) -> tuple[int, int]:
        ticks = count()
        own = c10d.PrefixStore(name, store)
        # Each look at this clock takes a millisecond: an agreement costs as much as a step.
        intent = StepAgreement(c10d.ProcessGroupGloo(own, number, 2, timedelta(seconds=30)), lambda: next(ticks) / 1000)
        for boundary in range(10 * MAX_STRIDE):
            if intent.at_boundary(StepRequest(move=number == 0 and boundary >= at)).move:
                intent.finish()
                return boundary, intent.stride
        raise AssertionError("never granted")

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert first == second
    granted, stride = first
    assert stride == MAX_STRIDE
    assert granted - at <= stride + 1


def test_ranks_that_have_made_other_numbers_of_optimizer_steps_are_told_so_at_one_boundary() -> None:
    """One of them has caught an error in its forward pass, and left the step out."""
    store, name = c10d.HashStore(), uuid.uuid4().hex

    def rank(number: int) -> tuple[int, str]:
        own = c10d.PrefixStore(name, store)
        intent = StepAgreement(c10d.ProcessGroupGloo(own, number, 2, timedelta(seconds=30)))
        for boundary in range(4 * MAX_STRIDE):
            skipped = number == 1 and boundary >= 5
            try:
                intent.at_boundary(StepRequest(updates=boundary + 1 - skipped))
            except LoopError as e:
                return boundary, str(e)
        raise AssertionError("never told")

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert first == second
    assert 5 < first[0] <= 5 + MAX_STRIDE + 1
    assert "a rank has left a step out" in first[1]


def test_places_of_a_replica_may_make_other_numbers_of_optimizer_steps_and_replicas_may_not() -> None:
    store, name = c10d.HashStore(), uuid.uuid4().hex

    def rank(number: int, made: int) -> str:
        own = c10d.PrefixStore(f"{name}-{made}", store)
        group = c10d.ProcessGroupGloo(own, number, 4, timedelta(seconds=30))
        intent = StepAgreement(group, model_rank=number % 2, model_size=2)
        try:
            for boundary in range(1, 9):
                intent.at_boundary(StepRequest(updates=boundary * (2 - number % 2) - (made if number == 3 else 0)))
        except LoopError as e:
            return str(e)
        intent.finish()
        return ""

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rank, range(4), [0] * 4)) == [""] * 4
        said = set(pool.map(rank, range(4), [1] * 4))
    assert len(said) == 1
    assert "optimizer steps" in said.pop()
