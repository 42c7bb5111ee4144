"""The controller: errors stay with their key, and nothing runs without leadership."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import pytest

from everstep_operator.kube.backoff import Backoff
from everstep_operator.kube.errors import Conflict, Forbidden, TooManyRequests
from everstep_operator.runtime.control_loop import Blocked, Controller, ControllerLimits, Result, Succeeded, WillRetry
from everstep_operator.runtime.errors import NotLeading
from everstep_operator.runtime.queue import WorkQueue
from support.clocks.manual import ManualClock


class Gate:
    """Leadership that the test hands out."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self._changed = asyncio.Event()

    def set(self, epoch: int | None) -> None:
        self.epoch = epoch
        self._changed.set()

    async def wait_leading(self) -> int:
        while self.epoch is None:
            self._changed.clear()
            await self._changed.wait()
        return self.epoch

    async def wait_lost(self, epoch: int) -> str:
        while self.epoch == epoch:
            self._changed.clear()
            await self._changed.wait()
        return "told so"


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.gate = Gate()
        self.queue: WorkQueue[str] = WorkQueue(self.clock, lambda: 1.0, backoff=Backoff(base=1.0, cap=16.0))
        self.passes: list[tuple[float, str]] = []
        self.running: set[str] = set()
        self.behaviour: dict[str, Callable[[], Result]] = {}
        self.takes: dict[str, float] = {}
        self.keys: list[str] = []
        self.outcomes: list[tuple[str, object]] = []
        self.controller: Controller[str] = Controller(
            "jobs",
            self.reconcile,
            self.queue,
            leadership=self.gate,
            all_keys=lambda: self.keys,
            clock=self.clock,
            limits=ControllerLimits(workers=3, pass_seconds=20, terminal_retry=60),
            on_outcome=lambda key, outcome, _seconds: self.outcomes.append((key, outcome)),
        )
        self.task = asyncio.create_task(self.controller.run())

    async def reconcile(self, key: str) -> Result:
        assert key not in self.running
        self.running.add(key)
        try:
            await self.clock.sleep(self.takes.get(key, 0))
            self.passes.append((self.clock.monotonic(), key))
            return self.behaviour.get(key, lambda: Result("nothing to do"))()
        finally:
            self.running.discard(key)

    def last(self, key: str) -> object:
        """How the last pass over it ended."""
        return next((outcome for of, outcome in reversed(self.outcomes) if of == key), None)

    def times(self, key: str) -> list[float]:
        return [time for time, passed in self.passes if passed == key]


@pytest.fixture
async def bench() -> AsyncGenerator[Bench, None]:
    made = Bench()
    yield made
    made.task.cancel()
    with suppress(asyncio.CancelledError):
        await made.task


def fail(error: Exception) -> Callable[[], Result]:
    def behave() -> Result:
        raise error

    return behave


async def test_follower_collects_keys_and_passes_them_only_when_it_leads(bench: Bench) -> None:
    bench.queue.add("a")
    bench.keys = ["a", "b"]
    await bench.clock.advance(10)
    assert bench.passes == []
    bench.gate.set(1)
    await bench.clock.advance(1)
    assert sorted(key for _, key in bench.passes) == ["a", "b"]


async def test_pass_that_runs_when_leadership_ends_is_cut_and_done_anew_in_the_next_term(bench: Bench) -> None:
    bench.keys = ["slow"]
    bench.takes["slow"] = 10
    bench.gate.set(1)
    await bench.clock.advance(5)
    assert bench.running == {"slow"}
    bench.gate.set(None)
    await bench.clock.advance(0)
    assert bench.running == set()
    await bench.clock.advance(30)
    assert bench.passes == []
    bench.gate.set(2)
    await bench.clock.advance(11)
    assert len(bench.times("slow")) == 1


async def test_requeue_after_brings_the_key_back_at_its_time(bench: Bench) -> None:
    bench.behaviour["a"] = lambda: Result("waits for pods", requeue_after=7.0)
    bench.gate.set(1)
    bench.queue.add("a")
    await bench.clock.advance(15)
    assert bench.times("a") == [0.0, 7.0, 14.0]


async def test_poisoned_key_backs_off_while_others_go_on(bench: Bench) -> None:
    bench.behaviour["bad"] = fail(ZeroDivisionError("a bug"))
    bench.gate.set(1)
    bench.queue.add("bad")
    for _ in range(20):
        bench.queue.add("good")
        await bench.clock.advance(1)
    assert bench.times("bad") == [0.0, 1.0, 3.0, 7.0, 15.0]
    assert len(bench.times("good")) == 20
    assert isinstance(bench.last("bad"), WillRetry)
    assert isinstance(bench.last("good"), Succeeded)


async def test_success_ends_the_trouble_and_the_backoff(bench: Bench) -> None:
    bench.behaviour["a"] = fail(Conflict("moved on"))
    bench.gate.set(1)
    bench.queue.add("a")
    await bench.clock.advance(2)
    del bench.behaviour["a"]
    await bench.clock.advance(5)
    assert isinstance(bench.last("a"), Succeeded)
    assert bench.queue.add_backoff("a") == 1.0


