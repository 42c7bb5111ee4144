"""Who may speak to this replica: what progress reports and the round store check alike, before anything else.

Only the leader answers, because only it plans and only its memory counts; a follower sends workers on to it (307).
Identity comes from the token alone. Knows nothing of what is said. Invariants: an unknown sender gets nothing of its
body read; a body is bounded in size and time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from aiohttp import web

from everstep_operator.shell.identity import IdentityCache, PodIdentity
from everstep_operator.telemetry.metrics import ReportResult

log = logging.getLogger("everstep.gate")


@dataclass(frozen=True, slots=True)
class Leading:
    """This replica holds the Lease."""


@dataclass(frozen=True, slots=True)
class Following:
    """Another replica holds the Lease and answers at `base_url`, such as `http://10.244.1.7:8080`."""

    base_url: str


@dataclass(frozen=True, slots=True)
class NoLeader:
    """Nobody is known to hold the Lease."""


Leadership: TypeAlias = Leading | Following | NoLeader


@dataclass(slots=True)
class Answer:
    """A refusal, or a success without a body (204)."""

    status: int
    reason: str
    result: ReportResult
    headers: dict[str, str] = field(default_factory=dict)

    def response(self, request: web.Request) -> web.Response:
        if self.status == 204:
            return web.Response(status=204, headers=self.headers)
        if not request.content.at_eof():
            self.headers["Connection"] = "close"  # do not read on what was not wanted
        return web.json_response({"reason": self.reason}, status=self.status, headers=self.headers)


def later(reason: str, result: ReportResult) -> Answer:
    return Answer(503, reason, result, {"Retry-After": "1"})


def unauthorized(reason: str) -> Answer:
    return Answer(401, reason, ReportResult.UNAUTHORIZED, {"WWW-Authenticate": "Bearer"})


class Gate:
    """`leadership` is asked at each request and must not block."""

    def __init__(
        self,
        identities: IdentityCache,
        leadership: Callable[[], Leadership],
        *,
        check_seconds: float = 5.0,
        body_seconds: float = 5.0,
    ) -> None:
        """`check_seconds` for the check of a token, `body_seconds` for a body to arrive."""
        self._identities, self._leadership = identities, leadership
        self._check_seconds, self._body_seconds = check_seconds, body_seconds
        self._unchecked: str | None = None  # why tokens cannot be checked at the moment

    def elsewhere(self, request: web.Request) -> Answer | None:
        """What a replica answers that does not lead; None from the leader."""
        match self._leadership():
            case Leading():
                return None
            case Following(base_url=url):
                location = {"Location": url.rstrip("/") + request.path_qs}
                return Answer(307, "another replica leads", ReportResult.REDIRECTED, location)
            case NoLeader():
                return later("no replica leads at the moment", ReportResult.NO_LEADER)
            case other:
                assert_never(other)

    async def admit(self, request: web.Request) -> PodIdentity | Answer:
        """The pod behind the request, or the answer that it gets instead."""
        if (answer := self.elsewhere(request)) is not None:
            return answer
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return unauthorized("send the pod's token as `Authorization: Bearer …`")
        try:
            async with asyncio.timeout(self._check_seconds):
                identity = await self._identities.identify(token.strip())
        except Exception as e:
            reason = f"{type(e).__name__}: {e}"
            if reason != self._unchecked:  # every worker of every job runs into it: said when it changes
                self._unchecked = reason
                log.warning("cannot check the tokens of workers", extra={"reason": reason})
            return later("the token cannot be checked at the moment", ReportResult.UNAVAILABLE)
        self._unchecked = None
        return identity or unauthorized("the token is not valid for this operator, or its pod is gone")

    async def body(self, request: web.Request, limit: int) -> bytes | Answer:
        """The request's body of at most `limit` bytes, or the answer to one that is larger or does not arrive."""
        parts: list[bytes] = []
        size = request.content_length or 0
        try:
            async with asyncio.timeout(self._body_seconds):
                while size <= limit:
                    part = await request.content.readany()
                    if not part:
                        return b"".join(parts)
                    parts.append(part)
                    size = max(size, sum(map(len, parts)))
        except (TimeoutError, ConnectionError):  # a connection that breaks here was a worker that died
            return Answer(408, f"the body did not arrive within {self._body_seconds} s", ReportResult.TIMED_OUT)
        except web.RequestPayloadError as e:
            return Answer(400, f"the body cannot be read: {e}", ReportResult.MALFORMED)
        return Answer(413, f"at most {limit} bytes are taken", ReportResult.TOO_LARGE)
