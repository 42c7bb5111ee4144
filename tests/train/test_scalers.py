"""Gradient scalers of the ranks of one replica, compared after each step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from everstep.recovery.errors import LoopError
from everstep.recovery.state.scalers import Scales


def scaler(*, overflows: bool = False) -> torch.amp.GradScaler:
    """After one step."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    made = torch.amp.GradScaler("cpu", init_scale=4.0)
    made.scale(weight.sum()).backward()
    if overflows:
        assert weight.grad is not None
        weight.grad.fill_(torch.inf)
    made.step(optimizer)
    made.update()
    return made


def compared(*ranks: Scales) -> list[str]:
    """What each rank is refused with after a step; "" of one that goes on."""
    told: list[Any] = [None] * len(ranks)
    here = threading.Barrier(len(ranks))
    said = [""] * len(ranks)

    def run(rank: int) -> None:
        def gather(values: Sequence[int]) -> list[tuple[int, ...]]:
            told[rank] = tuple(values)
            here.wait(30)
            found = list(told)
            here.wait(30)
            return found

        ranks[rank].ended()
        try:
            ranks[rank].check(7, gather)
        except LoopError as e:
            said[rank] = str(e)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_scaler_that_left_a_step_out_on_one_place_is_refused_on_all_ranks() -> None:
    good, bad = {"scaler": scaler()}, {"scaler": scaler(overflows=True)}
    said = compared(Scales(good, 2), Scales(good, 2), Scales(good, 2), Scales(bad, 2))
    assert len(set(said)) == 1
    assert "after step 7" in said[0]
    assert "rank 2: 4, rank 3: 2" in said[0]
    assert "ShardedGradScaler" in said[0]


def test_scalers_that_left_the_step_out_together_go_on() -> None:
    bad = [{"scaler": scaler(overflows=True)} for _ in range(2)]
    assert compared(*(Scales(one, 2) for one in bad)) == ["", ""]


def test_place_without_a_scaler_is_compared_with_nobody() -> None:
    assert compared(Scales({"scaler": scaler()}, 2), Scales({}, 2)) == ["", ""]


@pytest.mark.parametrize("states", [({}, {}), ({"scaler": scaler()},) * 2])
def test_world_without_scalers_meets_once_and_one_with_them_in_each_step(states: Sequence[dict[str, Any]]) -> None:
    ranks = [Scales(state, 2) for state in states]
    assert compared(*ranks) == ["", ""]
    met: list[object] = []
    for rank, state in zip(ranks, states, strict=True):
        rank.ended()
        meet: Any = lambda values, state=state: [met.append(state), tuple(values)][1:] * 2  # noqa: E731
        rank.check(8, meet)
    assert len(met) == sum(map(len, states))


def test_replicas_without_places_meet_for_nothing() -> None:
    one = Scales({"scaler": scaler()}, 1)
    one.ended()
    one.check(1, lambda values: pytest.fail(f"gathers {values}"))
