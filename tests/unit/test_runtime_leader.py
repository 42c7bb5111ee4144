"""Leader election: never two, whatever stops, lags or jumps; always one again soon."""

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everstep_operator.kube.errors import AlreadyExists, Conflict, ConnectionFailed, NotFound
from everstep_operator.kube.wire import Lease, LeaseSpec, ObjectMeta
from everstep_operator.runtime.errors import NotLeading
from everstep_operator.runtime.leader import Following, LeaderElector, Leadership, Leading, LeaseTiming, address_of
from everstep_operator.runtime.leader_probe import UNANSWERED, Health
from everstep_operator.runtime.leaderless import NOTICE, Leaderless
from support.clocks.manual import ManualClock


class Leases:
    """One Lease with compare-and-swap."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self.version = 0

    def get(self) -> Lease:
        if self.lease is None:
            raise NotFound("no lease")
        return self.lease

    def store(self, body: dict[str, Any]) -> Lease:
        self.version += 1
        spec = body["spec"]
        self.lease = Lease(
            metadata=ObjectMeta(name="lease", resource_version=str(self.version)),
            spec=LeaseSpec(
                holder_identity=spec["holderIdentity"],
                lease_duration_seconds=spec["leaseDurationSeconds"],
                lease_transitions=spec["leaseTransitions"],
            ),
        )
        return self.lease


@dataclass
class Link:
    """One replica's way to the server; `latency` each way, in seconds."""

    leases: Leases
    clock: "Stoppable"
    latency: float = 0.01
    down: bool = False
    lose_responses: bool = False
    requests: list[str] = field(default_factory=list)

    async def _there(self, verb: str) -> None:
        self.requests.append(verb)
        await self.clock.inner.sleep(self.latency)
        if self.down:
            raise ConnectionFailed("down")

    async def _back(self) -> None:
        if self.lose_responses or self.down:
            raise ConnectionFailed("response lost")
        await self.clock.sleep(self.latency)

    async def get(self, *_: Any) -> Lease:
        await self._there("get")
        lease = self.leases.get()
        await self._back()
        return lease

    async def create(self, _r: Any, _n: Any, body: dict[str, Any]) -> Lease:
        await self._there("create")
        if self.leases.lease is not None:
            raise AlreadyExists("taken")
        lease = self.leases.store(body)
        await self._back()
        return lease

    async def replace(self, _r: Any, _n: Any, _name: str, body: dict[str, Any]) -> Lease:
        await self._there("replace")
        if body["metadata"]["resourceVersion"] != self.leases.get().metadata.resource_version:
            raise Conflict("moved on")
        lease = self.leases.store(body)
        await self._back()
        return lease


class Stoppable:
    """A replica's view of the common clock; while it is stopped, as by SIGSTOP, nothing of it runs but time passes."""

    def __init__(self, inner: ManualClock) -> None:
        self.inner = inner
        self._running = asyncio.Event()
        self._running.set()
        self.stopped_at = math.inf

    def monotonic(self) -> float:
        return self.inner.monotonic()

    def now(self) -> Any:
        return self.inner.now()

    async def sleep(self, seconds: float) -> None:
        await self.inner.sleep(seconds)
        await self._running.wait()

    def stop(self) -> None:
        self._running.clear()
        self.stopped_at = min(self.stopped_at, self.monotonic())

    def go_on(self) -> None:
        self._running.set()
        self.stopped_at = math.inf


@dataclass
class Replica:
    identity: str
    clock: Stoppable
    link: Link
    elector: LeaderElector
    changes: list[Leadership]
    task: "asyncio.Task[None] | None" = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.elector.run())

    async def shut_down(self) -> None:
        assert self.task is not None
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


