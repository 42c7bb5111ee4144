"""Exactly once, whatever happens: kills, resizes and prefetch, simulated on the state machine that the loader runs on.

`EVERSTEP_DATA_SEED` replays one random sequence; a failure prints it.
"""

import hashlib
import json
import os
import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from everstep.data.errors import BatchUnusable, Unacknowledged
from everstep.data.fingerprints import Fingerprint
from everstep.data.plan.assignment import Epoch, World
from everstep.data.plan.cursor import Cursor
from everstep.data.plan.order import Blocks, InOrder, Shuffle, Shuffled, label, order_of
from everstep.data.plan.progress import Progress

SEQUENCES = 1000


@dataclass(frozen=True, slots=True)
class Setup:
    n: int
    batch: int
    seed: int = 0
    shuffle: Shuffle = field(default_factory=Shuffled)
    drop_last: bool = False
    micro_batch: int | None = None

    def rank(self, rank: int, world: int, state: str | None = None) -> Progress:
        cursor = Cursor(self.seed, 0, 0, self.batch, label(self.shuffle), Fingerprint(self.n, "list"))
        epoch = Epoch(self.n, self.batch, self.drop_last)
        progress = Progress(cursor, epoch, self.shuffle, World(rank, world), micro_batch=self.micro_batch)
        if state is not None:
            progress.load(json.loads(state), frozenset())
        return progress

    def order(self, epoch: int) -> list[int]:
        """The samples of an epoch, said without any of the code above `order`."""
        order = order_of(self.shuffle, self.n, self.seed, epoch)
        used = self.n - self.n % self.batch if self.drop_last else self.n
        return order.take(np.arange(used)).tolist()


class Trainer:
    """One rank: a plan, so many of its reads prefetched, and what its parameters are made of."""

    def __init__(self, progress: Progress, prefetch: int) -> None:
        self.progress = progress
        self.prefetch = prefetch
        self.epoch = progress.cursor.epoch
        self.plan = iter(progress)
        self.ahead = 0

    def micro_batch(self) -> tuple[int, list[int]]:
        """Ask for the next one: its number of micro-batches, and the samples that count."""
        self.progress.ask()
        if self.progress.cursor.epoch != self.epoch:
            self.restart()
        while self.ahead <= self.prefetch and next(self.plan, None) is not None:
            self.ahead += 1
        read = self.progress.hand_out()
        self.ahead -= 1
        return read.share.micros, read.samples[: read.share.count].tolist()

    def restart(self) -> None:
        self.epoch, self.plan, self.ahead = self.progress.cursor.epoch, iter(self.progress), 0


def take_step(trainers: list[Trainer]) -> list[int]:
    """All ranks take one step; its samples in rank order."""
    taken: list[list[int]] = []
    for trainer in trainers:
        micros, samples = trainer.micro_batch()
        for _ in range(micros - 1):
            samples = samples + trainer.micro_batch()[1]
        taken.append(samples)
    return [s for part in taken for s in part]


def run_sequence(number: int) -> None:
    """A run of two to three epochs that is killed and resized at random. Its parameters are a list of samples."""
    rng = random.Random(number)
    n = rng.randint(8, 120)
    orders: list[Shuffle] = [Shuffled(), Shuffled(), InOrder(), Blocks(rng.randint(1, 20), rng.randint(1, 4))]
    setup = Setup(
        n=n,
        batch=rng.randint(8, min(n, 32)),
        seed=rng.randrange(2**64),
        shuffle=rng.choice(orders),
        drop_last=rng.random() < 0.3,
        micro_batch=rng.choice([None, None, 1, 3]),
    )
    epochs = rng.randint(2, 3)

    def start(state: str | None) -> list[Trainer]:
        world = rng.randint(1, 8)
        return [Trainer(setup.rank(r, world, state), rng.randint(0, 6)) for r in range(world)]

    trainers = start(None)
    lineage: list[int] = []
    commit = json.dumps(trainers[0].progress.cursor.state_dict()), 0
    while trainers[0].progress.cursor.epoch < epochs:
        before = {json.dumps(t.progress.cursor.state_dict()) for t in trainers}
        assert len(before) == 1, "all ranks are at one position"
        event = rng.random()
        if event < 0.05:  # all killed: parameters and position come from the commit
            del lineage[commit[1] :]
            trainers = start(commit[0])
        elif event < 0.10:  # stopped in a step, and moved within the process: the step is taken again, whole
            for t in rng.sample(trainers, rng.randint(0, len(trainers))):
                t.micro_batch()
            for t in trainers:
                t.progress.rewind()
            kept = trainers[: rng.randint(1, len(trainers))]
            world = rng.randint(len(kept), 8)
            joined = [Trainer(setup.rank(r, world, before.copy().pop()), 2) for r in range(len(kept), world)]
            for r, t in enumerate(kept):
                t.progress.reshard(World(r, world))
                t.restart()
            trainers = kept + joined
        elif event < 0.25:
            commit = before.pop(), len(lineage)
        lineage += take_step(trainers)
        for t in trainers:
            t.progress.acknowledge()
    expected = [sample for epoch in range(epochs) for sample in setup.order(epoch)]
    assert lineage == expected
    for epoch in range(epochs):
        assert len(set(setup.order(epoch))) == len(setup.order(epoch))


