"""Bounded retries at the pace that a store allows, on a clock that the test moves."""

import logging
import random

import pytest

from everstep.storage import (
    AlreadyExists,
    MemoryStore,
    NotFound,
    RetryableError,
    RetryingStore,
    RetryPolicy,
    StoreUnusable,
    Throttled,
)
from everstep.storage.faults import Fail, FaultStore, LoseResponse
from everstep.storage.rate_limit import CEILING, FLOOR, Pacer, pacer_for


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
    return RetryingStore(
        store, RetryPolicy(**policy), pacer=Pacer(), clock=clock, sleep=clock.sleep, jitter=lambda: 0.5
    )


def asking(seconds: float) -> RetryableError:
    error = RetryableError("503")
    error.retry_after = seconds
    return error


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


def test_reason_is_said_while_it_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    faulty = FaultStore(MemoryStore(), {n: Fail(RetryableError("no space left on device")) for n in range(1000)})
    store = retrying(faulty, Clock(), outage=75.0)
    with caplog.at_level(logging.WARNING, "everstep.storage"), pytest.raises(RetryableError):
        store.put("a", b"")
    (said,) = caplog.messages  # once, and long before it is given up
    assert "no space left on device: trying again, for 6" in said


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


def test_waiting_for_a_store_leaves_the_scripts_own_generator_alone() -> None:
    clock, before = Clock(), random.getstate()
    faulty = FaultStore(MemoryStore(), {n: Fail(RetryableError("away")) for n in range(3)})
    with pytest.raises(NotFound):
        RetryingStore(faulty, pacer=Pacer(), clock=clock, sleep=clock.sleep).get("a")
    assert len(clock.slept) == 3
    assert random.getstate() == before


def test_burst_of_slow_downs_longer_than_an_outage_is_waited_out() -> None:
    clock = Clock()
    faulty = FaultStore(MemoryStore(), {n: Fail(Throttled("SlowDown")) for n in range(50)})
    retrying(faulty, clock).put("a", b"x")
    assert faulty.get("a") == b"x"
    assert 75.0 < clock.now < 600.0
    assert len(faulty.calls) == 52


def test_store_that_only_ever_says_slow_down_fails_at_its_own_bound() -> None:
    clock = Clock()
    faulty = FaultStore(MemoryStore(), {n: Fail(Throttled("SlowDown")) for n in range(10_000)})
    with pytest.raises(Throttled, match="gave up after"):
        retrying(faulty, clock, throttled=300.0).put("a", b"x")
    assert 250.0 <= clock.now <= 300.0


def test_wait_that_the_store_asks_for_is_kept_and_bounded() -> None:
    clock = Clock()
    faulty = FaultStore(MemoryStore(), {0: Fail(asking(7.0)), 1: Fail(asking(10_000.0))})
    retrying(faulty, clock).put("a", b"x")
    assert clock.slept == [7.0, 60.0]


def test_pace_is_free_until_the_store_complains_then_halves_and_comes_back() -> None:
    pacer = Pacer()
    assert all(pacer.reserve(n / 100) == 0 for n in range(400))  # 100 requests a second for 4 s
    pacer.throttled(4.0)
    assert pacer.rate == pytest.approx(50, rel=0.05)
    for _ in range(20):  # the other refusals of the same burst
        pacer.throttled(4.5)
    assert pacer.rate == pytest.approx(50, rel=0.05)
    pacer.throttled(5.5)
    assert pacer.rate == pytest.approx(25, rel=0.05)
    now, rates = 5.5, []
    while pacer.rate is not None and now < 100:
        now += pacer.reserve(now) + 0.01
        pacer.succeeded(now)
        rates.append(pacer.rate or CEILING)
    assert rates == sorted(rates)
    assert 30 < now < 60  # a gentle way back, and then no limit


def test_pace_spaces_requests_and_never_falls_below_its_floor() -> None:
    pacer = Pacer()
    for second in range(50):
        pacer.throttled(float(second))
    assert pacer.rate == FLOOR
    waits = [pacer.reserve(50.0) for _ in range(4)]
    assert waits == pytest.approx([0, 1, 2, 3])


def test_stores_of_one_bucket_share_their_pace() -> None:
    assert pacer_for("s3://bucket/job-a/x") is pacer_for("s3://bucket/job-b")
    assert pacer_for("s3://bucket/job-a") is not pacer_for("s3://other/job-a")


def test_listed_object_that_is_not_found_is_asked_for_again() -> None:
    # A gateway that stops answers 404 for what exists.
    clock = Clock()
    inner = MemoryStore()
    inner.put("log/1", b"x")
    faulty = FaultStore(inner, {0: Fail(NotFound("404")), 2: Fail(NotFound("404"))})
    assert retrying(faulty, clock).get("log/1") == b"x"
    assert faulty.calls == ["get log/1", "list log/", "get log/1", "list log/", "get log/1"]
    buffer = bytearray(1)
    faulty = FaultStore(inner, {0: Fail(NotFound("404"))})
    retrying(faulty, clock).get_into("log/1", 0, memoryview(buffer))
    assert buffer == b"x"


def test_object_that_is_not_listed_either_is_missing_at_once() -> None:
    clock = Clock()
    faulty = FaultStore(MemoryStore())
    with pytest.raises(NotFound):
        retrying(faulty, clock).get("log/1")
    assert faulty.calls == ["get log/1", "list log/"]
    assert clock.now == 0


def test_deleted_object_that_a_stale_listing_names_is_missing_within_the_bound() -> None:
    class Stale(MemoryStore):
        def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
            raise NotFound(name)

    clock = Clock()
    stale = Stale()
    stale.put("log/1", b"x")
    with pytest.raises(NotFound):
        retrying(FaultStore(stale), clock).get("log/1")
    assert 5.0 < clock.now <= 10.0
