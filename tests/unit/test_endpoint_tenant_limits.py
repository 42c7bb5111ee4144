"""Shares and rates: whatever some take, the next one gets its part; what ends leaves nothing behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.endpoint.tenant_limits import Rates, Shares, Tenant

HOSTILE = st.builds(
    Tenant,
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["", "j1", "j2"]),
    st.sampled_from([f"p{i}" for i in range(6)]),
)
ME = Tenant("me", "job", "pod")


@given(st.lists(st.tuples(HOSTILE, st.integers(1, 3)), max_size=400))
def test_whatever_three_namespaces_take_a_fourth_gets_a_fifth_of_all(wishes: list[tuple[Tenant, int]]) -> None:
    shares = Shares(1000)
    for tenant, amount in wishes * 5:
        shares.reserve(tenant, amount)
    mine = 0
    # Each of my pods has its part of what is free: what pods of one namespace can have together.
    for number in range(200):
        mine += sum(shares.reserve(Tenant("me", f"job{number}", f"pod{number}")) for _ in range(10))
    assert mine >= 195


@given(st.lists(st.tuples(HOSTILE, st.integers(1, 40)), max_size=200), st.data())
def test_what_is_given_back_is_forgotten(wishes: list[tuple[Tenant, int]], data: st.DataObject) -> None:
    shares = Shares(300)
    held = [(tenant, amount) for tenant, amount in wishes if shares.reserve(tenant, amount)]
    assert shares.used == sum(amount for _, amount in held) <= 300
    for tenant, amount in data.draw(st.permutations(held)):
        shares.release(tenant, amount)
    assert (shares.used, len(shares)) == (0, 0)


def test_job_and_pod_leave_room_for_their_neighbours() -> None:
    shares = Shares(64)
    pod = sum(shares.reserve(Tenant("a", "j1", "p1")) for _ in range(64))
    others = sum(shares.reserve(Tenant("a", "j1", f"p{i}")) for i in range(2, 50) for _ in range(64))
    job = sum(shares.reserve(Tenant("a", "j2", "p99")) for _ in range(64))
    stranger = sum(shares.reserve(Tenant("b", "j", "p")) for _ in range(64))
    assert pod == 13
    assert others >= 8
    assert job >= 4
    assert stranger >= 4
    assert pod + others + job + stranger < 64


def test_one_alone_may_have_what_one_needs() -> None:
    assert Shares(1).reserve(ME)
    assert Shares(64).reserve(ME, 64)
    assert not Shares(64).reserve(ME, 65)


@given(st.lists(st.tuples(st.floats(0, 0.2), st.sampled_from(["p1", "p2"])), max_size=300))
def test_rate_is_kept_by_pod_and_by_job_whatever_the_times(calls: list[tuple[float, str]]) -> None:
    rates, now, passed = Rates(10, 5, (1e9, 1.5, 1.0)), 0.0, {"p1": 0, "p2": 0}
    for pause, name in calls:
        now += pause
        if rates.spend(Tenant("a", "j", name), 1, now) is not None:
            passed[name] += 1
    for count in passed.values():
        assert count <= 5 + 10 * now + 1
    assert sum(passed.values()) <= 1.5 * (5 + 10 * now) + 1


def test_who_waits_is_told_how_long_and_who_would_wait_too_long_spends_nothing() -> None:
    rates = Rates(10, 2)
    waits = [rates.spend(ME, 1, 0.0, patience=0.25) for _ in range(20)]
    given_at = [wait for wait in waits if wait is not None]
    assert given_at == [0, 0, 0, 0.1, 0.2]
    assert rates.spend(ME, 1, 1.0) == 0  # what was refused costs no time later


def test_other_namespaces_rate_is_its_own() -> None:
    rates = Rates(1, 1)
    while rates.spend(Tenant("a", "j", "p"), 1, 0.0) is not None:
        pass
    assert rates.spend(ME, 1, 0.0) == 0


def test_memory_of_rates_is_bounded() -> None:
    rates = Rates(1, 1)
    for i in range(30_000):
        rates.spend(Tenant("a", "j", f"p{i}"), 0.0, float(i))
    assert len(rates) <= 50_000


def test_buckets_that_are_full_again_are_forgotten() -> None:
    rates = Rates(rate=1.0, burst=10.0)
    for second in range(1000):
        rates.spend(Tenant("ns", f"job{second}", f"pod{second}"), 1.0, float(second))
    assert len(rates) < 20
