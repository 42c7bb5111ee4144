"""What a session trains on, in one process: DataLoaders of the script, several of them, and those iterated by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset, WeightedRandomSampler
from torch.utils.data import dataloader as torchs

import everstep
from everstep.data import Batch, ElasticLoader, ElasticSampler
from everstep.data.plan.assignment import World
from everstep.recovery.errors import LoopError
from everstep.train.feeding.feed import Feed, feed_of
from everstep.train.feeding.resharding import Resharding

DATA = TensorDataset(torch.arange(40.0))
OTHER = TensorDataset(torch.arange(100.0, 124.0))


def loader(data: Any = DATA, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=4, **options)


def play(folder: Path, body: Callable[[Any], Iterator[Any]]) -> list[Any]:
    """What a loop has yielded."""
    with everstep.start(str(folder / "commits"), every_steps=3) as run:
        return list(body(run))


def values(batch: Batch[Any]) -> list[float]:
    (x,) = batch.data
    found: list[float] = x.tolist()
    return found


# --- taken over


@pytest.mark.long
def test_a_dataloader_passed_to_steps_trains_each_sample_once_an_epoch_and_goes_on_where_it_was(tmp_path: Path) -> None:
    def until(steps: int) -> Callable[[Any], Iterator[float]]:
        def body(run: Any) -> Iterator[float]:
            for step in run.steps(loader(shuffle=True), until=steps):
                with step as batch:
                    yield from values(batch)

        return body

    torch.manual_seed(0)
    first = play(tmp_path, until(7))
    torch.manual_seed(1)
    assert sorted(first + play(tmp_path, until(10))) == list(range(40))


def test_epochs_are_those_of_the_dataloader(tmp_path: Path) -> None:
    def body(run: Any) -> Iterator[int]:
        for step in run.steps(loader(), epochs=2):
            with step:
                yield step.number

    assert play(tmp_path, body) == list(range(20))


@pytest.mark.long_but("True")
@pytest.mark.parametrize("mapping", [False, True])
def test_of_several_loaders_a_step_takes_one_batch_each_and_all_positions_are_saved(
    tmp_path: Path, mapping: bool
) -> None:
    def until(steps: int) -> Callable[[Any], Iterator[Any]]:
        def body(run: Any) -> Iterator[Any]:
            both = loader(), run.loader(OTHER, global_batch=3)
            for step in run.steps({"few": both[0], "many": both[1]} if mapping else both, until=steps):
                with step as found:
                    few, many = (found["few"], found["many"]) if mapping else found
                    yield values(few), values(many)

        return body

    seen = play(tmp_path, until(5)) + play(tmp_path, until(8))
    assert [i for few, _ in seen for i in few] == list(range(32))
    assert sorted(i for _, many in seen for i in many) == list(range(100, 124))


@pytest.mark.long
def test_a_saved_run_of_two_loaders_is_not_one_of_one(tmp_path: Path) -> None:
    def body(which: Any) -> Callable[[Any], Iterator[Any]]:
        def run_(run: Any) -> Iterator[Any]:
            for step in run.steps(which, until=3):
                with step:
                    yield step.number

        return run_

    play(tmp_path, body((loader(), loader(OTHER))))
    with pytest.raises(Exception, match=r"0, 1.*pass steps\(\) those that the run began with|version"):
        play(tmp_path, body({"a": loader(), "b": loader(OTHER)}))


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (lambda _: [1, 2], r"loader 0 is of type int, whose position cannot be saved"),
        (lambda _: iter([1]), r"is of type list_iterator.*run.loader\(dataset, global_batch=…\)"),
        (lambda _: zip(loader(), loader(), strict=True), r"is of type zip.*run.steps\(\(a, b\), …\)"),
        (lambda _: (), "no loader in what was passed"),
        (lambda _: [loader()] * 2, "the same loader twice"),
        (lambda run: (loader(), run.loader(OTHER, global_batch=4, micro_batch=2)), "loader 1 has micro_batch="),
        (lambda _: loader(batch_size=None), "multiple values"),
        (
            lambda _: DataLoader(DATA, batch_size=None),
            r"the DataLoader of TensorDataset \(SequentialSampler\) cannot be taken over: batch_size=None",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_refused_before_the_first_step(tmp_path: Path, which: Any, words: str) -> None:
    def body(run: Any) -> Iterator[Any]:
        for step in run.steps(which(run), until=3):
            with step:
                yield step

    with pytest.raises((LoopError, TypeError), match=words):
        play(tmp_path, body)


class Rank:
    """What a rank of two says, and hears: the other's numbers are known."""

    def __init__(self, feed: Feed, other: list[int] | None = None) -> None:
        self.said: list[int] = []
        self._others = iter(other) if other is not None else None
        feed.agree(lambda number: 42, self.same)

    def same(self, number: int) -> bool:
        self.said.append(number)
        return self._others is None or next(self._others) == number


