"""`Batch.to`: every tensor of a batch on the device, whatever holds it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from everstep.data.batch import Batch


class Pair(NamedTuple):
    x: Any
    y: Any


class Encoding(dict[str, Any]):
    """Has a `to` of its own, as Hugging Face's batches."""

    def to(self, device: Any) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()})


def moved(data: Any) -> Any:
    batch = Batch(data, 0, 0, np.arange(2), 2, 2, 1.0)
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
    batch = Batch([torch.zeros(1)], 0, 0, np.arange(1), 1, 1, 1.0)
    batch.to("meta")
    assert batch.data[0].device.type == "cpu"
