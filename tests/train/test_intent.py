"""What two ranks agree on between their steps."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from everstep.train.intent import MAX_STRIDE, Intent, Wish


def test_a_wish_for_a_save_that_lasts_until_it_is_granted_is_granted_once_and_at_one_boundary_on_all_ranks() -> None:
    """A rank wishes by its clock, which is set back by the save: at the boundary that grants it, it still wishes."""
    store, name = c10d.HashStore(), uuid.uuid4().hex

    def rank(number: int) -> list[int]:
        own = c10d.PrefixStore(name, store)
        intent = Intent(c10d.ProcessGroupGloo(own, number, 2, timedelta(seconds=30)))
        saved: list[int] = []
        for boundary in range(6 * MAX_STRIDE):
            wishes = number == 0 and len(saved) < 1 + (boundary >= 3 * MAX_STRIDE)
            if intent.at_boundary(Wish(save=wishes)).save:
                saved.append(boundary)
        intent.settle()
        return saved

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert first == second
    assert len(first) == 2
    assert first[0] < 3 * MAX_STRIDE <= first[1]
