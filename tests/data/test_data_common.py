"""What is compared of a few samples, and how they are read."""

from __future__ import annotations

import json
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

from everstep.data import ElasticLoader, Shard, ShardedDataset, Stream
from everstep.data.common import facts_of, is_comparable, read_samples, sampled_indices
from everstep.data.sketches import differ, sketch, stored


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


def noisy(x: torch.Tensor, seed: int, relative: float = 1e-7) -> torch.Tensor:
    """As another processor may compute it: each element by its own last bits, and by those of the largest one."""
    drawn = torch.randn(2, *x.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x.double() * (1 + relative * drawn[0]) + relative * x.abs().max() * drawn[1]).to(x.dtype)


HONEST: dict[str, torch.Tensor] = {
    "image": torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(0)),
    "edges of decades": torch.tensor([1.0, 10.0, 100.0, 1e-3, 1000.0]),
    "spectrum": torch.fft.rfft(torch.randn(400, generator=torch.Generator().manual_seed(1))),
    "power of a quiet spectrum": torch.logspace(-9, 3, 80),
    "boxes": torch.tensor([[10.0, 20.0, 10.5, 400.0]]),
    "rotation": torch.tensor([[0.6, -0.8, 1e-8], [0.8, 0.6, -2e-8], [3e-8, 0.0, 1.0]]),
    "single precision, kept in double": torch.randn(300, generator=torch.Generator().manual_seed(2)).double(),
    "huge": torch.full((20,), 1e300, dtype=torch.float64),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_another_processor_computes_is_the_same_sample(name: str) -> None:
    x = torch.view_as_real(HONEST[name]) if HONEST[name].is_complex() else HONEST[name]
    for seed in range(40):
        assert not differ(sketch(x)[0], sketch(noisy(x, seed))[0]), seed


def test_what_decodes_to_the_next_of_256_shades_is_the_same_image() -> None:
    shades = torch.randint(0, 256, (3, 64, 64), generator=torch.Generator().manual_seed(0))
    moved = shades + (torch.rand(shades.shape, generator=torch.Generator().manual_seed(1)) < 0.01)
    assert not differ(sketch(shades / 255)[0], sketch(moved.clamp(max=255) / 255)[0])


APART: dict[str, tuple[list[float], list[float]]] = {
    "one large column": ([1e9, 0.1, 0.2], [1e9, 0.1, 0.3]),
    "two magnitudes": ([1e9, 3e5, 0.1], [1e9, 3e5, 0.10001]),
    "nothing beside something": ([1e9, 0.0, 1.0], [1e9, 1e-4, 1.0]),
    "no number beside one": ([1e9, float("nan")], [1e9, 3.0]),
    "infinite": ([float("inf"), 1.0], [float("-inf"), 1.0]),
    "a row of 100 columns": ([1e9, *[1.0] * 98, 0.5], [1e9, *[1.0] * 98, 0.51]),
    "a row as long as an image": ([1e6, *[1.0] * 900, *[0.5] * 99], [1e6, *[1.0] * 900, *[0.6] * 99]),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", range(3))
def test_large_element_hides_no_small_one(name: str, dtype: torch.dtype, place: int) -> None:
    one, other = (sketch(torch.tensor(values, dtype=dtype).roll(place))[0] for values in APART[name])
    assert differ(one, other)
    assert differ(other, one)
    assert differ(one, stored(json.loads(json.dumps(other))))
    assert not differ(one, stored(json.loads(json.dumps(one))))


def test_time_stamp_in_double_precision_that_moves_by_a_second_hides_no_feature() -> None:
    one, other = ([1_764_000_000.0 + k, 0.1 + k] for k in (0, 1))
    assert differ(sketch(np.array(one))[0], sketch(np.array(other))[0])


def test_row_of_many_numbers_is_compared_to_its_end() -> None:
    one, other = [[float(k) for k in range(200)] for _ in range(2)]
    other[199] = 0.5
    assert differ(sketch(one)[0], sketch(other)[0])


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
    assert sorted(one) == sampled_indices(Of(drawn), 10)
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


@pytest.mark.long_but("False")
@pytest.mark.parametrize("begun", [False, True])
def test_reading_disturbs_no_worker_that_reads_from_the_same_open_file(begun: bool, tmp_path: Path) -> None:
    """A file that the dataset opened before its one worker was forked has one position for all processes."""
    (tmp_path / "numbers").write_bytes(bytes(range(200)))
    with (tmp_path / "numbers").open("rb", buffering=0) as file:

        def read(index: int) -> int:
            file.seek(index)
            time.sleep(0.005)  # another process that moves the position does so here
            return file.read(1)[0]

        loader = ElasticLoader(
            Of(read, 200), global_batch=4, shuffle=False, rank=0, world_size=1, num_workers=1,
            multiprocessing_context="fork", prefetch_factor=8,
        )  # fmt: skip
        batches = iter(loader)
        got = next(batches).data.tolist() if begun else []
        sketches = loader.sketches()
        got += [one for batch in batches for one in batch.data.tolist()]
    assert got == list(range(200))
    alone = read_samples(Of(lambda index: index, 200))
    assert sketches.keys() == alone.keys()
    assert not any(differ(sketches[i], alone[i]) for i in alone)


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
    assert {50, 150, 250} <= set(sampled_indices(ConcatDataset(parts), 300))
    assert {0, 299} <= set(sampled_indices(ConcatDataset(parts), 300))


@pytest.mark.parametrize(
    "held", [np.arange(3), torch.arange(3), 3, [Path("a"), Path("b")], {"train": 1}, "texts", [1, 2], Path("a")]
)
def test_dataset_of_a_script_may_have_what_it_likes_under_the_names_that_torch_uses(held: Any) -> None:
    for name in ("dataset", "datasets"):
        mine: Any = Of(int)
        setattr(mine, name, held)
        assert is_comparable(mine)
        assert sorted(read_samples(mine)) == sampled_indices(Of(int), 10)


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
