"""Bounded retries, on a clock that the test moves."""

import pytest

from everstep.storage import AlreadyExists, MemoryStore, RetryableError, RetryingStore, RetryPolicy, StoreUnusable
from everstep.storage.faults import Fail, FaultStore, LoseResponse


class Clock:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def retrying(store: FaultStore, clock: Clock, **policy: float) -> RetryingStore:
    return RetryingStore(store, RetryPolicy(**policy), clock=clock, sleep=clock.sleep, jitter=lambda: 0.5)


def test_store_that_comes_back_within_the_outage_loses_nothing() -> None:
    clock = Clock()
    faulty = FaultStore(MemoryStore(), {n: Fail(RetryableError("away")) for n in range(12)})
    retrying(faulty, clock).put("a", b"x")
    assert faulty.get("a") == b"x"
    assert clock.now <= 75.0
    assert clock.slept == sorted(clock.slept)


def test_store_that_stays_away_fails_at_the_bound_and_says_how_often_it_tried() -> None:
    clock = Clock()
    faulty = FaultStore(MemoryStore(), {n: Fail(RetryableError("away")) for n in range(1000)})
    with pytest.raises(RetryableError, match=r"away \(gave up after \d+ attempts\)"):
        retrying(faulty, clock, outage=60.0).put("a", b"x")
    assert 50.0 <= clock.now <= 60.0
    assert len(faulty.calls) < 40


def test_terminal_error_is_not_repeated() -> None:
    clock = Clock()
    faulty = FaultStore(MemoryStore(), {0: Fail(StoreUnusable("403"))})
    with pytest.raises(StoreUnusable):
        retrying(faulty, clock).put("a", b"x")
    assert faulty.calls == ["put a"]


def test_create_whose_response_was_lost_raises_already_exists_with_the_object_in_place() -> None:
    clock = Clock()
    inner = MemoryStore()
    with pytest.raises(AlreadyExists):
        retrying(FaultStore(inner, {0: LoseResponse()}), clock).create("a", b"mine")
    assert inner.get("a") == b"mine"


@pytest.mark.parametrize("attempt", [0, 1, 5, 100, 10_000])
def test_delay_is_jittered_and_never_above_the_most(attempt: int) -> None:
    policy = RetryPolicy(first=0.2, most=5.0)
    low, high = policy.delay(attempt, 0.0), policy.delay(attempt, 0.999)
    assert 0.1 <= low < high <= 5.0