@dataclass
class World:
    clock: ManualClock = field(default_factory=ManualClock)
    leases: Leases = field(default_factory=Leases)
    replicas: list[Replica] = field(default_factory=list)
    health: dict[str, Health] = field(default_factory=dict)  # by address

    def replica(self, identity: str, *, alone: bool = False) -> Replica:
        clock = Stoppable(self.clock)
        link = Link(self.leases, clock)
        changes: list[Leadership] = []
        elector = LeaderElector(
            link,  # type: ignore[arg-type]
            namespace="everstep",
            name="lease",
            identity=identity,
            clock=clock,
            rng=lambda: 0.5,
            on_change=changes.append,
            health=self._health,
            alone=alone,
        )
        made = Replica(identity, clock, link, elector, changes)
        self.replicas.append(made)
        return made

    def _health(self, address: str) -> Health:
        """What a probe would find of a process that stands still, unless the test says something else."""
        if address in self.health:
            return self.health[address]
        stopped = [r.clock.stopped_at for r in self.replicas if address_of(r.identity) == address]
        unanswered = self.clock.monotonic() - min(stopped, default=math.inf)
        return Health.STILL if unanswered >= UNANSWERED else Health.ANSWERS

    async def advance(self, seconds: float, step: float = 0.1) -> None:
        """Let time pass, watching that there are never two leaders."""
        for _ in range(round(seconds / step)):
            await self.clock.advance(step)
            assert sum(replica.elector.is_leader() for replica in self.replicas) <= 1

    async def end(self) -> None:
        tasks = [replica.task for replica in self.replicas if replica.task is not None]
        for replica in self.replicas:
            replica.clock.go_on()
            if replica.task is not None:
                replica.task.cancel()
        closing = asyncio.gather(*tasks, return_exceptions=True)
        while not closing.done():
            await self.clock.advance(1)


@pytest.fixture
async def world() -> Any:
    made = World()
    yield made
    await made.end()


async def pair(world: World) -> tuple[Replica, Replica]:
    a, b = world.replica("a_10.0.0.1:8080"), world.replica("b_10.0.0.2:8080")
    a.start()
    await world.advance(1)
    b.start()
    await world.advance(2)
    assert a.elector.is_leader()
    return a, b


async def test_first_replica_leads_at_once_and_the_other_knows_where(world: World) -> None:
    a, b = await pair(world)
    assert await a.elector.wait_leading() == a.elector.require() == 1
    assert a.elector.holder_address() == b.elector.holder_address() == "10.0.0.1:8080"
    with pytest.raises(NotLeading, match=r"b_.* may not write: held by a_"):
        b.elector.require()


async def test_renewal_that_is_answered_after_the_deadline_revives_no_term(world: World) -> None:
    """Its term has ended for those that wait, and they would hear of no other while the Lease is renewed for ever."""
    one = world.replica("a_10.0.0.1:8080")
    one.link.latency = 0
    await one.elector._attempt()
    one.elector._announce()
    ended = asyncio.create_task(one.elector.wait_lost(1))
    lease = world.leases.get()
    await world.advance(4.5)
    assert ended.done()
    begins = asyncio.create_task(one.elector.wait_leading())
    await world.advance(0.1)
    one.elector._won(lease, 3.0)  # sent before the deadline, and read by a busy loop only now
    one.elector._announce()
    await one.elector._attempt()
    one.elector._announce()
    await world.advance(0.1)
    assert begins.done()
    assert begins.result() == one.elector.require() == 2


async def test_released_lease_is_taken_over_within_a_retry_under_a_new_epoch(world: World) -> None:
    a, b = await pair(world)
    await_shutdown = asyncio.create_task(a.shut_down())
    await world.advance(1.5)
    assert await_shutdown.done()
    assert b.elector.require() == 2
    assert not a.elector.is_leader()


async def test_lease_is_released_though_the_shutdown_cut_off_a_renewal_that_was_written(world: World) -> None:
    a, b = await pair(world)
    a.link.latency = 0.2
    version = world.leases.version
    while world.leases.version == version:  # written; its answer is under way
        await world.clock.advance(0.05)
    await_shutdown = asyncio.create_task(a.shut_down())
    await world.advance(1.5)
    assert await_shutdown.done()
    assert b.elector.require() == 2


async def test_renewal_is_one_request_and_bears_an_api_server_that_takes_1_5_s(world: World) -> None:
    a, _ = await pair(world)
    a.link.latency = 0.75
    a.link.requests.clear()
    await world.advance(30)
    assert a.elector.require() == 1
    assert set(a.link.requests) == {"replace"}


async def test_leader_that_answers_and_renews_no_more_is_replaced_after_the_lease_duration(world: World) -> None:
    a, b = await pair(world)
    a.link.down = True
    await world.advance(5)
    assert not b.elector.is_leader()
    await world.advance(3.5)
    assert b.elector.require() == 2


