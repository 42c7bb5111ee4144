"""The work queue, against a naive model and with waiting workers."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everstep_operator.kube.backoff import Backoff
from everstep_operator.runtime.errors import QueueFull
from everstep_operator.runtime.queue import RECENT, ROUTINE_SHARE, KeyQueue, WorkQueue
from support.clocks.manual import ManualClock

KEYS = st.sampled_from("abcde")


@dataclass
class Naive:
    """The queue as one would explain it: per key what is wanted, no heap, no lazy deletion."""

    ready: list[str] = field(default_factory=list)
    due: dict[str, float] = field(default_factory=dict)
    working: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)
    routine: list[str] = field(default_factory=list)
    taken: int = 0

    def add(self, key: str, routine: bool = False) -> None:
        if routine and (key in self.ready or key in self.routine):
            return
        self.due.pop(key, None)
        if key in self.routine:
            self.routine.remove(key)
        if key in self.working:
            self.again.add(key)
        elif routine:
            self.routine.append(key)
        elif key not in self.ready:
            self.ready.append(key)

    def take(self) -> str | None:
        if self.routine and (not self.ready or self.taken >= ROUTINE_SHARE - 1):
            self.taken = 0
            return self.routine.pop(0)
        self.taken += bool(self.ready)
        return self.ready.pop(0) if self.ready else None

    def tick(self, now: float) -> None:
        for _, key in sorted((due, key) for key, due in self.due.items() if due <= now):
            self.add(key)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue: KeyQueue[str] = KeyQueue(limit=5)
        self.model = Naive()
        self.now = 0.0

    @rule(key=KEYS, routine=st.booleans())
    def add(self, key: str, routine: bool) -> None:
        self.queue.add(key, routine=routine)
        self.model.add(key, routine)

    # Distinct delays, as two keys due at the same moment may come in either order.
    @rule(key=KEYS, delay=st.floats(0.001, 20))
    def add_after(self, key: str, delay: float) -> None:
        due = self.now + delay
        if due in self.model.due.values():
            return
        self.queue.add_after(key, delay, self.now)
        if key not in self.model.ready and key not in self.model.again and key not in self.model.routine:
            self.model.due[key] = min(due, self.model.due.get(key, due))

    @rule(seconds=st.floats(0, 10))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        self.model.tick(self.now)
        taken = self.queue.take(self.now)
        assert taken == self.model.take()
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
        assert len(self.queue) == len(self.model.ready) + len(self.model.routine)

    @rule()
    def clear(self) -> None:
        self.queue.clear()
        for held in (self.model.ready, self.model.routine, self.model.due, self.model.again):
            held.clear()


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


def make(clock: ManualClock, **kwargs: Any) -> WorkQueue[str]:
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


async def test_how_long_a_key_waited_is_counted_from_its_first_news_to_its_pass(clock: ManualClock) -> None:
    waits: list[float] = []
    queue = make(clock, on_wait=waits.append)
    queue.add("a")
    await clock.advance(2)
    queue.add("a")
    await clock.advance(1)
    await queue.get()
    queue.add("a")  # while it is worked on
    await clock.advance(5)
    queue.done("a")
    await queue.get()
    queue.done("a")
    queue.add_after("a", 60.0)  # it has no news: nothing waits
    await clock.advance(61)
    await queue.get()
    assert waits == [3.0, 5.0]


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
    queue.forget("a")
    assert queue.add_backoff("a") == 1.0
    assert queue.add_backoff("b", at_least=30.0) == 30.0


def test_backoff_of_a_huge_attempt_stays_at_its_cap() -> None:
    backoff = Backoff(base=0.1, cap=30.0)
    assert backoff.ceiling(100_000) == 30.0
    assert 15.0 <= backoff.delay(100_000, 0.3) <= 30.0


def test_news_come_before_what_is_only_looked_through_and_do_not_put_it_off_for_ever() -> None:
    queue: KeyQueue[int] = KeyQueue()
    for key in range(100):
        queue.add(key, routine=True)
    queue.add(99)
    assert queue.take(0.0) == 99
    for news in range(1000, 1100):
        queue.add(news)
    taken = [queue.take(0.0) for _ in range(80)]
    assert [key for key in taken if key is not None and key < 100] == list(range(80 // ROUTINE_SHARE))


async def test_paused_queue_keeps_only_the_news_of_the_last_moments(clock: ManualClock) -> None:
    queue = make(clock)
    queue.add("a")
    queue.add_backoff("b")
    queue.add("c", routine=True)
    queue.pause()
    queue.add_after("d", 1.0)
    await clock.advance(20)
    queue.add("e")
    assert len(queue) == 0
    await clock.advance(20)
    for n in range(1000):
        queue.add(str(n))
        await clock.advance(1)
    assert len(queue._news) <= RECENT + 1
    queue.add("f")
    queue.resume()
    assert [await queue.get() for _ in range(len(queue))] == [*map(str, range(970, 1000)), "f"]
    assert queue._failures == {}
    assert queue._news == {}
