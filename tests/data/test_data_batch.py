"""`Batch.to`: every tensor of a batch on the device, whatever holds it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everstep.data import ElasticLoader
from everstep.data.batch import Batch, Weight


class Pair(NamedTuple):
    x: Any
    y: Any


class Encoding(dict[str, Any]):
    """Has a `to` of its own, as Hugging Face's batches."""

    def to(self, device: Any) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()})


def moved(data: Any) -> Any:
    batch = Batch(data, 0, 0, np.arange(2), 2, 2, Weight(1.0))
    found = batch.to("meta")
    assert (found.weight, found.count, found.last) == (1.0, 2, True)
    return found.data


def test_tensors_are_moved_in_whatever_holds_them() -> None:
    one = torch.zeros(2)
    assert moved(one).device.type == "meta"
    assert isinstance(pair := moved(Pair(one, [one])), Pair)
    assert pair.x.device.type == pair.y[0].device.type == "meta"
    found = moved({"a": (one, "text", 3), "b": None})
    assert found["a"][0].device.type == "meta"
    assert found["a"][1:] == ("text", 3)
    assert found["b"] is None
    assert isinstance(encoded := moved(Encoding(ids=one)), Encoding)
    assert encoded["ids"].device.type == "meta"


def test_the_batch_that_is_moved_stays_where_it_was() -> None:
    batch = Batch([torch.zeros(1)], 0, 0, np.arange(1), 1, 1, Weight(1.0))
    batch.to("meta")
    assert batch.data[0].device.type == "cpu"


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    global_batch=st.integers(1, 16),
    micro=st.none() | st.integers(1, 5),
    drop_last=st.booleans(),
    sizes=st.sets(st.integers(1, 5), min_size=1),
)
def test_weights_are_needed_where_some_batch_in_some_world_has_one_that_is_not_1(
    n: int, global_batch: int, micro: int | None, drop_last: bool, sizes: set[int]
) -> None:
    assume(global_batch <= n or not drop_last)
    assume(max(sizes) <= min(n, global_batch))
    options: dict[str, Any] = {"global_batch": global_batch, "micro_batch": micro, "drop_last": drop_last}
    weights = {
        batch.weighing.value
        for size in sizes
        for rank in range(size)
        for batch in ElasticLoader(range(n), rank=rank, world_size=size, **options)
    }
    loader = ElasticLoader(range(n), rank=0, world_size=1, **options)
    assert loader.needs_weights(sizes) == (weights != {1.0})


def test_who_reads_a_weight_or_scales_by_it_has_asked_for_it_also_on_another_device() -> None:
    batch = Batch(torch.ones(2), 0, 0, np.arange(2), 2, 3, Weight(2 / 3))
    moved = batch.to("cpu")
    assert not batch.weighing.read
    assert moved.scale(3.0) == 2.0
    assert batch.weighing.read