async def test_leader_that_is_gone_is_replaced_when_its_renewals_stopped_for_a_third_of_the_lease(world: World) -> None:
    a, b = await pair(world)
    a.clock.stop()
    a.link.down = True
    stopped = world.clock.monotonic()
    await world.clock.advance(0.5)
    world.health["10.0.0.1:8080"] = Health.GONE
    assert b.elector.holder_address() is None, "nobody is sent there any more"
    while not b.elector.is_leader():
        await world.clock.advance(0.1)
    seconds = world.clock.monotonic() - stopped
    assert 1.0 < seconds < 2.8, "it had renewed a moment before it stopped, and the other looks twice a second"
    assert b.elector.require() == 2
    # What it still believes ends by its own clock, or when it reaches the API server: whichever is first.
    a.clock.go_on()
    a.link.down = False
    await world.clock.advance(1.5)
    assert not a.elector.is_leader()


async def test_frozen_leader_is_replaced_in_half_its_lease_and_thaws_as_a_follower(world: World) -> None:
    a, b = await pair(world)
    a.link.requests.clear()
    while not a.link.requests:  # it has just renewed
        await world.advance(0.1)
    await world.advance(0.1)
    a.clock.stop()
    frozen = world.clock.monotonic()
    while not b.elector.is_leader():
        await world.advance(0.1)
    assert UNANSWERED <= world.clock.monotonic() - frozen < 4.0
    assert b.elector.require() == 2
    a.clock.go_on()
    # Nothing of it has run yet: its very next write is refused.
    with pytest.raises(NotLeading, match="renew deadline"):
        a.elector.require()
    await world.advance(2)
    assert [isinstance(state, Leading) for state in a.changes] == [True, False]
    assert b.elector.require() == 2


async def test_leader_that_stands_still_for_two_seconds_again_and_again_keeps_its_term(world: World) -> None:
    """As on a machine with twenty processes for each processor."""
    a, _ = await pair(world)
    for _ in range(20):
        a.clock.stop()
        await world.advance(2.0)
        a.clock.go_on()
        await world.advance(0.7)
    assert a.elector.require() == 1
    assert len(a.changes) == 1


async def test_leader_that_thaws_before_another_leads_begins_a_new_term(world: World) -> None:
    """Nobody could renew at it, and whoever keeps a memory for a term has to know that."""
    a, b = await pair(world)
    b.link.down = True
    a.clock.stop()
    await world.advance(2.8)
    a.clock.go_on()
    await world.advance(2)
    assert a.elector.require() == 2
    assert [isinstance(state, Leading) for state in a.changes] == [True, False, True]


async def test_renewal_that_was_sent_before_a_pause_ends_no_doubt_after_it(world: World) -> None:
    a, _ = await pair(world)
    a.link.latency = 0.3
    a.link.requests.clear()
    while not a.link.requests:
        await world.clock.advance(0.05)
    a.clock.stop()  # while that renewal is under way
    await world.advance(2.6)
    a.clock.go_on()
    await world.clock.advance(0.0)
    assert not a.elector.is_leader()


async def test_leader_that_renews_is_not_replaced_whoever_says_that_it_is_gone(world: World) -> None:
    """The replicas do not reach each other, and both reach the API server."""
    a, b = await pair(world)
    world.health |= dict.fromkeys(("10.0.0.1:8080", "10.0.0.2:8080"), Health.GONE)
    await world.advance(60)
    assert a.elector.require() == 1
    assert b.elector.holder_address() is None
    assert (a.elector.other_holder_address(), b.elector.other_holder_address()) == (None, "10.0.0.1:8080")


async def test_leader_that_only_stopped_renewing_has_its_whole_lease(world: World) -> None:
    a, b = await pair(world)
    world.health["10.0.0.9:8080"] = Health.GONE
    a.link.down = True
    await world.advance(2)
    assert a.elector.is_leader()
    await world.advance(3)
    assert not b.elector.is_leader()


async def test_leader_whose_answers_and_renewals_are_lost_while_it_runs_leads_with_nobody(world: World) -> None:
    """It does not stand still: whoever says so is misled by the network. `advance` watches that there are never two."""
    a, b = await pair(world)
    world.health["10.0.0.1:8080"] = Health.STILL
    a.link.down = True
    await world.advance(6)
    assert b.elector.require() == 2


