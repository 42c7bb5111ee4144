"""Authenticates a request and applies limits, in the same way for progress reports and the round store.

Only the leader answers, because only it plans and only its memory counts; a follower redirects workers to it (307).
The caller comes from the token alone. This module does not know what a request means. Invariants: nothing of the body
of an unauthenticated request is read; a body is bounded in size and time; no pod, job or namespace has more than its
share (`tenant_limits`) of calls, of memory for bodies, of requests a second and of bytes a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from aiohttp import web

from everstep_operator.endpoint.callers import Caller
from everstep_operator.endpoint.connections import connection_of
from everstep_operator.endpoint.signed_tokens import NotWatched
from everstep_operator.endpoint.tenant_limits import Rates, Shares
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.endpoint.token_reviews import IdentityCache, TokenRefusal, TooManyChecks
from everstep_operator.endpoint.token_signatures import KeysUnknown
from everstep_operator.kube.errors import KubeError
from everstep_operator.runtime.fair_queueing import FairQueue, Flow
from everstep_operator.telemetry.metrics import ReportResult

log = logging.getLogger("everstep.auth")

UNLIMITED = 1e9
# Refusals that are the sender's fault. A correct worker may get any other, and many workers at once.
FAULTS = frozenset(
    {
        ReportResult.UNAUTHORIZED, ReportResult.BUSY, ReportResult.MALFORMED, ReportResult.TOO_LARGE,
        ReportResult.TIMED_OUT,
    }
)  # fmt: skip
AT_FAULT = web.RequestKey("at_fault", bool)  # whether the sender did something wrong


@dataclass(frozen=True, slots=True)
class LeaderAt:
    """A replica holds the Lease and answers at `base_url`, such as `http://10.244.1.7:8080`; who came by TLS is sent to
    `tls_url`."""

    base_url: str
    tls_url: str = ""

    def url(self, request: web.Request) -> str:
        return (self.tls_url if request.secure else self.base_url).rstrip("/")


@dataclass(frozen=True, slots=True)
class LeaderHere:
    """This replica holds the Lease, and answers at `address`."""

    address: LeaderAt = LeaderAt("")


@dataclass(frozen=True, slots=True)
class LeaderUnknown:
    """No replica is known to hold the Lease; the answer says `reason`."""

    reason: str = "no replica leads at the moment"


LeaderLocation: TypeAlias = LeaderHere | LeaderAt | LeaderUnknown


@dataclass(slots=True)
class Answer:
    """A refusal, or a success without a body (204). A connection whose request is refused by its sender's fault is not
    read for a moment (`connections`)."""

    status: int
    reason: str
    result: ReportResult
    headers: dict[str, str] = field(default_factory=dict)

    def response(self, request: web.Request) -> web.Response:
        if self.status == 204:
            return web.Response(status=204, headers=self.headers)
        request[AT_FAULT] = self.result in FAULTS
        return web.json_response({"reason": self.reason}, status=self.status, headers=self.headers)


def later(reason: str, result: ReportResult) -> Answer:
    return Answer(503, reason, result, {"Retry-After": "1"})


def unauthorized(reason: str) -> Answer:
    return Answer(401, reason, ReportResult.UNAUTHORIZED, {"WWW-Authenticate": "Bearer"})


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Rates and bursts are per pod; for bytes, a job has twice and a namespace four times as much."""

    check_seconds: float = 5.0  # for the check of a token
    body_seconds: float = 5.0  # for a body to arrive
    body_bytes: int = 64 * 2**20  # of all bodies that are being read
    calls_rate: float = 20.0  # a second: a worker makes two reports and a renewal or two, and more in a recovery
    calls_burst: float = 40.0
    # A byte of a document costs some 35 ns of the event loop: a job's 128 KiB a second are half a percent of it.
    bytes_rate: float = 64 * 2**10
    bytes_burst: float = 8 * 2**20
    patience: float = 1.0  # seconds that a request over the rate may wait; if it would wait longer, it is refused


