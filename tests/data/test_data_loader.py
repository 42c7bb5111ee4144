"""The loader over real DataLoader workers: exactly once across kills and resizes, prefetch, bad input, failures."""

import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from everstep.data import (
    BatchUnusable,
    Blocks,
    DataError,
    DatasetChanged,
    DatasetUnusable,
    ElasticLoader,
    PositionMismatch,
    Unacknowledged,
)
from everstep.data.plan.order import order_of, shuffle_of


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def expected(n: int, seed: int, epoch: int, shuffle: Any = True) -> list[int]:
    return order_of(shuffle_of(shuffle), n, seed, epoch).take(np.arange(n)).tolist()


def take_step(loaders: list[ElasticLoader], loops: list[Any]) -> list[int]:
    """The samples of one step of all ranks, in rank order; each rank has acknowledged it."""
    step: list[int] = []
    for loader, loop in zip(loaders, loops, strict=True):
        while True:
            batch = next(loop)
            step += batch.data.tolist()[: batch.count]
            assert batch.indices.tolist() == batch.data.tolist()
            if batch.last:
                break
        loader.acknowledge()
    return step


def close(loaders: list[ElasticLoader]) -> None:
    for loader in loaders:
        loader.close()


# Failures 85 and 86: kills and resizes with real workers that have prefetched.


@pytest.mark.long_but("13")
@pytest.mark.parametrize("number", range(24))
def test_85_86_kills_and_resizes_with_workers_and_prefetch_use_each_sample_once(number: int) -> None:
    """One epoch; a kill drops the loaders with all they have prefetched and goes back to the last commit."""
    rng = random.Random(number)
    n, seed = rng.randint(20, 90), rng.randrange(2**32)
    shuffle: Any = rng.choice([True, True, Blocks(rng.randint(2, 20), 3)])
    settings: dict[str, Any] = {
        "global_batch": rng.randint(4, 12),
        "shuffle": shuffle,
        "seed": seed,
        "micro_batch": rng.choice([None, 2]),
        "num_workers": rng.choice([0, 1, 2]),
        "persistent_workers": rng.random() < 0.5,
    }
    if settings["num_workers"]:
        settings["prefetch_factor"] = rng.randint(1, 4)

    def start(state: str | None) -> tuple[list[ElasticLoader], list[Any]]:
        world = rng.randint(1, 3)
        loaders = [ElasticLoader(Numbers(n), rank=r, world_size=world, **settings) for r in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(state))
        return loaders, [iter(loader) for loader in loaders]

    loaders, loops = start(None)
    lineage: list[int] = []
    commit = json.dumps(loaders[0].state_dict()), 0
    kills = 2
    while loaders[0].epoch == 0:
        event = rng.random()
        if event < 0.3:
            commit = json.dumps(loaders[0].state_dict()), len(lineage)
        elif event < 0.5 and kills:
            kills -= 1
            del lineage[commit[1] :]
            close(loaders)
            loaders, loops = start(commit[0])
        elif event < 0.7:  # within the process, some ranks with a step in hand
            for loop in rng.sample(loops, rng.randint(0, len(loops))):
                next(loop)
            world = rng.randint(1, len(loaders))
            close(loaders[world:])
            loaders, loops = loaders[:world], loops[:world]
            for r, loader in enumerate(loaders):
                loader.reshard(r, world)
        lineage += take_step(loaders, loops)
    assert [next(loop, None) for loop in loops] == [None] * len(loops)
    close(loaders)
    assert lineage == expected(n, seed, 0, shuffle), f"replay: number={number}"


@pytest.mark.parametrize("workers", [0, 2])
def test_86_position_counts_what_was_consumed_not_what_was_prefetched(workers: int) -> None:
    loader = ElasticLoader(Numbers(100), global_batch=10, num_workers=workers)
    loop = iter(loader)
    used = [next(loop).data.tolist() for _ in range(3)]
    loader.acknowledge()
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["index"] == 30  # with two workers at least 4 more are prefetched
    loader.close()
    again = ElasticLoader(Numbers(100), global_batch=10, rank=0, world_size=2)
    other = ElasticLoader(Numbers(100), global_batch=10, rank=1, world_size=2, num_workers=workers)
    again.load_state_dict(state)
    other.load_state_dict(state)
    rest = [a.data.tolist() + b.data.tolist() for a, b in zip(again, other, strict=True)]
    assert list(itertools.chain(*used, *rest)) == expected(100, 0, 0)
    other.close()


