"""Decides which replica may write: leader election with one Lease.

Safety: a leader stops at most `renew_deadline` after it *sent* its last successful renewal. Another replica takes over
at the earliest `duration` after it *saw* that renewal, which is later than its sending, and `renew_deadline <
duration`. So there are never two leaders, whatever the network delays, as long as clocks run at about the same rate.
Only monotonic time is used. The timestamps in the Lease are for people: a clock jump of an hour changes nothing. A
process that was stopped finds its leadership over when it continues (failure modes 41 and 39 in
docs/operations/failure-modes.md). Every acquisition raises `leaseTransitions`, even by the same replica: that number is
the epoch. This follows client-go's `leaderelection`, which raises the number only when the holder changes.

There are two exceptions, in which a leader is replaced before `duration` is over. Both need a second sign, from
`health`, so a leader that reaches the API server goes on renewing, and is never replaced.

- It is `STILL`, which means that its process has answered nothing for a while: the process is frozen, or its answers
  are lost. It is replaced after `unanswered` seconds without a renewal, which is not less than `renew_deadline`: the
  argument above holds, whatever `health` says. Its agents could not renew at it either, so a term also ends when the
  process of its leader has stood still for `STILL` seconds: the next one gives each of them another lease (ADR 0074).
- It is `GONE`, and has not renewed for `silent` seconds: its machine is lost or cut off, so it cannot write. This is
  less than `renew_deadline`. If it is wrong, what is a compare-and-swap is safe all the same (ADR 0009).

If somebody deletes the Lease, only a replica that never saw it takes over sooner.

A replica that is `alone` has no other candidate, as in local mode, where API server and operator are one process. Its
leadership has no deadline, so a busy machine does not end it. It takes the Lease nevertheless, for its epoch.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import AlreadyExists, Conflict, KubeError, NotFound
from everstep_operator.kube.resources import LEASES
from everstep_operator.kube.wire import Lease, micro_time
from everstep_operator.runtime.clock import Clock, wait_event, within
from everstep_operator.runtime.errors import NotLeading
from everstep_operator.runtime.leader_probe import UNANSWERED, Health
from everstep_operator.runtime.randomness import Random

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseTiming:
    """Times in seconds. `retry`: between two renewals; followers look twice in that time. `silent` and `unanswered`:
    after so long without a renewal a leader that is gone, or whose process stands still, is replaced."""

    duration: int = 6
    renew_deadline: float = 3.2  # two requests of 1.5 s in a row
    retry: float = 1.0
    silent: float = 2.0
    unanswered: float = 3.2

    def __post_init__(self) -> None:
        if not 0 < self.retry < self.renew_deadline < self.duration:
            raise ValueError(f"a Lease needs 0 < retry < renew_deadline < duration, got {self}")
        if not self.retry < self.silent <= self.duration:
            raise ValueError(f"a Lease needs retry < silent <= duration, got {self}")
        if not self.renew_deadline <= self.unanswered <= self.duration:
            raise ValueError(f"a Lease needs renew_deadline <= unanswered <= duration, got {self}")

    @classmethod
    def of(cls, seconds: int) -> "LeaseTiming":
        """The timing of a Lease that lasts so many seconds."""
        sixth = seconds / 6
        return cls(seconds, renew_deadline=3.2 * sixth, retry=sixth, silent=2 * sixth, unanswered=3.2 * sixth)


@dataclass(frozen=True, slots=True)
class Leading:
    """This replica may write until the monotonic second `until`, and longer if it renews."""

    epoch: int
    until: float


@dataclass(frozen=True, slots=True)
class Following:
    """Another replica, or nobody (`holder` empty), holds the Lease; `reason` says why this one does not."""

    holder: str
    epoch: int
    reason: str


Leadership: TypeAlias = Leading | Following

STILL = UNANSWERED - 0.2  # seconds without a turn of this process; the term ends before another replica begins one
NOTE = 0.1  # seconds between two notes that this process runs


@dataclass(frozen=True, slots=True)
class _Seen:
    """A Lease as last read, and since when this replica has seen it unchanged or `missing`, on its own clock."""

    lease: Lease
    at: float
    missing: bool = False


def address_of(identity: str) -> str | None:
    """The `host:port` of an identity `<name>_<host:port>`; None if it has none."""
    _, separator, address = identity.partition("_")
    return address if separator and address else None


class LeaderElector:
    """A candidate for one Lease. `identity` is unique to the process: `<pod name>_<host:port>`, so that redirects are
    possible."""

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str,
        name: str,
        identity: str,
        clock: Clock,
        rng: Random,
        timing: LeaseTiming = LeaseTiming(),
        on_change: Callable[[Leadership], None] | None = None,
        health: Callable[[str], Health] = lambda _address: Health.ANSWERS,
        alone: bool = False,
    ) -> None:
        """`health`: what is known of the process at an address; `alone`: there is no other candidate; see above."""
        self._alone = alone
        self._client = client
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._rng = rng
        self._timing = timing
        self._on_change = on_change
        self._health = health
        self._seen: _Seen | None = None
        self._state: Leadership = Following("", 0, "not yet observed")
        self._announced: int | None = None  # the epoch of which waiters know; None: this replica does not lead
        self._changed = asyncio.Event()
        self._ran_at = math.inf  # when this process was seen to run
        self._still_until = -math.inf  # a renewal that was sent before shows nothing of the time since

    def state(self) -> Leadership:
        """The state at this moment. A leadership whose time ran out, or whose process stood still, is over, even if
        nobody noticed yet."""
        if isinstance(self._state, Leading):
            if self._clock.monotonic() >= self._state.until:
                return Following("", self._state.epoch, "the renew deadline passed")
            if self._stood_still():
                return Following("", self._state.epoch, "this process stood still, and another may lead by now")
        return self._state

    def _stood_still(self) -> bool:
        return not self._alone and self._clock.monotonic() - self._ran_at >= STILL

    async def _note_running(self) -> None:
        """Note again and again that this process runs. What runs first after a pause finds the old note."""
        while True:
            if self._stood_still():
                self._still_until = self._clock.monotonic()
                self._state = self.state()
                self._announce()
            self._ran_at = self._clock.monotonic()
            await self._clock.sleep(NOTE)

    def is_leader(self) -> bool:
        return isinstance(self.state(), Leading)

    def require(self) -> int:
        """The epoch. Call it right before a write. Raises `NotLeading`."""
        match self.state():
            case Leading(epoch, _):
                return epoch
            case Following(holder, _, reason):
                raise NotLeading(f"{self._identity} may not write: {reason} (holder {holder or 'none'})")

    def holder_address(self) -> str | None:
        """The leader's address in the last Lease seen; None if nobody holds it, or its time is over."""
        match self.state():
            case Leading():
                return address_of(self._identity)
            case Following():
                holder = self._seen.lease.spec.holder_identity if self._seen is not None else None
                # A replica whose leadership ran out does not redirect to itself, because the redirect would never end.
                if self._seen is None or not holder or holder == self._identity or self._is_free(self._seen):
                    return None
                return None if self._holder_health(self._seen) is Health.GONE else address_of(holder)

    def is_led(self) -> bool:
        """Whether this replica leads, or sees that another one does."""
        match self.state():
            case Leading():
                return True
            case Following():
                seen = self._seen
                holder = seen.lease.spec.holder_identity if seen is not None and not self._is_free(seen) else None
                return bool(holder) and holder != self._identity

    def other_holder_address(self) -> str | None:
        """The address of another replica that holds the Lease, or held it last."""
        holder = self._seen.lease.spec.holder_identity if self._seen is not None else None
        return address_of(holder) if holder and holder != self._identity else None

    async def wait_leading(self) -> int:
        """Wait until this replica leads; its epoch."""
        while True:
            if isinstance(state := self.state(), Leading):
                return state.epoch
            self._changed.clear()
            await self._changed.wait()

    async def wait_lost(self, epoch: int) -> str:
        """Wait until the leadership of `epoch` is over; the reason."""
        while True:
            match self.state():
                case Leading(current, until) if current == epoch:
                    # The clock is checked too, because nothing sets the event when the deadline passes.
                    self._changed.clear()
                    left = None if until == math.inf else until - self._clock.monotonic()
                    await wait_event(self._clock, self._changed, left)
                case Leading():
                    return "leads again in a later epoch"
                case Following(_, _, reason):
                    return reason

    async def run(self) -> None:
        """Take part until cancelled, then release the Lease if this replica holds it."""
        self._ran_at = self._clock.monotonic()
        noting = asyncio.create_task(self._note_running())
        try:
            while True:
                began = self._clock.monotonic()
                await self._attempt()
                self._announce()
                await self._clock.sleep(self._pause(began))
        finally:
            noting.cancel()
            self._ran_at = math.inf
            await self._release()

    def _pause(self, began: float) -> float:
        state = self.state()
        if isinstance(state, Leading):  # a slow answer delays no later renewal
            return max(0.0, min(began + self._timing.retry, state.until) - self._clock.monotonic())
        pause = self._timing.retry / 2 * (1.0 + 0.2 * self._rng())
        if self._seen is None:
            return pause
        due = self._seen.at + self._patience(self._seen) - self._clock.monotonic()
        return due if 0 < due < pause else pause

    async def _attempt(self) -> None:
        """Renew, or take over if the Lease is free. After a failure the state stays, and runs out by itself."""
        sent = self._clock.monotonic()
        limit = self._timing.renew_deadline
        state = self.state()
        if isinstance(state, Leading):
            # A renewal that outlives the deadline is useless: it is better to lose cleanly and compete again.
            limit = min(self._timing.renew_deadline / 2, max(0.0, state.until - sent))
        elif isinstance(self._state, Leading):
            self._state = state
        try:
            await within(self._clock, limit, self._acquire_or_renew(sent))
        except (Conflict, AlreadyExists):
            # A leader keeps its time: the conflicting write may have been its own, sent again after a lost response.
            if not self.is_leader():
                self._follow("another replica was faster")
        except (KubeError, TimeoutError) as error:
            if not self.is_leader():
                self._follow(f"the Lease cannot be reached: {error}")
            log.warning("lease attempt failed", extra={"lease": self._name, "error": str(error)})

    async def _acquire_or_renew(self, sent: float) -> None:
        try:
            lease = await self._replace(self._last_written(), self._renewal)
        except NotFound:
            await self._create(sent)
            return
        if lease is not None:
            self._won(lease, sent)

    async def _replace(self, known: Lease | None, body: Callable[[Lease], dict[str, Any] | None]) -> Lease | None:
        """Replace the Lease by what `body` makes of it; None if that is None. A `known` Lease is replaced without a
        read. If it has changed since, it is read once: an earlier write may have succeeded though its answer was lost.

        Raises NotFound, Conflict if it changes between read and write, and other errors of the API server.
        """
        if known is not None and (replacement := body(known)) is not None:
            with contextlib.suppress(Conflict, NotFound):
                return await self._client.replace(LEASES, self._namespace, self._name, replacement)
        replacement = body(await self._client.get(LEASES, self._namespace, self._name))
        if replacement is None:
            return None
        return await self._client.replace(LEASES, self._namespace, self._name, replacement)

    def _renewal(self, lease: Lease) -> dict[str, Any] | None:
        """The body that renews or takes the Lease; None while another replica holds it."""
        self._observe(lease)
        assert self._seen is not None
        epoch = lease.spec.lease_transitions or 0
        match self.state():
            case Leading(mine, _) if mine == epoch and lease.spec.holder_identity == self._identity:
                return self._body(lease, epoch=epoch)
            case _ if self._is_free(self._seen) or lease.spec.holder_identity == self._identity:
                return self._body(lease, epoch=epoch + 1)
            case _:
                self._follow(f"held by {lease.spec.holder_identity}")
                return None

    def _last_written(self) -> Lease | None:
        """The Lease as this leader wrote it last; None unless it leads. A renewal needs no read: the API server refuses
        it if the Lease has changed since."""
        match self.state(), self._seen:
            case Leading(epoch, _), _Seen(lease, _, False) if lease.spec.lease_transitions == epoch:
                return lease if lease.spec.holder_identity == self._identity else None
            case _:
                return None

    async def _create(self, sent: float) -> None:
        state = self.state()
        if not isinstance(state, Leading) and self._seen is not None:
            if not self._seen.missing:
                # While this replica was cut off, others may have renewed or taken the Lease: time counts from now.
                self._seen = _Seen(self._seen.lease, self._clock.monotonic(), missing=True)
            if self._clock.monotonic() < self._seen.at + self._patience(self._seen):
                self._follow("the Lease was deleted; its last holder may still act as the leader")
                return
        epoch = state.epoch if isinstance(state, Leading) else self._state.epoch + 1
        self._won(await self._client.create(LEASES, self._namespace, self._body(None, epoch=epoch)), sent)

    def _observe(self, lease: Lease) -> None:
        # Time counts from when *this* replica saw the Lease change. The times written in it are not used.
        seen = self._seen
        if seen is None or seen.missing or seen.lease.metadata.resource_version != lease.metadata.resource_version:
            self._seen = _Seen(lease, self._clock.monotonic())

    def _is_free(self, seen: _Seen) -> bool:
        if not seen.lease.spec.holder_identity:
            return True
        return self._clock.monotonic() >= seen.at + self._patience(seen)

    def _patience(self, seen: _Seen) -> float:
        """Seconds without a renewal after which the Lease may be taken."""
        if seen.missing:  # it is not known who held it last
            return self._timing.duration
        duration = seen.lease.spec.lease_duration_seconds or self._timing.duration
        match self._holder_health(seen):
            case Health.GONE:
                return min(duration, self._timing.silent)
            case Health.STILL:
                return min(duration, self._timing.unanswered)
            case Health.ANSWERS:
                return duration

    def _holder_health(self, seen: _Seen) -> Health:
        address = address_of(seen.lease.spec.holder_identity or "")
        return Health.ANSWERS if address is None else self._health(address)

    def _won(self, lease: Lease, sent: float) -> None:
        self._observe(lease)
        epoch = lease.spec.lease_transitions or 0
        if isinstance(self._state, Leading) and self._state.epoch == epoch and not self.is_leader():
            # The answer came too late. Callers of `wait_lost` saw this term end, and wait for another epoch.
            self._state = self.state()
            return
        if sent < self._still_until:
            return  # the next renewal begins a new term, if no other replica has begun one
        self._state = Leading(epoch, math.inf if self._alone else sent + self._timing.renew_deadline)

    def _follow(self, reason: str) -> None:
        spec = self._seen.lease.spec if self._seen else None
        holder = (spec.holder_identity or "") if spec else ""
        self._state = Following(holder, (spec.lease_transitions or 0) if spec else 0, reason)

    def _announce(self) -> None:
        state = self.state()
        leading = state.epoch if isinstance(state, Leading) else None
        if leading == self._announced:
            return
        self._announced = leading
        log.info("leadership changed", extra={"identity": self._identity, "state": repr(state)})
        self._changed.set()
        if self._on_change is not None:
            self._on_change(state)

    def _body(self, lease: Lease | None, *, epoch: int) -> dict[str, Any]:
        now = micro_time(self._clock.now())
        acquired = lease.spec.acquire_time if lease is not None and lease.spec.lease_transitions == epoch else None
        return _lease_body(
            self._name,
            version=lease.metadata.resource_version if lease is not None else None,
            holder=self._identity,
            duration=self._timing.duration,
            acquired=micro_time(acquired) if acquired is not None else now,
            renewed=now,
            epoch=epoch,
        )

    async def _release(self) -> None:
        """Empty the Lease, so that the next leader need not wait until it expires. The resource version ensures that it
        is our own."""
        state, seen = self.state(), self._seen
        self._state = Following("", self._state.epoch, "shut down")
        self._announce()
        if not isinstance(state, Leading) or seen is None:
            return

        def emptied(lease: Lease) -> dict[str, Any] | None:
            if (lease.spec.holder_identity, lease.spec.lease_transitions) != (self._identity, state.epoch):
                return None  # another replica holds it: there is nothing to release
            return _lease_body(
                self._name,
                version=lease.metadata.resource_version,
                holder="",
                duration=1,
                acquired=micro_time(lease.spec.acquire_time or datetime.fromtimestamp(0, UTC)),
                renewed=micro_time(self._clock.now()),
                epoch=state.epoch,
            )

        try:
            await within(self._clock, self._timing.retry, self._replace(seen.lease, emptied))
        except (KubeError, TimeoutError) as error:
            log.warning("lease not released, it will expire", extra={"lease": self._name, "error": str(error)})


def _lease_body(
    name: str, *, version: str | None, holder: str, duration: int, acquired: str, renewed: str, epoch: int
) -> dict[str, Any]:
    metadata = {"name": name} if version is None else {"name": name, "resourceVersion": version}
    return {
        "apiVersion": LEASES.api_version,
        "kind": LEASES.kind,
        "metadata": metadata,
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": duration,
            "acquireTime": acquired,
            "renewTime": renewed,
            "leaseTransitions": epoch,
        },
    }
