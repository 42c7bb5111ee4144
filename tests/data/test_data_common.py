"""What is compared of a few samples, and how they are read."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from everstep.data import Shard, ShardedDataset, Stream
from everstep.data.common import differ, facts_of, is_comparable, places, read_samples, sketch


class Of(Dataset[Any]):
    def __init__(self, make: Any, length: int = 10) -> None:
        self._make, self._length = make, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


@dataclass
class Pair:
    x: np.ndarray[Any, Any]
    y: int


def image(shade: int) -> Any:
    image_of = pytest.importorskip("PIL.Image")
    return image_of.new("RGB", (4, 4), (shade, 2, 3))


SAMPLES: dict[str, Any] = {
    "tensor": lambda k: torch.full((3,), k, dtype=torch.uint8),
    "floats": lambda k: torch.randn(5, 7, generator=torch.Generator().manual_seed(k)),
    "half": lambda k: torch.randn(64, generator=torch.Generator().manual_seed(k)).bfloat16(),
    "complex": lambda k: torch.randn(4, dtype=torch.complex64, generator=torch.Generator().manual_seed(k)),
    "array": lambda k: np.arange(3) + k,
    "float": lambda k: 1.0 + k / 1000,
    "number": lambda k: k,
    "text": lambda k: f"text {k}",
    "bytes": lambda k: bytes([k]),
    "nested": lambda k: {"a": [1, (2, None, k)], "b": torch.zeros(2)},
    "label beside a large image": lambda k: (torch.ones(3, 64, 64), float(k)),
    "dataclass": lambda k: Pair(np.zeros(2), k),
    "set": lambda k: {f"a{k}", "b", "c"},
    "image": image,
    "sparse": lambda k: torch.eye(3).to_sparse() * k,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_of_each_kind_are_told_apart(name: str) -> None:
    one, same, other = (sketch(SAMPLES[name](k)) for k in (1, 1, 2))
    assert not one[1]
    assert not differ(one[0], same[0])
    assert differ(one[0], other[0])


def test_last_bits_of_floating_point_values_are_not_compared() -> None:
    x = torch.randn(3, 224, 224, generator=torch.Generator().manual_seed(0))
    assert not differ(sketch(x)[0], sketch(x * (1 + 1e-6) + 1e-7 * torch.randn_like(x))[0])
    assert differ(sketch(x)[0], sketch(x.flip(0))[0])
    assert differ(sketch(x)[0], sketch(x.double())[0])


def test_objects_without_a_stable_content_are_left_out_and_named() -> None:
    one, left_out = sketch((1, object()))
    assert left_out == {"object"}
    assert not differ(one, sketch((1, object()))[0])
    assert differ(one, sketch((2, object()))[0])


def test_sample_that_draws_is_read_under_one_seed_and_the_generators_stay() -> None:
    def drawn(index: int) -> Any:
        return index, torch.rand(3), np.random.rand(), random.random()

    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    one = read_samples(Of(drawn))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    torch.manual_seed(6)
    again = read_samples(Of(drawn))
    assert sorted(one) == places(Of(drawn), 10)
    assert not any(differ(one[i], again[i]) for i in one)


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_read_the_same_and_this_process_opens_nothing_then(workers: int, tmp_path: Path) -> None:
    opened = tmp_path / "opened"

    def read(index: int) -> Any:
        with opened.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return torch.rand(2), index

    found = read_samples(
        Of(read), num_workers=2 * workers, multiprocessing_context="fork" if workers else None
    )  # more than one worker reads no faster
    readers = set(opened.read_text().split())
    assert len(readers) == 1
    assert (str(os.getpid()) in readers) is (workers == 0)
    plain = read_samples(Of(lambda index: (torch.rand(2), index)))
    assert not any(differ(found[i], plain[i]) for i in plain)


def test_sample_that_is_another_each_time_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    assert read_samples(Of(lambda index: time.perf_counter_ns())) == {}
    assert "not the same when it is read twice under one seed" in caplog.text


def test_sample_that_cannot_be_read_is_left_to_the_training(caplog: pytest.LogCaptureFixture) -> None:
    def broken(index: int) -> int:
        if index == 9:
            raise OSError("a damaged file")
        return index

    assert 9 not in read_samples(Of(broken))
    assert "a damaged file" in caplog.text


def test_sample_of_each_part_is_read() -> None:
    parts = [TensorDataset(torch.arange(100)) for _ in range(3)]
    assert {50, 150, 250} <= set(places(ConcatDataset(parts), 300))
    assert {0, 299} <= set(places(ConcatDataset(parts), 300))


@pytest.mark.parametrize(
    "held", [np.arange(3), torch.arange(3), 3, [Path("a"), Path("b")], {"train": 1}, "texts", [1, 2], Path("a")]
)
def test_dataset_of_a_script_may_have_what_it_likes_under_the_names_that_torch_uses(held: Any) -> None:
    for name in ("dataset", "datasets"):
        mine: Any = Of(int)
        setattr(mine, name, held)
        assert is_comparable(mine)
        assert sorted(read_samples(mine)) == places(Of(int), 10)


def test_datasets_that_refer_to_each_other_are_probed() -> None:
    one, other = Of(int), Of(int)
    one.dataset, other.dataset = other, one  # type: ignore[attr-defined]
    assert is_comparable(one)


def test_facts_of_long_texts_and_numbers_take_no_time_and_tell_a_change() -> None:
    mine: Any = Of(int)
    mine.text, mine.number = "x" * 10**7, 10**5000
    before = facts_of(mine)
    assert max(map(len, before.values())) < 20_000
    mine.text += "x"
    assert facts_of(mine) != before


def test_what_is_read_forward_or_by_shards_is_not_probed() -> None:
    shards = ShardedDataset([Shard("a", 3)], lambda name: [1, 2, 3])
    assert not is_comparable(shards)
    assert not is_comparable(Subset(shards, [0]))  # type: ignore[arg-type]
    assert not is_comparable(Stream([1, 2], 2))
    assert is_comparable(Subset(Of(int), [0]))