async def test_leader_stopped_for_a_minute_may_not_write_when_it_wakes(world: World) -> None:
    a, b = await pair(world)
    a.clock.stop()
    await world.advance(60)
    assert b.elector.is_leader()
    a.clock.go_on()
    # Before anything of it runs: the very next write must be refused.
    with pytest.raises(NotLeading, match="renew deadline"):
        a.elector.require()
    await world.advance(5)
    assert b.elector.require() == 2
    assert isinstance(a.elector.state(), Following)


async def test_leader_without_lease_api_stops_by_the_renew_deadline_and_its_term_ends(world: World) -> None:
    a, _ = await pair(world)
    lost = asyncio.create_task(a.elector.wait_lost(1))
    for replica in world.replicas:
        replica.link.down = True
    await world.advance(4.2)
    assert not a.elector.is_leader()
    assert lost.done()
    for replica in world.replicas:
        replica.link.down = False
    await world.advance(9)
    assert sum(replica.elector.is_leader() for replica in world.replicas) == 1


async def test_one_lost_renewal_does_not_cost_the_leadership(world: World) -> None:
    a, _ = await pair(world)
    a.link.lose_responses = True
    await world.advance(1.5)
    a.link.lose_responses = False
    await world.advance(10)
    assert a.elector.require() == 1


async def test_wall_clock_jumps_change_nothing(world: World) -> None:
    a, _ = await pair(world)
    for jump in (3600, -7200, 3600):
        world.clock.jump_wall(jump)
        await world.advance(10)
        assert a.elector.require() == 1


async def test_deleted_lease_is_made_again_by_its_leader_in_the_same_epoch(world: World) -> None:
    a, _ = await pair(world)
    world.leases.lease = None
    await world.advance(10)
    assert a.elector.require() == 1


async def test_deleted_lease_is_not_taken_while_its_holder_may_believe_in_it(world: World) -> None:
    a, b = await pair(world)
    a.clock.stop()
    world.leases.lease = None
    await world.advance(3)
    assert not b.elector.is_leader()
    await world.advance(5)
    assert b.elector.require() == 2


async def test_deleted_lease_is_not_taken_by_one_that_was_cut_off_while_others_renewed_it(world: World) -> None:
    a, b = await pair(world)
    b.link.down = True
    await world.advance(20)
    world.leases.lease = None
    b.link.down = False
    await world.advance(10)
    assert a.elector.require() == 1


async def test_restarted_process_of_the_holder_leads_at_once_in_a_later_epoch(world: World) -> None:
    a, _ = await pair(world)
    a.clock.stop()
    again = world.replica("a_10.0.0.1:8080")
    world.replicas.remove(a)
    again.start()
    await world.advance(1)
    assert again.elector.require() == 2
    a.clock.go_on()
    assert a.task is not None
    a.task.cancel()


async def test_replica_whose_own_time_ran_out_does_not_redirect_to_itself(world: World) -> None:
    a, b = await pair(world)
    a.link.down = b.link.down = True
    await world.advance(5)
    assert a.elector.holder_address() is None


async def test_changes_are_announced_once_each(world: World) -> None:
    a, b = await pair(world)
    a.clock.stop()
    await world.advance(20)
    a.clock.go_on()
    await world.advance(5)
    assert [type(change).__name__ for change in a.changes] == ["Leading", "Following"]
    assert [type(change).__name__ for change in b.changes] == ["Leading"]


def test_address_is_what_follows_the_first_underscore() -> None:
    assert address_of("everstep-operator-7d9f-x2x_10.0.0.5:8080") == "10.0.0.5:8080"
    assert address_of("no-address") is None


def test_timing_that_could_have_two_leaders_is_refused() -> None:
    with pytest.raises(ValueError, match="renew_deadline < duration"):
        LeaseTiming(duration=4, renew_deadline=4.0)


FAULTS = st.sampled_from(
    ["stop", "go on", "cut", "heal", "lose", "slow", "quick", "jump", "delete", "accused", "cleared"]
)


LATE = [(2, "cut", 6.8), (0, "slow", 3.2), (0, "lose", 3.8), (0, "heal", 2.6), (0, "delete", 0.2), (2, "heal", 0.5)]


