"""A constant that is written to again is no constant that moves; a change that a sample of the bytes misses is seen."""

from __future__ import annotations

import torch

from everstep.train.guards.script_objects import Held
from everstep.train.guards.untracked.change_marks import HEAD, SPREAD
from everstep.train.guards.untracked.verdicts import Seen, look

ELEMENTS = 4 * (HEAD + SPREAD)


def moved(tensor: torch.Tensor, first: dict[str, Seen]) -> bool:
    now = look([Held("mask", tensor)], first)["mask"]
    return first["mask"].moved_to(now)


def test_constant_that_is_broadcast_again_does_not_move() -> None:
    tensor, first = torch.arange(ELEMENTS).float(), dict[str, Seen]()
    for _ in range(4):
        assert not moved(tensor, first)
        tensor.copy_(tensor.clone())


def test_write_that_the_sample_misses_is_seen_from_the_second_on() -> None:
    tensor, first = torch.zeros(ELEMENTS), dict[str, Seen]()
    unseen = HEAD // 4 + 1  # the element behind the first of the spread
    seen = []
    for value in range(1, 4):
        seen.append(moved(tensor, first))
        tensor[unseen] = value
    assert seen == [False, False, True]


def test_write_that_the_sample_meets_is_seen_at_once() -> None:
    tensor, first = torch.zeros(ELEMENTS), dict[str, Seen]()
    assert not moved(tensor, first)
    tensor[0] = 1
    assert moved(tensor, first)


def test_small_tensor_is_looked_at_whole() -> None:
    tensor, first = torch.zeros(8), dict[str, Seen]()
    assert not moved(tensor, first)
    tensor.data[7] = 1
    assert moved(tensor, first)
