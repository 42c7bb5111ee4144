"""The work queue, against a naive model and with waiting workers."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everstep_operator.kube.backoff import Backoff
from everstep_operator.runtime.clock import ManualClock
from everstep_operator.runtime.errors import QueueFull, QueueShutDown
from everstep_operator.runtime.queue import KeyQueue, WorkQueue

KEYS = st.sampled_from("abcde")


@dataclass
class Naive:
    """The queue as one would explain it: per key what is wanted, no heap, no lazy deletion."""

    ready: list[str] = field(default_factory=list)
    due: dict[str, float] = field(default_factory=dict)
    working: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)

    def add(self, key: str) -> None:
        self.due.pop(key, None)
        if key in self.working:
            self.again.add(key)
        elif key not in self.ready:
            self.ready.append(key)

    def tick(self, now: float) -> None:
        for _, key in sorted((due, key) for key, due in self.due.items() if due <= now):
            self.add(key)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue: KeyQueue[str] = KeyQueue(limit=5)
        self.model = Naive()
        self.now = 0.0

    @rule(key=KEYS)
    def add(self, key: str) -> None:
        self.queue.add(key)
        self.model.add(key)

    # Distinct delays, as two keys due at the same moment may come in either order.
    @rule(key=KEYS, delay=st.floats(0.001, 20))
    def add_after(self, key: str, delay: float) -> None:
        due = self.now + delay
        if due in self.model.due.values():
            return
        self.queue.add_after(key, delay, self.now)
        if key not in self.model.ready and key not in self.model.again:
            self.model.due[key] = min(due, self.model.due.get(key, due))

    @rule(seconds=st.floats(0, 10))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        self.model.tick(self.now)
        taken = self.queue.take(self.now)
        assert taken == (self.model.ready.pop(0) if self.model.ready else None)
        if taken is not None:
            assert taken not in self.model.working
            self.model.working.add(taken)

    @precondition(lambda self: self.model.working)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.working)))
        self.queue.done(key)
        self.model.working.discard(key)
        if key in self.model.again:
            self.model.again.discard(key)
            self.model.ready.append(key)

    @invariant()
    def next_due_agrees(self) -> None:
        assert self.queue.next_due() == min(self.model.due.values(), default=None)
        assert len(self.queue) == len(self.model.ready)


QueueMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_any_sequence_of_calls_agrees_with_naive_model = QueueMachine.TestCase


def test_queue_at_its_limit_refuses_a_new_key_but_takes_a_known_one() -> None:
    queue: KeyQueue[str] = KeyQueue(limit=2)
    queue.add("a")
    queue.add_after("b", 5.0, now=0.0)
    with pytest.raises(QueueFull, match="holds 2 keys"):
        queue.add("c")
    queue.add("a")
    queue.add("b")
    assert [queue.take(0.0), queue.take(0.0), queue.take(0.0)] == ["a", "b", None]


def test_a_key_delayed_a_thousand_times_does_not_grow_the_heap() -> None:
    queue: KeyQueue[str] = KeyQueue(limit=2)
    for n in range(1000):
        queue.add_after("a", 1000.0 - n, now=0.0)
    assert len(queue._heap) < 50
    assert queue.take(0.9) is None
    assert queue.take(1.0) == "a"


def test_done_without_take_is_refused() -> None:
    with pytest.raises(ValueError, match="without take"):
        KeyQueue[str]().done("a")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def make(clock: ManualClock, **kwargs: object) -> WorkQueue[str]:
    return WorkQueue(clock, lambda: 1.0, **kwargs)


async def test_waiting_worker_gets_a_delayed_key_at_its_time(clock: ManualClock) -> None:
    queue = make(clock)
    worker = asyncio.create_task(queue.get())
    await clock.advance(0)
    queue.add_after("a", 10.0)
    queue.add_after("a", 4.0)
    await clock.advance(3.9)
    assert not worker.done()
    await clock.advance(0.2)
    assert worker.result() == "a"


async def test_a_key_added_during_its_work_goes_to_nobody_until_done(clock: ManualClock) -> None:
    queue = make(clock)
    queue.add("a")
    assert await queue.get() == "a"
    queue.add("a")
    second = asyncio.create_task(queue.get())
    await clock.advance(60)
    assert not second.done()
    queue.done("a")
    await clock.advance(0)
    assert second.result() == "a"


async def test_every_waiting_worker_gets_one_of_the_keys(clock: ManualClock) -> None:
    queue = make(clock)
    workers = [asyncio.create_task(queue.get()) for _ in range(5)]
    await clock.advance(0)
    for key in "abcde":
        queue.add(key)
    await clock.advance(0)
    assert sorted(worker.result() for worker in workers) == list("abcde")


async def test_failures_back_off_exponentially_up_to_the_cap_until_forgotten(clock: ManualClock) -> None:
    queue = make(clock, backoff=Backoff(base=1.0, cap=8.0))
    delays = []
    for _ in range(5):
        delays.append(queue.add_backoff("a"))
        await clock.advance(8.0)
        assert await queue.get() == "a"
        queue.done("a")
    assert delays == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert queue.failures("a") == 5
    queue.forget("a")
    assert queue.add_backoff("a") == 1.0
    assert queue.add_backoff("b", at_least=30.0) == 30.0


async def test_shut_down_wakes_every_worker(clock: ManualClock) -> None:
    queue = make(clock)
    workers = [asyncio.create_task(queue.get()) for _ in range(3)]
    await clock.advance(0)
    queue.shut_down()
    results = await asyncio.gather(*workers, return_exceptions=True)
    assert [type(result) for result in results] == [QueueShutDown] * 3


def test_backoff_of_a_huge_attempt_stays_at_its_cap() -> None:
    backoff = Backoff(base=0.1, cap=30.0)
    assert backoff.ceiling(100_000) == 30.0
    assert 15.0 <= backoff.delay(100_000, 0.3) <= 30.0
