"""The digest of a tensor on an accelerator, computed here on the CPU: the same function of the same bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.recovery.digests import CHUNK, reduced

KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool,
         torch.complex64, torch.complex128, torch.float8_e4m3fn]  # fmt: skip


def digest(tensor: torch.Tensor, chunk: int = CHUNK) -> list[int]:
    found: list[int] = reduced(tensor, chunk).tolist()
    return found


def bits(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().view(torch.uint8).reshape(-1).tolist()
    return found


@given(
    st.lists(st.integers(-3, 3) | st.floats(width=32, allow_nan=False), min_size=2, max_size=24).flatmap(
        lambda values: st.tuples(st.just(values), st.permutations(values))
    ),
    st.sampled_from(KINDS), st.sampled_from([2, 3, 7, CHUNK]),
)  # fmt: skip
def test_any_permutation_of_unequal_elements_changes_the_digest(
    orders: tuple[list[float], list[float]], kind: torch.dtype, chunk: int
) -> None:
    """A chunk that is shorter than the tensor: across its borders, too."""
    a, b = (torch.tensor(values, dtype=torch.float64).to(kind) for values in orders)
    assert (digest(a, chunk) == digest(b, chunk)) == (bits(a) == bits(b))


@given(st.permutations(range(9)), st.sampled_from([1, 5, 64, 100]))
def test_rows_in_another_order_have_another_digest(order: list[int], width: int) -> None:
    rows = torch.arange(9 * width, dtype=torch.float32).view(9, width)
    for chunk in (32, 128, CHUNK):
        assert (digest(rows[order], chunk) == digest(rows, chunk)) == (list(order) == list(range(9)))


def test_elements_that_change_places_are_seen_across_the_border_of_real_chunks() -> None:
    tensor = torch.zeros(2 * CHUNK + 5)
    before = digest(tensor)
    assert len(before) == 3
    seen = [before]
    for place in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 4):
        one = tensor.clone()
        one[place] = 1.0
        seen.append(digest(one))
    assert len({tuple(found) for found in seen}) == len(seen)


@pytest.mark.parametrize("change", [1.0, -0.0, math.inf, 2.0**-149])
def test_one_changed_number_is_seen_wherever_it_is(change: float) -> None:
    """Zero with a sign is the highest bit alone, for which the weights have to be odd enough."""
    base = torch.zeros(257)
    for place in range(257):
        one = base.clone()
        one[place] = change
        assert digest(one) != digest(base)


@given(st.sampled_from(KINDS), st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
def test_equal_tensors_have_equal_digests_whatever_their_strides(
    kind: torch.dtype, rows: int, columns: int, offset: int
) -> None:
    values = torch.arange(rows * columns, dtype=torch.float64).view(rows, columns).to(kind)
    turned: Any = values.t().contiguous().t()
    gaps = torch.zeros(rows, 2 * columns + offset, dtype=kind)[:, offset : offset + 2 * columns : 2].copy_(values)
    shifted = torch.zeros(offset + rows * columns, dtype=kind)[offset:].copy_(values.view(-1)).view(rows, columns)
    for same in (turned, gaps, shifted):
        assert digest(same, 4) == digest(values, 4)


def test_conjugated_and_negated_views_are_digested_by_their_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert digest(values.conj()) == digest(values.conj().resolve_conj()) != digest(values)
    assert digest(values.conj().imag) == digest(values.conj().resolve_conj().imag.contiguous())


def test_an_empty_tensor_has_a_digest() -> None:
    assert digest(torch.empty(0, 3)) == []
    assert digest(torch.tensor(7.0)) != digest(torch.tensor(8.0))
