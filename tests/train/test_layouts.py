"""Tensors of every layout of torch: compared right, put back right, and refused by name where a commit would hold them.

A row for each layout, made of the same numbers."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.state.alike import bytes_of_each, first_bytes
from everstep.checkpoint.state.capture import capture
from everstep.recovery.digests import content
from everstep.recovery.errors import LoopError
from everstep.recovery.rollback.tracked_objects import Module
from everstep.train.coordination.structure import StructureCheck
from everstep.train.guards.plain_values import untracked_values
from everstep.train.guards.replicas import Replicas

DENSE = torch.tensor([[1.0, 0, 2, 0], [0, 0, 3, 4]])


def nested(layout: torch.layout) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda d: torch.nested.nested_tensor([d[:, :3], d[:1, :3]], layout=layout)


# Each: how it is made, and a word of what a person is told to write instead.
LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "coo": (lambda d: d.to_sparse(), r"to_dense\(\)"),
    "csr": (lambda d: d.to_sparse_csr(), r"to_dense\(\)"),
    "csc": (lambda d: d.to_sparse_csc(), r"to_dense\(\)"),
    "bsr": (lambda d: d.to_sparse_bsr((1, 2)), r"to_dense\(\)"),
    "bsc": (lambda d: d.to_sparse_bsc((1, 2)), r"to_dense\(\)"),
    "mkldnn": (lambda d: d.to_mkldnn(), r"to_dense\(\)"),
    "nested": (nested(torch.strided), r"values\(\)"),
    "jagged": (nested(torch.jagged), r"values\(\)"),
    "per tensor": (lambda d: torch.quantize_per_tensor(d, 0.1, 3, torch.qint8), r"dequantize\(\)"),
    "per channel": (
        lambda d: torch.quantize_per_channel(d, torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8),
        r"dequantize\(\)",
    ),
}
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "complex": lambda d: torch.complex(d, -d),
    "conj": lambda d: torch.complex(d, -d).conj(),
    "neg": lambda d: torch.complex(d, -d).conj().imag,
    "transposed": lambda d: d.t(),
    "expanded": lambda d: d[:1].expand(3, 4),
    "0 dimensions": lambda d: d[0, 0],
    "empty": lambda d: d[:0],
}
EACH = {**{name: make for name, (make, _) in LAYOUTS.items()}, **VIEWS}
META = (lambda d: d.to("meta"), "to_empty")


@pytest.fixture(autouse=True)
def _prototypes() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(beta|prototype|deprecated).*")
        yield


def changed() -> torch.Tensor:
    other = DENSE.clone()
    other[0, 0] = 7
    return other


class Holder(torch.nn.Module):
    mask: torch.Tensor

    def __init__(self, buffer: torch.Tensor, *, persistent: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.register_buffer("mask", buffer, persistent=persistent)


@pytest.mark.parametrize("name", EACH)
def test_digests_are_equal_exactly_for_equal_tensors(name: str) -> None:
    make = EACH[name]
    one, same, other = make(DENSE), make(DENSE.clone()), make(changed())
    most = bytes_of_each([one])
    assert bytes(first_bytes(one, most)) == bytes(first_bytes(same, most))
    assert content(one) == content(same)
    if name != "empty":
        assert bytes(first_bytes(one, most)) != bytes(first_bytes(other, most))
        assert content(one) != content(other)


def test_what_is_stored_twice_and_in_another_order_is_one_sparse_tensor() -> None:
    one = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([3.0, 1]), (4,))
    other = torch.sparse_coo_tensor(torch.tensor([[2, 0, 2]]), torch.tensor([0.5, 3, 0.5]), (4,))
    assert content(one) == content(other)
    elsewhere = torch.sparse_coo_tensor(torch.tensor([[0, 3]]), torch.tensor([3.0, 1]), (4,))
    assert content(one) != content(elsewhere)


def test_quantized_tensors_with_equal_integers_and_another_scale_differ() -> None:
    fine, coarse = (torch.quantize_per_tensor(DENSE * s, s, 0, torch.qint8) for s in (1.0, 0.5))
    assert torch.equal(fine.int_repr(), coarse.int_repr())
    assert content(fine) != content(coarse)


@pytest.mark.parametrize("name", EACH)
def test_a_buffer_that_a_failed_step_has_changed_is_put_back(name: str) -> None:
    make = EACH[name]
    module = Holder(make(DENSE.clone()))
    rollback = Module("model", module)
    for _ in range(2):  # the second one has earlier copies to write into
        rollback.look()
        rollback.begin()
    before = content(module.mask)
    if name in ("jagged", "expanded"):
        module.mask = make(changed())  # by another, because torch writes to neither
    elif name in ("csr", "csc", "bsr", "bsc"):
        module.mask.copy_(make(changed()))
    elif name in LAYOUTS:
        module.mask.data = make(changed())
    else:
        module.mask.mul_(2)
    assert content(module.mask) != before or name == "empty"
    rollback.put_back()
    assert content(module.mask) == before


@pytest.mark.parametrize("name", EACH)
def test_ranks_compare_buffers_of_every_layout(name: str) -> None:
    """Two ranks whose buffers are equal pass; where one differs it is named."""
    make = EACH[name]

    def told(dense: torch.Tensor) -> list[int]:
        module = Holder(make(dense))
        replicas = Replicas({"model": module}, ())
        replicas._apart = [module]
        found: list[int] = []
        replicas._compare_buffers(lambda number: found.append(number) is None)
        return found

    assert told(DENSE) == told(DENSE.clone())
    assert told(DENSE) != told(changed()) or name == "empty"


@pytest.mark.parametrize("name", [*LAYOUTS, "meta"])
def test_a_buffer_that_no_commit_can_hold_is_refused_when_the_loop_begins(name: str) -> None:
    make, remedy = {**LAYOUTS, "meta": META}[name]
    with pytest.raises(LoopError, match=rf"^model\.mask is a .*which no commit can hold\. .*{remedy}"):
        StructureCheck({"model": Holder(make(DENSE), persistent=True)})
    with pytest.raises(LoopError, match=rf"^kept\.masks\.0 is a .*{remedy}"):
        StructureCheck({"kept": {"masks": [make(DENSE)]}})
    with pytest.raises(StateMismatch, match=rf"^kept/masks/0: a .* not supported in a checkpoint\. .*{remedy}"):
        capture({"kept": {"masks": [make(DENSE)]}}, 0)
    StructureCheck({"model": Holder(make(DENSE))})  # it is not saved


def test_a_buffer_that_torch_cannot_copy_is_refused_though_it_is_not_saved() -> None:
    with pytest.raises(LoopError, match=r"^model\.mask is a quantized torch\.quint4x2"):
        StructureCheck({"model": Holder(torch.quantize_per_tensor(DENSE, 0.5, 3, torch.quint4x2))})


@pytest.mark.parametrize("name", [*LAYOUTS, "meta"])
def test_what_is_not_dense_is_compared_unless_it_has_no_values_and_hides_no_other_value(name: str) -> None:
    make, _ = {**LAYOUTS, "meta": META}[name]
    held = {"without bytes": make(DENSE), "dense": DENSE.clone()}
    assert len(held) == 2
    found = untracked_values(sys._getframe(), {})
    assert "with digest" in found["held['dense']"]
    assert ("with digest" in found["held['without bytes']"]) == (name != "meta")