def feed(asked: Any, rank: int) -> Feed:
    found = feed_of(asked, 2, World(rank, 2), frozenset({2}))
    assert found is not None
    return found


def elastic(data: Any, rank: int, seed: int) -> ElasticLoader:
    return ElasticLoader(data, global_batch=4, seed=seed, rank=rank, world_size=2)


def test_ranks_of_a_dataloader_take_the_seed_of_rank_0() -> None:
    first = loader(shuffle=True, generator=torch.Generator().manual_seed(1))
    second = loader(shuffle=True, generator=torch.Generator().manual_seed(2))
    Rank(feed(first, 0), Rank(feed(second, 1)).said)


def test_batch_that_grows_with_the_number_of_processes_is_named_in_one_line(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    grows = feed((loader(), elastic(DATA, 0, 0)), 0)
    grows.say_global_batch()
    line = (
        "2 processes x 4 samples = 8 samples a step: batch_size=4 is that of one process, as under torchrun. To train"
        " with 4 samples a step, write run.loader(dataset, global_batch=4)"
    )
    assert capsys.readouterr().err == f"everstep: {line}\n"
    with caplog.at_level(logging.INFO):
        grows.say_global_batch()
    assert caplog.record_tuples == [("everstep.train", logging.INFO, line)]
    feed(elastic(DATA, 0, 0), 0).say_global_batch()
    alone = feed_of(loader(), 1, World(0, 1), frozenset({1}))
    assert alone is not None
    alone.say_global_batch()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("data", "seed", "words"), [(DATA, 1, "seed=1"), (OTHER, 0, "TensorDataset of 24 samples")])
def test_ranks_with_other_seeds_or_other_data_are_refused(data: Any, seed: int, words: str) -> None:
    told = Rank(feed(elastic(DATA, 0, 0), 0)).said
    with pytest.raises(LoopError, match=f"the ranks' loaders are not alike; here it has .*{words}"):
        Rank(feed(elastic(data, 1, seed), 1), told)


def test_ranks_whose_samplers_draw_otherwise_are_refused_once_an_epoch() -> None:
    def drawn(rank: int, weight: float) -> Feed:
        sampler = WeightedRandomSampler([weight] + [1.0] * 39, 40)
        return feed(loader(sampler=sampler, generator=torch.Generator().manual_seed(1)), rank)

    def no_streams(numbers: Sequence[int]) -> list[tuple[int, ...]]:
        raise AssertionError(f"there is no stream to say {numbers} of")

    def said(one: Feed) -> list[int]:
        numbers: list[int] = []
        for _ in range(7):  # of five steps an epoch
            next(one)
            one.acknowledge()
            one.completed(2, lambda number: numbers.append(number) is None, no_streams)
        return numbers

    first, alike = said(drawn(0, 1.0)), said(drawn(1, 1.0))
    assert first == alike
    assert len(first) == 2, "once an epoch"
    other = drawn(1, 9.0)
    next(other)
    other.acknowledge()
    with pytest.raises(LoopError, match=r"WeightedRandomSampler: the ranks' samplers draw other samples .* in epoch 0"):
        other.completed(2, lambda number: number == first[0], no_streams)