@pytest.mark.long_but("0")
@pytest.mark.parametrize("tenth", range(10))
def test_85_a_thousand_random_kills_and_resizes_use_each_sample_once_in_one_order(tenth: int) -> None:
    given = os.environ.get("EVERSTEP_DATA_SEED")
    numbers = [int(given)] if given else range(tenth * SEQUENCES // 10, (tenth + 1) * SEQUENCES // 10)
    for number in numbers:
        try:
            run_sequence(number)
        except Exception as e:
            e.add_note(f"replay with EVERSTEP_DATA_SEED={number}")
            raise


def epoch_of(setup: Setup, worlds: list[int], resize_every: int) -> tuple[list[int], list[list[int]]]:
    """One epoch that changes world every so many steps: samples in order, and samples by rank for each world."""
    state, seen = None, []
    by_rank: list[list[int]] = []
    for world in worlds:
        trainers = [Trainer(setup.rank(r, world, state), 2) for r in range(world)]
        counts = [0] * world
        for _ in range(resize_every):
            for r, trainer in enumerate(trainers):
                samples = trainer.micro_batch()[1]
                counts[r] += len(samples)
                seen += samples
                trainer.progress.acknowledge()
        by_rank.append(counts)
        state = json.dumps(trainers[0].progress.cursor.state_dict())
    assert state is not None
    assert (json.loads(state)["epoch"], json.loads(state)["index"]) == (1, 0)
    return seen, by_rank


def test_85_resizes_8_6_7_and_6_8_7_within_one_epoch_of_60000_give_the_known_order() -> None:
    """600 steps of 100 samples; the world changes after 200 and 400. Counts by hand, the order by its hash."""
    setup = Setup(n=60_000, batch=100, seed=42)
    shrunk, counts = epoch_of(setup, [8, 6, 7], 200)
    grown, others = epoch_of(setup, [6, 8, 7], 200)
    assert shrunk == grown
    assert sorted(shrunk) == list(range(60_000))
    assert shrunk[:5] == [12334, 5063, 8107, 46522, 42431]
    digest = hashlib.sha256(np.array(shrunk, dtype="<i8").tobytes()).hexdigest()
    assert digest == "b2c3fcd9b71c5b349dff0a7c8fcfeaad72a3627631f7f0c0ea1b3542ed322a66"
    eight, six, seven = [2600] * 4 + [2400] * 4, [3400] * 4 + [3200] * 2, [3000] * 2 + [2800] * 5
    assert counts == [eight, six, seven]
    assert others == [six, eight, seven]


def test_86_what_is_in_flight_or_in_hand_is_planned_again() -> None:
    setup = Setup(n=100, batch=10)
    trainer = Trainer(setup.rank(0, 1), prefetch=6)
    first = trainer.micro_batch()[1]
    trainer.progress.acknowledge()
    second = trainer.micro_batch()[1]
    assert trainer.ahead == 6
    trainer.progress.rewind()
    state = json.dumps(trainer.progress.cursor.state_dict())
    assert json.loads(state)["index"] == 10
    again = Trainer(setup.rank(0, 1, state), 0)
    assert again.micro_batch()[1] == second == setup.order(0)[10:20]
    assert first == setup.order(0)[:10]


def test_step_in_hand_is_acknowledged_once_by_word_or_by_asking() -> None:
    setup = Setup(n=100, batch=10)
    trainer = Trainer(setup.rank(0, 1), 0)
    positions = []
    for spoken in (True, False, True, True, False):
        trainer.micro_batch()
        positions.append(trainer.progress.cursor.index)
        if spoken:
            trainer.progress.acknowledge()
            trainer.progress.acknowledge()
    assert positions == [0, 10, 20, 30, 40]


def test_position_is_not_given_out_while_a_step_is_in_hand() -> None:
    trainer = Trainer(Setup(n=100, batch=10).rank(0, 1), 0)
    trainer.progress.check_acknowledged("x")
    trainer.micro_batch()
    with pytest.raises(
        Unacknowledged, match=r"step 0 of epoch 0 is in hand: call acknowledge\(\) after optimizer.step"
    ):
        trainer.progress.check_acknowledged("a position was asked for")
    trainer.progress.acknowledge()
    trainer.progress.check_acknowledged("x")


def test_half_a_step_cannot_be_acknowledged() -> None:
    trainer = Trainer(Setup(n=100, batch=10, micro_batch=3).rank(0, 1), 0)
    trainer.micro_batch()
    trainer.micro_batch()
    with pytest.raises(Unacknowledged, match="2 of its 4 micro-batches"):
        trainer.progress.acknowledge()


def test_reshard_to_a_world_larger_than_the_batch_changes_nothing() -> None:
    trainer = Trainer(Setup(n=100, batch=10).rank(0, 1), 0)
    trainer.micro_batch()
    with pytest.raises(BatchUnusable, match="global_batch=10 is smaller than the world of 11"):
        trainer.progress.reshard(World(0, 11))
    assert trainer.progress.world == World(0, 1)
    trainer.progress.acknowledge()
    assert trainer.progress.cursor.index == 10


@pytest.mark.parametrize(
    ("n", "drop_last", "ends"), [(25, False, [10, 20, 0]), (25, True, [10, 0]), (20, False, [10, 0])]
)
def test_last_step_moves_the_position_to_the_next_epoch(n: int, drop_last: bool, ends: list[int]) -> None:
    trainer = Trainer(Setup(n=n, batch=10, drop_last=drop_last).rank(0, 1), 0)
    positions = []
    for _ in ends:
        trainer.micro_batch()
        trainer.progress.acknowledge()
        positions.append((trainer.progress.cursor.epoch, trainer.progress.cursor.index))
    assert positions == [*((0, i) for i in ends[:-1]), (1, 0)]


def test_epochs_and_seeds_have_different_orders() -> None:
    orders: list[Any] = [Setup(n=500, batch=10, seed=s).order(e) for s in (0, 1) for e in (0, 1)]
    assert all(a != b for a, b in pairwise(orders))