async def test_retry_after_of_the_server_is_kept(bench: Bench) -> None:
    bench.behaviour["a"] = fail(TooManyRequests("slow down", retry_after=9.0))
    bench.gate.set(1)
    bench.queue.add("a")
    await bench.clock.advance(10)
    assert bench.times("a") == [0.0, 9.0]


async def test_terminal_error_is_recorded_and_looked_at_again_slowly_or_on_an_event(bench: Bench) -> None:
    bench.behaviour["a"] = fail(Forbidden("RBAC revoked"))
    bench.gate.set(1)
    bench.queue.add("a")
    await bench.clock.advance(50)
    assert bench.times("a") == [0.0]
    trouble = bench.last("a")
    assert isinstance(trouble, Blocked)
    assert "RBAC revoked" in str(trouble.error)
    bench.queue.add("a")
    await bench.clock.advance(0)
    assert bench.times("a") == [0.0, 50.0]
    await bench.clock.advance(60)
    assert bench.times("a") == [0.0, 50.0, 110.0]


async def test_pass_without_end_is_cut_at_its_limit_and_retried(bench: Bench) -> None:
    bench.takes["a"] = 1e6
    bench.gate.set(1)
    bench.queue.add("a")
    await bench.clock.advance(20.5)
    trouble = bench.last("a")
    assert isinstance(trouble, WillRetry)
    assert isinstance(trouble.error, TimeoutError)
    bench.takes.clear()
    await bench.clock.advance(2)
    assert len(bench.times("a")) == 1


async def test_pass_refused_for_lack_of_leadership_is_no_trouble_of_the_key(bench: Bench) -> None:
    bench.behaviour["a"] = fail(NotLeading("the renew deadline passed"))
    bench.gate.set(1)
    bench.queue.add("a")
    await bench.clock.advance(5)
    assert bench.times("a") == [0.0]
    assert bench.last("a") is None


async def test_events_during_a_pass_cause_one_more_pass_never_two_at_once(bench: Bench) -> None:
    bench.takes["a"] = 2
    bench.gate.set(1)
    bench.queue.add("a")
    await bench.clock.advance(1)
    for _ in range(50):
        bench.queue.add("a")
    await bench.clock.advance(10)
    assert bench.times("a") == [2.0, 4.0]


async def test_news_of_a_new_term_do_not_wait_for_every_other_key(bench: Bench) -> None:
    """A leader that lost its Lease for a moment looked at all jobs first: a lost worker waited 12 s to be replaced."""
    bench.keys = [f"job-{n:03}" for n in range(300)]
    bench.takes = dict.fromkeys(bench.keys, 1.0)
    await bench.clock.advance(1)
    bench.queue.add("job-298")  # it comes while nobody leads
    await bench.clock.advance(1)
    bench.gate.set(1)
    await bench.clock.advance(0.5)
    bench.queue.add("job-299")
    await bench.clock.advance(3)
    assert bench.times("job-298")
    assert bench.times("job-299")
    await bench.clock.advance(200)
    assert {key for _, key in bench.passes} == set(bench.keys)


async def test_nothing_is_remembered_of_keys_that_are_gone_nor_by_a_follower(bench: Bench) -> None:
    bench.gate.set(1)
    await bench.clock.advance(0)
    for n in range(100):
        bench.behaviour[f"gone-{n}"] = lambda: Result("the job is gone", gone=True)
        bench.queue.add(f"gone-{n}")
        bench.behaviour[f"failing-{n}"] = fail(Conflict("no"))
        bench.queue.add(f"failing-{n}")
    await bench.clock.advance(10)
    assert not [key for key in bench.controller._reasons if key.startswith("gone")]
    bench.gate.set(None)
    await bench.clock.advance(1)
    for n in range(100):
        bench.queue.add(f"later-{n}")
    assert len(bench.queue) == 0
    await bench.clock.advance(60)
    bench.gate.set(2)
    await bench.clock.advance(1)
    assert bench.controller._reasons == {}


async def test_passes_without_end_leave_most_turns_of_the_event_loop_to_the_lease() -> None:
    """The Lease is renewed in the event loop that also plans. A plan of 1,000 workers takes at most some 70 ms of the
    processor, and a renewal some ten turns of the loop: with a plan in each turn it would take most of a second."""
    clock, gate, begun = ManualClock(), Gate(), 0
    queue: WorkQueue[str] = WorkQueue(clock, lambda: 1.0)

    async def reconcile(key: str) -> Result:
        nonlocal begun
        begun += 1
        return Result("more to do", 0.0)

    controller: Controller[str] = Controller(
        "jobs", reconcile, queue, leadership=gate, all_keys=lambda: map(str, range(64)), clock=clock
    )
    task = asyncio.create_task(controller.run())
    try:
        gate.set(1)
        for _ in range(1000):  # until every worker is busy
            await asyncio.sleep(0)
        before = begun
        for _ in range(200):
            await asyncio.sleep(0)
        assert 0 < begun - before <= 21
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