def test_a_batch_that_is_unpacked_as_a_dataloaders_is_refused_with_what_to_write(tmp_path: Path) -> None:
    def body(run: Any) -> Iterator[Any]:
        for step in run.steps(loader(), until=3):
            with step as (x,):
                yield x

    with pytest.raises(LoopError, match=r"`x, y = batch.data` and `batch.scale\(loss\).backward\(\)`"):
        play(tmp_path, body)


@pytest.mark.long
def test_a_dataloader_that_is_changed_in_the_loop_is_refused_by_the_session_too(tmp_path: Path) -> None:
    def body(run: Any) -> Iterator[Any]:
        own = loader()
        for step in run.steps(own, epochs=3):
            with step:
                if step.number == 9:
                    batches: Any = own.batch_sampler
                    batches.batch_size = 8
                yield step.number

    with pytest.raises(LoopError, match=r"batch_sampler.batch_size was 4 when run.steps\(\) took it, and is 8"):
        play(tmp_path, body)


# --- iterated by hand


def by_iterator(run: Any) -> Iterator[int]:
    batches = iter(loader())
    for step in run.steps(until=6):
        with step:
            next(batches)
            yield step.number


def outside_of_the_step(run: Any) -> Iterator[int]:
    batches = iter(loader(shuffle=True))
    for step in run.steps(until=6):
        next(batches)
        with step:
            yield step.number


def around_the_steps(run: Any) -> Iterator[int]:
    steps = run.steps(until=6)
    for _ in loader(num_workers=1):
        with next(steps) as _:
            yield 1


def a_new_iterator_each_step(run: Any) -> Iterator[int]:
    own = loader(shuffle=True)
    for step in run.steps(until=6):
        with step:
            next(iter(own))
            yield step.number


def beside_another(run: Any) -> Iterator[int]:
    unlabelled = iter(loader(OTHER))
    for step in run.steps(loader(), until=6):
        with step:
            next(unlabelled)
            yield step.number


def every_second_step(run: Any) -> Iterator[int]:
    batches = iter(loader())
    for step in run.steps(until=6):
        with step:
            if step.number % 2 == 0:
                next(batches)
            yield step.number


def an_elastic_one(run: Any) -> Iterator[int]:
    batches = iter(run.loader(DATA, global_batch=4))
    for step in run.steps(until=6):
        with step:
            next(batches)
            yield step.number


@pytest.mark.long_but("an_elastic_one")
@pytest.mark.parametrize(
    "body",
    [by_iterator, outside_of_the_step, around_the_steps, a_new_iterator_each_step, beside_another, every_second_step,
     an_elastic_one],
)  # fmt: skip
def test_training_on_a_loader_that_the_script_iterates_is_refused_by_name(tmp_path: Path, body: Any) -> None:
    with pytest.raises(LoopError, match=r"iterated by the script itself, to train on.*run.steps\(loader, …\)"):
        play(tmp_path, body)
    assert torchs._BaseDataLoaderIter.__next__.__qualname__ == "_BaseDataLoaderIter.__next__", "as torch has it"


def test_the_refusal_has_the_variable_of_the_script(tmp_path: Path) -> None:
    def body(run: Any) -> Iterator[int]:
        training_data = loader()
        batches = iter(training_data)
        for step in run.steps(until=6):
            with step:
                next(batches)
        yield 0

    with pytest.raises(
        LoopError, match=r"steps 0 and 1: training_data = DataLoader\(TensorDataset, SequentialSampler\) is iterated"
    ):
        play(tmp_path, body)