class RequestAuth:
    """`leadership` is called at each request and must not block."""

    def __init__(
        self,
        identities: IdentityCache,
        leadership: Callable[[], LeaderLocation],
        *,
        find: Callable[[PodIdentity], Caller] = Caller,
        limits: RequestLimits | None = None,
    ) -> None:
        """`find` gives the known data of a pod; it must not block."""
        self._identities, self._leadership, self._find = identities, leadership, find
        self._limits = limits = limits or RequestLimits()
        self._bodies = Shares(limits.body_bytes)
        # Every pod of a job makes calls, and the namespace's quota bounds their number, so only pods are limited.
        self._calls = Rates(limits.calls_rate, limits.calls_burst, (UNLIMITED, UNLIMITED, 1.0))
        self._bytes = Rates(limits.bytes_rate, limits.bytes_burst)
        self._queue = FairQueue(lambda start: asyncio.get_running_loop().call_soon(start))
        self._unchecked: str | None = None  # the present reason why tokens cannot be checked

    def answer_of_follower(self, request: web.Request) -> Answer | None:
        """The answer of a replica that does not lead; None if this one leads."""
        match self._leadership():
            case LeaderHere():
                return None
            case LeaderAt() as other:
                location = {"Location": other.url(request) + request.path_qs}
                return Answer(307, "another replica leads", ReportResult.REDIRECTED, location)
            case LeaderUnknown(reason):
                return later(reason, ReportResult.NO_LEADER)
            case unknown:
                assert_never(unknown)

    def address_of_leader(self, request: web.Request) -> str:
        """Where this replica answers who came as `request` did; empty if it does not lead."""
        match self._leadership():
            case LeaderHere(address):
                return address.url(request)
            case _:
                return ""

    @asynccontextmanager
    async def admitted(self, request: web.Request, shares: Shares) -> AsyncIterator[Caller | Answer]:
        """The caller, with a share of `room` until the end of the block; or the answer to give instead."""
        identity = await self._admit(request)
        if isinstance(identity, Answer):
            yield identity
            return
        tenant = self._find(identity).tenant
        flow = Flow(tenant.namespace, tenant.pod)
        if (connection := connection_of(request.transport)) is not None:
            connection.admit(tenant)
        with shares.reserved(tenant) as granted:
            if not granted:
                yield later("too many calls at once, of this pod, its job, its namespace or all", ReportResult.BUSY)
                return
            wait = self._calls.spend(tenant, 1.0, _now(), self._limits.patience)
            if wait is None:
                yield later(f"more than {self._limits.calls_rate:g} calls a second of this pod", ReportResult.BUSY)
                return
            if wait:
                await asyncio.sleep(wait)
            await self._queue.wait(flow)  # many requests may have arrived together, or waited for the same moment
            if request.transport is None:
                yield Answer(408, "the sender has gone meanwhile", ReportResult.TIMED_OUT)
                return
            yield self._find(identity)  # what the caches know may have changed while the request waited

    async def _admit(self, request: web.Request) -> PodIdentity | Answer:
        if (answer := self.answer_of_follower(request)) is not None:
            return answer
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return unauthorized("send the pod's token as `Authorization: Bearer …`")
        try:
            async with asyncio.timeout(self._limits.check_seconds):
                identity = await self._identities.identify(token.strip())
        except TooManyChecks as e:
            return later(str(e), ReportResult.BUSY)
        except NotWatched as e:
            return later(str(e), ReportResult.UNAVAILABLE)
        except (KubeError, KeysUnknown, TimeoutError) as e:
            if self._is_news(e):
                log.warning("cannot check the tokens of workers", extra={"reason": self._unchecked})
            return later("the token cannot be checked at the moment", ReportResult.UNAVAILABLE)
        except Exception as e:  # a mistake of ours: nobody is admitted, and the trace shows where
            if self._is_news(e):
                log.exception("the check of a worker's token failed in the operator")
            return Answer(500, "the operator failed on this token; see its log", ReportResult.UNAVAILABLE)
        if isinstance(identity, TokenRefusal):
            return unauthorized(identity.reason)
        self._unchecked = None
        return identity

    def _is_news(self, error: Exception) -> bool:
        """Whether the reason is new. Every worker of every job runs into the same one, which is logged once."""
        before, self._unchecked = self._unchecked, f"{type(error).__name__}: {error}"
        return before != self._unchecked

    async def body(self, request: web.Request, limit: int, caller: Caller) -> bytes | Answer:
        """The request's body of at most `limit` bytes. If it is larger, does not arrive, or exceeds the sender's share,
        the answer to give instead."""
        declared = request.content_length
        if (declared or 0) > limit:
            return _too_large(limit)
        # A body of undeclared length may become as large as the limit.
        amount = limit if declared is None else declared
        with self._bodies.reserved(caller.tenant, amount) as granted:
            if not granted:
                return later("too many bodies at once, of this pod, its job, its namespace or all", ReportResult.BUSY)
            if self._bytes.spend(caller.tenant, amount, _now()) is None:
                return later(
                    f"more than {self._limits.bytes_rate / 1024:g} KiB a second of this pod, or of its job",
                    ReportResult.BUSY,
                )
            return await self._read(request, limit)

    async def _read(self, request: web.Request, limit: int) -> bytes | Answer:
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while size <= limit:
                    part = await request.content.readany()
                    if not part:
                        return b"".join(parts)
                    parts.append(part)
                    size += len(part)
        except (TimeoutError, ConnectionError):  # a connection breaks here when its worker dies
            seconds = self._limits.body_seconds
            return Answer(408, f"the body did not arrive within {seconds:g} s", ReportResult.TIMED_OUT)
        except web.RequestPayloadError as e:
            return Answer(400, f"the body cannot be read: {e}", ReportResult.MALFORMED)
        return _too_large(limit)


def _too_large(limit: int) -> Answer:
    return Answer(413, f"at most {limit} bytes are taken", ReportResult.TOO_LARGE)


def _now() -> float:
    return asyncio.get_running_loop().time()
