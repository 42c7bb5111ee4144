"""What can only be read forward: each sample once at any world size, from positions that prove themselves."""

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from everstep.data import DataError, DatasetUnusable, ElasticLoader, Stream, sample_rng
from everstep.data.errors import LoaderUnusable
from everstep.data.plan.assignment import World
from everstep.data.takeover import TakenOver

N = 300


class Plain:
    """No position of its own; counts what is read. Draws from the global generators, and from one of its own."""

    read = 0

    def __init__(self, n: int = N) -> None:
        self.n = n
        self.rng = random.Random(3)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.rng.seed(epoch)

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.n):
            Plain.read += 1
            assert get_worker_info() is None
            yield [i, self.epoch, self.rng.randrange(1000), random.randrange(1000), int(torch.randint(1000, ()))]


class Shards(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


def hub(shuffled: bool = False) -> Any:
    from datasets import Dataset as HubDataset  # noqa: PLC0415 - seconds

    found = HubDataset.from_dict({"id": list(range(N))}).to_iterable_dataset(num_shards=6)
    return found.shuffle(seed=4, buffer_size=50) if shuffled else found


def stateful() -> Any:
    return StatefulDataLoader(list(range(N)), batch_size=None)


SOURCES = {
    "plain": Plain,
    "datasets": hub,
    "datasets, shuffled": lambda: hub(True),
    "torchdata": stateful,
    "iterable": Shards,
}


def ids(batch: Any) -> list[Any]:
    return [s["id"] if isinstance(s, dict) else int(s) if not isinstance(s, list) else tuple(s) for s in batch]


def loader(kind: str, **options: Any) -> ElasticLoader:
    return ElasticLoader(Stream(SOURCES[kind](), N, every=32), global_batch=14, collate_fn=ids, **options)


@pytest.mark.long_but("plain")
@pytest.mark.parametrize("kind", SOURCES)
def test_every_sample_once_in_one_order_at_any_world_size_and_from_any_position(kind: str) -> None:
    both = loader(kind)
    alone = [b.data for _ in range(2) for b in both]
    each = N // 14 + 1
    assert len({s for b in alone[:each] for s in b}) == len({s for b in alone[each:] for s in b}) == N
    ranks = [loader(kind, rank=r, world_size=3, num_workers=r) for r in range(3)]
    at, states = 0, [ranks[0].state_dict()]
    for world in (3, 2, 4):
        while len(ranks) > world:
            ranks.pop().close()
        for r, one in enumerate(ranks):
            one.reshard(r, world)
        while len(ranks) < world:
            ranks.append(loader(kind, rank=len(ranks), world_size=world))
            ranks[-1].load_state_dict(json.loads(json.dumps(states[0])))
        for batches in islice(zip(*ranks, strict=True), 7):
            assert [s for b in batches for s in b.data[: b.count]] == alone[at]
            at += 1
            for one in ranks:
                one.acknowledge()
        states = [one.state_dict() for one in ranks]
        for state in states:
            assert state == states[0]
    for one in ranks:
        one.close()


@pytest.mark.parametrize("kind", ["datasets", "torchdata"])
def test_new_process_goes_on_from_the_sources_own_position(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loader(kind)
    wanted = [b.data for b in islice(first, 20)]
    first.rewind()
    state = first.state_dict()
    assert state["stream"]["index"] >= state["index"] - 32 - 16 - 14
    after = loader(kind)
    after.load_state_dict(state)
    begun: list[int] = []
    stream = after.dataset
    advance = stream._advance

    def count() -> Any:
        begun.append(stream._next)
        return advance()

    monkeypatch.setattr(stream, "_advance", count)
    assert next(iter(after)).data == wanted[19]
    assert begun[0] == state["stream"]["index"]


def test_position_that_does_not_lead_back_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    first = loader("datasets, shuffled")
    wanted = [b.data for b in islice(first, 20)]
    first.rewind()
    after = loader("datasets, shuffled")
    after.load_state_dict(first.state_dict())
    assert next(iter(after)).data == wanted[19]
    assert "the stream is read from the front" in caplog.text


def test_other_samples_than_were_trained_on_are_refused() -> None:
    class Other(Plain):
        def __iter__(self) -> Iterator[Any]:
            return iter([i * 2, 0, 0, 0, 0] for i in range(self.n))

    first = loader("plain")
    list(islice(first, 10))
    first.rewind()
    Other.__qualname__ = Plain.__qualname__
    after = ElasticLoader(Stream(Other(), N, every=32), global_batch=14, collate_fn=ids)
    after.load_state_dict(first.state_dict())
    with pytest.raises(DatasetUnusable, match="are not those that were trained on when the run was saved"):
        next(iter(after))


def test_transform_is_called_for_own_samples_under_their_own_seed() -> None:
    calls: list[int] = []

    def draw(sample: Any) -> tuple[int, int]:
        calls.append(sample)
        return sample, int(sample_rng().integers(10**6))

    found = []
    for world in (1, 3):
        got: dict[int, int] = {}
        for r in range(world):
            calls.clear()
            data = Stream(Shards(), N, transform=draw)
            for b in ElasticLoader(data, global_batch=30, rank=r, world_size=world, collate_fn=list):
                got.update(b.data)
            assert len(calls) == N // world
        found.append(got)
    assert found[0] == found[1]


def test_default_collate_and_pinning_see_only_the_samples() -> None:
    batch = next(iter(ElasticLoader(Stream(Shards(), N), global_batch=4)))
    assert torch.equal(batch.data, torch.arange(4))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Stream(iter([1]), 1), DataError, "an iterator can be read once"),
        (lambda: Stream(3, 1), DataError, "something that can be iterated"),
        (lambda: Stream([1], 0), DataError, "length=0"),
        (lambda: Stream([1], 1.0), DataError, r"Stream\(length\)=1\.0: a whole number is expected"),  # type: ignore[arg-type]
        (
            lambda: ElasticLoader(Shards(), global_batch=1),
            DatasetUnusable,
            r"pass everstep\.data\.Stream\(dataset, leng",
        ),
        (lambda: ElasticLoader(Stream([1], 1), global_batch=1, shuffle=True), DataError, "shuffle= with a Stream"),
        (
            lambda: list(ElasticLoader(Stream([1, 2], 3), global_batch=3)),
            DatasetUnusable,
            "the source ended after 2.*If oth",
        ),
        (lambda: list(ElasticLoader(Stream([1, 2, 3], 2), global_batch=2)), DatasetUnusable, "the source has more"),
        (
            lambda: TakenOver(DataLoader(Shards()), ranks=1, world=World(0, 1)),
            LoaderUnusable,
            r"Shards is an IterableDataset.*everstep.data.Stream\(dataset, length\)",
        ),
    ],
)
def test_what_is_no_stream_is_refused_with_the_fix(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


class Broken:
    """Cannot be read at its third sample."""

    def __iter__(self) -> Iterator[int]:
        yield from (0, 1)
        raise OSError("bad block")


def test_error_of_the_source_says_of_which_and_where() -> None:
    with pytest.raises(OSError, match="bad block") as found:
        list(ElasticLoader(Stream(Broken(), 4), global_batch=1))
    assert "raised by the source of Stream(Broken, length=4), for its sample 2 of epoch 0" in found.value.__notes__