def test_position_is_refused_between_a_batch_and_its_acknowledgement() -> None:
    loader = ElasticLoader(Numbers(20), global_batch=10)
    assert loader.state_dict()["index"] == 0
    for _ in loader:
        with pytest.raises(Unacknowledged, match=r"step . of epoch 0 is in hand: call acknowledge\(\)"):
            loader.state_dict()
        assert loader.cursor.index in (0, 10)
    assert (loader.state_dict()["epoch"], loader.state_dict()["index"]) == (1, 0)  # asking for more acknowledged it


def test_loop_that_only_reads_breaks_off_and_begins_again() -> None:
    loader = ElasticLoader(Numbers(20), global_batch=10)
    with torch.no_grad():
        for _ in range(3):
            for batch in loader:
                assert batch.data.tolist() == expected(20, 0, 0)[:10]
                break
        batch.scale(torch.ones(()))
        with pytest.raises(Unacknowledged, match="a new iteration was begun"):  # its loss was weighted
            iter(loader)
    loader.rewind()
    with torch.no_grad():
        next(iter(loader))
    with pytest.raises(Unacknowledged, match=r"or rewind\(\) if it is not"):
        iter(loader)  # here one may train


def test_new_loop_over_a_step_in_hand_is_refused_until_its_fate_is_known() -> None:
    loader = ElasticLoader(Numbers(20), global_batch=10)
    first = next(iter(loader)).data.tolist()
    with pytest.raises(Unacknowledged, match="a new iteration was begun"):
        iter(loader)
    loader.rewind()
    again = next(iter(loader)).data.tolist()
    loader.acknowledge()
    assert first == again == expected(20, 0, 0)[:10]
    assert next(iter(loader)).data.tolist() == expected(20, 0, 0)[10:]


@pytest.mark.parametrize("workers", [0, 2])
def test_failed_step_comes_again_whole_in_the_same_loop(workers: int) -> None:
    loader = ElasticLoader(Numbers(40), global_batch=10, micro_batch=4, num_workers=workers)
    seen: list[list[int]] = []
    failed = False
    for batch in loader:
        seen.append(batch.data.tolist())
        if batch.step == 1 and batch.micro == 1 and not failed:
            failed = True
            del seen[-2:]
            loader.rewind()
    assert list(itertools.chain(*seen)) == expected(40, 0, 0)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_reshard_in_a_loop_goes_on_in_the_new_world(workers: int) -> None:
    loader = ElasticLoader(Numbers(100), global_batch=10, num_workers=workers)
    got: list[int] = []
    for batch in loader:
        got += batch.data.tolist()
        if batch.step == 3:
            loader.acknowledge()
            loader.reshard(1, 2)
        if batch.step == 6:
            loader.acknowledge()
            loader.reshard(0, 1)
    order = expected(100, 0, 0)
    halves = [s for step in range(4, 7) for s in order[step * 10 + 5 : step * 10 + 10]]
    assert got == order[:40] + halves + order[70:]
    loader.close()


@pytest.mark.parametrize("persistent", [True, False])
def test_epochs_follow_one_another(persistent: bool) -> None:
    loader = ElasticLoader(Numbers(25), global_batch=10, num_workers=2, persistent_workers=persistent, seed=3)
    assert len(loader) == 3
    for epoch in range(3):
        assert loader.epoch == epoch
        batches = list(loader)
        assert [(b.epoch, b.step, b.global_count) for b in batches] == [(epoch, 0, 10), (epoch, 1, 10), (epoch, 2, 5)]
        assert list(itertools.chain(*(b.data.tolist() for b in batches))) == expected(25, 3, epoch)
    loader.close()