@settings(max_examples=40, deadline=None)
@example(script=LATE)
@example(script=[(0, "accused", 0.2), (0, "cut", 7.0)])
@given(script=st.lists(st.tuples(st.integers(0, 2), FAULTS, st.floats(0.2, 7.0)), max_size=10))
def test_there_are_never_two_leaders_and_one_again_once_faults_end(script: list[tuple[int, str, float]]) -> None:
    async def play(world: World) -> None:
        for name in "abc":
            world.replica(f"{name}_{name}:1").start()
        await world.advance(2, step=0.2)
        epochs: list[int] = []
        for index, fault, seconds in script:
            replica = world.replicas[index]
            match fault:
                case "stop":
                    replica.clock.stop()
                case "go on":
                    replica.clock.go_on()
                case "cut" | "heal":
                    replica.link.down = fault == "cut"
                    replica.link.lose_responses = False
                case "lose":
                    replica.link.lose_responses = True
                case "slow" | "quick":
                    replica.link.latency = 0.9 if fault == "slow" else 0.01
                case "jump":
                    world.clock.jump_wall(3600)
                case "delete":
                    world.leases.lease = None
                case "accused":  # its answers to the probes of others are lost, whether it runs or not
                    world.health[address_of(replica.identity) or ""] = Health.STILL
                case "cleared":
                    world.health.pop(address_of(replica.identity) or "", None)
            await world.advance(seconds, step=0.2)
            epochs += [r.elector.require() for r in world.replicas if r.elector.is_leader()]
        world.health.clear()
        for replica in world.replicas:
            replica.clock.go_on()
            replica.link.down = replica.link.lose_responses = False
            replica.link.latency = 0.01
        await world.advance(14, step=0.2)
        assert sum(replica.elector.is_leader() for replica in world.replicas) == 1
        assert epochs == sorted(epochs)

    async def play_and_end() -> None:
        world = World()
        try:
            await play(world)
        finally:  # also of a play that failed: replicas wait for this clock when they are cancelled
            await world.end()

    asyncio.run(play_and_end())


@pytest.mark.parametrize(("alone", "terms"), [(True, 1), (False, 2)])
async def test_only_operator_of_an_api_server_leads_on_after_it_was_stopped(
    world: World, alone: bool, terms: int
) -> None:
    """As local mode on a busy machine: with a clock, each pause of some seconds began a new term."""
    one = world.replica("a_10.0.0.1:8080", alone=alone)
    one.start()
    await world.advance(2)
    one.clock.stop()
    await world.advance(60)
    assert one.elector.is_leader() is alone
    one.clock.go_on()
    await world.advance(10)
    assert one.elector.require() == terms
    assert [isinstance(state, Leading) for state in one.changes].count(True) == terms


async def test_operator_that_is_alone_gives_the_lease_back_to_the_next_one(world: World) -> None:
    first, second = world.replica("a_10.0.0.1:8080", alone=True), world.replica("a_10.0.0.1:8080", alone=True)
    first.start()
    await world.advance(2)
    assert first.task is not None
    first.task.cancel()
    await world.advance(2)
    second.start()
    await world.advance(2)
    assert not first.elector.is_leader()
    assert second.elector.require() == 2


async def test_whoever_asks_is_told_when_nobody_has_led_for_a_while(world: World) -> None:
    a, b = await pair(world)
    watching = [Leaderless(one.elector, world.clock) for one in (a, b)]
    assert [one.notice() for one in watching] == [None, None]
    a.link.down = b.link.down = True
    await world.advance(6.0)
    assert [one.notice() for one in watching] == [None, None], "a fail-over may take so long"
    await world.advance(NOTICE + 4.0)
    for one in watching:
        assert one.seconds() >= NOTICE
        assert "the Lease cannot be reached: down" in (one.notice() or ""), one.notice()
    a.link.down = b.link.down = False
    await world.advance(10)
    assert [one.notice() for one in watching] == [None, None]
    assert [one.seconds() for one in watching] == [0.0, 0.0]


async def test_lack_of_a_leader_and_its_end_are_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "everstep_operator.runtime.leaderless")
    a, _ = await pair(world)
    watching = asyncio.create_task(Leaderless(a.elector, world.clock).run())
    for replica in world.replicas:
        replica.link.down = True
    await world.advance(30)
    for replica in world.replicas:
        replica.link.down = False
    await world.advance(10)
    watching.cancel()
    said = [r.getMessage() for r in caplog.records if r.name.endswith("leaderless")]
    assert said == ["nobody leads: running jobs go on, nothing is repaired", "an operator leads again"]
