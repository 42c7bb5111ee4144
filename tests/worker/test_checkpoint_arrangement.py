"""Arrangements are remembered, and never for another state than theirs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep.checkpoint.ranks import Alone
from everstep.checkpoint.save.snapshot import Arranger
from everstep.checkpoint.state.capture import Captured, apply, capture


class One(Alone):
    """One rank of a world of three that holds replicated state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.world_size = rank, 3


def state(width: int = 40) -> dict[str, Any]:
    torch.manual_seed(width)
    model = nn.Linear(width, width)
    return {"model": model, "t": torch.randn(width, 3, width).transpose(0, 2), "s": torch.tensor(1.5)}


def arranged(arranger: Arranger, captured: Captured, rank: int = 1) -> tuple[Any, dict[str, torch.Tensor]]:
    return arranger.arrange(captured, One(rank))


def assert_like_new(arranger: Arranger, captured: Captured, rank: int = 1) -> None:
    """The remembering arranger answers as one that remembers nothing."""
    found, views = arranged(arranger, captured, rank)
    right, new = arranged(Arranger(), captured, rank)
    assert found == right
    assert list(views) == list(new)
    assert all(torch.equal(views[k], new[k]) and views[k].stride() == new[k].stride() for k in new)


def test_second_save_uses_the_first_arrangement_with_the_new_values() -> None:
    arranger, live = Arranger(), state()
    first, _ = arranged(arranger, capture(live, 1))
    with torch.no_grad():
        live["model"].weight.add_(1)
        live["s"].fill_(2)
    assert arranged(arranger, capture(live, 1))[0] is first
    assert_like_new(arranger, capture(live, 1))


def test_parts_of_all_ranks_are_the_whole_state_also_when_remembered() -> None:
    live = state()
    seen = 0
    for rank in range(3):
        arranger = Arranger()
        arranged(arranger, capture(live, rank), rank)
        _, views = arranged(arranger, capture(live, rank), rank)
        seen += sum(v.numel() for v in views.values())
    assert seen == sum(t.numel() for t in capture(live, 0).tensors.values())


def test_buffers_of_modules_are_those_of_rank_0_and_parameters_are_shared_out() -> None:
    """Each rank's BatchNorm has its own, and DDP's next forward pass takes rank 0's."""
    written = []
    for rank in range(3):
        torch.manual_seed(0)
        live: dict[str, Any] = {"model": nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40)), "t": torch.arange(9)}
        live["model"][1].running_mean.fill_(rank)
        written.append(arranged(Arranger(), capture(live, rank), rank)[1])
    buffers = {f"model/1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert {name for name in written[0] if name in buffers} == buffers
    assert torch.equal(written[0]["model/1.running_mean"], torch.zeros(40))
    assert not any(name.startswith(tuple(buffers)) for other in written[1:] for name in other)
    assert all(any(name.startswith("model/0.weight") for name in views) for views in written)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(extra=torch.zeros(3)),
        lambda s: s.pop("s"),
        lambda s: s.update(s=torch.tensor(1)),
        lambda s: s.update(t=s["t"].contiguous()),
        lambda s: s.update(t=s["t"][:20]),
        lambda s: s.update(model=nn.Linear(40, 41)),
        lambda s: s.update(model=s["model"].state_dict()),  # no parameters any more
        lambda s: s.update(t=s["model"].weight),  # tied
        lambda s: s.update(t=torch.randn(40, 3, 40, dtype=torch.complex64).conj()),
    ],
)
def test_state_that_changed_is_arranged_anew(change: Callable[[dict[str, Any]], Any]) -> None:
    arranger, live = Arranger(), state()
    arranged(arranger, capture(live, 1))
    change(live)
    assert_like_new(arranger, capture(live, 1))
    assert_like_new(arranger, capture(live, 1))
    assert_like_new(arranger, capture(live, 2), 2)


class Masked(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("mask", torch.ones(1, 3).expand(4, 3))


def test_expanded_buffer_is_restored_though_torch_cannot_write_to_it() -> None:
    saved, into = Masked(), Masked()
    saved.mask = saved.mask * 2
    captured = capture({"model": saved}, 0)
    apply({"model": into}, {"state": captured.values}, captured.tensors, 0)
    assert torch.equal(into.mask, torch.full((4, 3), 2.0))  # type: ignore[arg-type]


def test_array_in_a_mapping_is_restored_in_its_place() -> None:
    """A script may have a name of its own for it."""
    own = np.zeros(3).reshape(1, 3)
    alone = np.zeros(2)
    captured = capture({"counts": {"seen": np.arange(3.0).reshape(1, 3)}, "alone": np.ones(2)}, 0)
    apply({"counts": {"seen": own}, "alone": alone}, {"state": captured.values}, captured.tensors, 0)
    assert (own.tolist(), alone.tolist()) == ([[0, 1, 2]], [1, 1])