def test_drop_last_leaves_out_another_remainder_each_epoch() -> None:
    loader = ElasticLoader(Numbers(25), global_batch=10, drop_last=True)
    used = [list(itertools.chain(*(b.data.tolist() for b in loader))) for _ in range(2)]
    assert len(loader) == 2
    assert used == [expected(25, 0, 0)[:20], expected(25, 0, 1)[:20]]


def test_saved_seed_goes_on_and_the_passed_one_is_said_to_be_unused(caplog: pytest.LogCaptureFixture) -> None:
    loader = ElasticLoader(Numbers(20), global_batch=10, seed=1)
    next(iter(loader))
    loader.acknowledge()
    resumed = ElasticLoader(Numbers(20), global_batch=10, seed=2)
    resumed.load_state_dict(loader.state_dict())
    assert next(iter(resumed)).data.tolist() == expected(20, 1, 0)[10:]
    assert "seed 1, which goes on; seed 2 is not used" in caplog.text


# Bad input: refused before the first step, naming the thing and the fix.


class Endless(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return itertools.count()


@pytest.mark.parametrize(
    ("dataset", "settings", "error", "words"),
    [
        (Endless(), {}, DatasetUnusable, r"dataset Endless has no length.*ShardedDataset"),
        (Numbers(0), {}, DatasetUnusable, "0 samples"),
        (
            Numbers(9),
            {"global_batch": 3, "world_size": 4, "rank": 0},
            BatchUnusable,
            "3 is smaller than the world of 4",
        ),
        (Numbers(9), {"global_batch": 0}, BatchUnusable, "global_batch=0"),
        (Numbers(9), {"micro_batch": 0}, BatchUnusable, "micro_batch=0"),
        (
            Numbers(9),
            {"global_batch": 10, "drop_last": True},
            DatasetUnusable,
            "9 samples, less than one global_batch=10",
        ),
        (Numbers(9), {"rank": 1}, BatchUnusable, "pass both, or neither"),
        (Numbers(9), {"rank": 2, "world_size": 2}, BatchUnusable, "rank 2 of a world of 2"),
        (Numbers(9), {"shuffle": Blocks()}, DataError, "the dataset has none: pass a size"),
        (Numbers(9), {"shuffle": 7}, DataError, "shuffle=7"),
        (Numbers(9), {"seed": -3}, DataError, "seed=-3"),
        (Numbers(9), {"allow_changes": ["lr"]}, DataError, r"allow_changes=\['lr'\]"),
        (Numbers(9), {"num_workers": 1, "multiprocessing_context": "thread"}, ValueError, "multiprocessing_context"),
    ],
)
def test_loader_that_cannot_work_is_refused_when_made(dataset: Any, settings: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        ElasticLoader(dataset, **{"global_batch": 4, **settings})


def test_87_changed_dataset_is_refused_and_the_position_stays() -> None:
    state = ElasticLoader(Numbers(20), global_batch=10).state_dict()
    for dataset, settings, error in (
        (Numbers(21), {}, DatasetChanged),
        (TensorDataset(torch.arange(20)), {}, DatasetChanged),
        (Numbers(20), {"global_batch": 5}, PositionMismatch),
    ):
        options: dict[str, Any] = {"global_batch": 10, "seed": 9, **settings}
        loader = ElasticLoader(dataset, **options)
        with pytest.raises(error):
            loader.load_state_dict(state)
        assert loader.cursor.seed == 9


def test_87_other_content_of_the_same_length_is_refused_by_its_id() -> None:
    one, two = TensorDataset(torch.arange(20)), TensorDataset(torch.arange(20) + 1)
    state = ElasticLoader(one, global_batch=10, dataset_id="v1").state_dict()
    with pytest.raises(DatasetChanged):
        ElasticLoader(two, global_batch=10, dataset_id="v2").load_state_dict(state)


def test_world_comes_from_torchruns_environment_where_nothing_else_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ElasticLoader(Numbers(9), global_batch=9).world.size == 1
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    loader = ElasticLoader(Numbers(9), global_batch=9)
    assert next(iter(loader)).data.tolist() == expected(9, 0, 0)[6:]


# Workers: how they start, how they fail, how they end.


@pytest.mark.long
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_read_the_same(context: str) -> None:
    # A list: a started process cannot import the test module's own classes.
    loader = ElasticLoader(list(range(12)), global_batch=4, num_workers=1, multiprocessing_context=context)
    assert list(itertools.chain(*(b.data.tolist() for b in loader))) == expected(12, 0, 0)
    loader.close()


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 7 and not os.path.exists(self.mended):
            raise OSError("no such image")
        return index

    mended = ""


@pytest.mark.parametrize("workers", [0, 2])
def test_sample_that_cannot_be_read_is_named_and_nothing_is_skipped(workers: int, tmp_path: Any) -> None:
    dataset = Broken(30)
    dataset.mended = str(tmp_path / "mended")
    loader = ElasticLoader(dataset, global_batch=5, num_workers=workers)
    got: list[int] = []
    loop = iter(loader)
    failures = 0
    while True:
        try:
            batch = next(loop)
        except StopIteration:
            break
        except OSError as e:
            text = str(e) + "".join(getattr(e, "__notes__", []))
            assert "no such image" in text
            assert "while reading sample 7 in epoch 0" in text
            failures += 1
            (tmp_path / "mended").touch()
            continue
        got += batch.data.tolist()
    assert failures == 1
    assert got == expected(30, 0, 0)
    loader.close()


@pytest.mark.long
def test_killed_worker_is_an_error_and_the_loop_can_go_on_with_new_ones() -> None:
    loader = ElasticLoader(Numbers(60), global_batch=5, num_workers=1, prefetch_factor=1)
    loop = iter(loader)
    got = next(loop).data.tolist()
    victim = multiprocessing.active_children()[0]
    assert victim.pid is not None
    failures = []
    while loader.epoch == 0:
        try:
            if victim.is_alive():
                os.kill(victim.pid, signal.SIGKILL)
                victim.join(30)
            for batch in loop:
                got += batch.data.tolist()
        except RuntimeError as e:  # torch's SIGCHLD handler raises wherever the program is, and then `next` does too
            failures.append(str(e))
            assert len(failures) <= 2
    assert failures
    assert all("DataLoader worker" in text for text in failures)
    assert got == expected(60, 0, 0)
    loader.close()


def test_dropped_loader_ends_its_workers() -> None:
    loader = ElasticLoader(Numbers(60), global_batch=5, num_workers=2)
    loop = iter(loader)
    next(loop)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    del loader, loop
    for worker in workers:
        worker.join(30)
    assert not any(worker.is_alive() for worker in workers)


def test_own_worker_init_and_collate_are_called() -> None:
    loader = ElasticLoader(Numbers(8), global_batch=4, num_workers=1, worker_init_fn=_mark, collate_fn=_with_mark)
    assert [b.data for b in loader] == [
        {"mark": "worker 0", "rows": expected(8, 0, 0)[:4]},
        {"mark": "worker 0", "rows": expected(8, 0, 0)[4:]},
    ]
    loader.close()


def _mark(worker: int) -> None:
    os.environ["EVERSTEP_TEST_MARK"] = f"worker {worker}"


def _with_mark(rows: list[int]) -> dict[str, Any]:
    return {"mark": os.environ["EVERSTEP_TEST_MARK"], "rows": rows}


def test_importing_everstep_data_and_its_decisions_loads_no_torch() -> None:
    code = (
        "import sys, everstep, everstep.data; assert 'numpy' not in sys.modules;"
        "import everstep.data.plan.progress, everstep.data.shards, everstep.data.workers;"
        "import everstep.data.randomness.seeding;"
        "from everstep.data import Cursor, Blocks, Permutation, DatasetChanged;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"global_batch": 6.0}, r"global_batch=6\.0: a whole number is expected, not a float"),
        ({"global_batch": 6, "seed": "abc"}, "seed='abc': a whole number is expected, not a str"),
        ({"global_batch": 6, "micro_batch": 1.5}, r"micro_batch=1\.5: a whole number is expected"),
        ({"global_batch": True}, "global_batch=True: a whole number is expected"),
    ],
)
def test_what_is_no_whole_number_is_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        ElasticLoader(Numbers(20), **wrong)
    six: Any = np.int64(6)
    assert ElasticLoader(Numbers(20), global_batch=six).state_dict()["global_batch"] == 6