def whole_between_steps(run: Any) -> Iterator[int]:
    held_out = loader(OTHER)
    for step in run.steps(loader(), until=6):
        with step:
            yield step.number
        for _ in held_out:
            pass


def whole_inside_each_step(run: Any) -> Iterator[int]:
    held_out = loader(OTHER)
    for step in run.steps(until=6):
        with step:
            for _ in held_out:
                pass
            yield step.number


def some_now_and_then_by_workers_that_stay(run: Any) -> Iterator[int]:
    held_out = loader(OTHER, num_workers=1, persistent_workers=True)
    for step in run.steps(until=6):
        with step:
            yield step.number
        if step.number % 2:
            for i, _ in enumerate(held_out):
                if i == 1:
                    break


def without_gradients(run: Any) -> Iterator[int]:
    batches = iter(loader(OTHER))
    for step in run.steps(until=6):
        with step, torch.no_grad():
            next(batches)
            yield step.number


def tracked_by_the_script(run: Any) -> Iterator[int]:
    sampler = ElasticSampler(DATA)
    run.track(sampler=sampler)
    batches = iter(loader(sampler=sampler))
    for step in run.steps(until=6):
        with step:
            next(batches)
            sampler.consumed(4)
            yield step.number


@pytest.mark.long_but("whole_inside_each_step")
@pytest.mark.parametrize(
    "body",
    [whole_between_steps, whole_inside_each_step, some_now_and_then_by_workers_that_stay, without_gradients,
     tracked_by_the_script],
)  # fmt: skip
def test_an_evaluation_is_the_scripts_own_business(tmp_path: Path, body: Any) -> None:
    assert play(tmp_path, body) == list(range(6))


# --- samplers of a world that changes


@pytest.fixture
def changing() -> Iterator[Resharding]:
    """In a process whose worlds change, while it builds its objects."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    resharding = Resharding(4)
    yield resharding
    resharding.end()
    dist.destroy_process_group()


def test_a_sampler_made_in_the_world_of_one_is_cut_for_each_world(changing: Resharding) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, shuffle=False)
    sampler.set_epoch(3)
    held_out = loader(sampler=sampler)
    assert len(held_out) == 3, "of four processes, for schedules"
    assert sum(len(x) for (x,) in held_out) == 40, "and all samples, in the world of one"
    changing.reshard(1, 4)
    assert (sampler.num_replicas, sampler.rank, sampler.epoch, len(held_out)) == (4, 1, 3, 3)
    assert [i for (x,) in held_out for i in x.tolist()] == list(range(1, 40, 4))
    changing.reshard(0, 2)
    assert [i for (x,) in held_out for i in x.tolist()] == list(range(0, 40, 2))


def test_a_sampler_that_was_told_its_place_before_there_was_one_is_refused_when_it_is_iterated(
    changing: Resharding,
) -> None:
    told: DistributedSampler[Any] = DistributedSampler(DATA, 2, 0)
    everything: DistributedSampler[Any] = DistributedSampler(DATA, num_replicas=1, rank=0)
    changing.reshard(0, 2)
    assert len(list(everything)) == 40
    with pytest.raises(LoopError, match=r"DistributedSampler\(num_replicas=2, rank=0\) was made before run.steps\(\)"):
        list(told)
    here: DistributedSampler[Any] = DistributedSampler(DATA, num_replicas=2, rank=0)
    assert len(list(here)) == 20
    changing.reshard(1, 2)
    with pytest.raises(LoopError, match=r"was made as rank 0, and is iterated by rank 1 of 2: leave out num_replicas="):
        list(here)


def test_torch_is_left_as_it_was() -> None:
    resharding = Resharding(4)
    resharding.end()
    assert DistributedSampler.__init__.__qualname__ == "DistributedSampler.__init__"
    assert DistributedSampler.__iter__.__qualname__ == "DistributedSampler.__iter__"
    assert isinstance(loader(shuffle=True).sampler, RandomSampler)
