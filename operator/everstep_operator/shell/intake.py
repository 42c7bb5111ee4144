"""The operator's HTTP server: progress reports in; probes and metrics out.

Only the leader takes reports, because only it plans with them; a follower sends workers on to it (307) and is Ready
all the same, so that the Service reaches whoever is there. It does not know what a report means: it proves who sent it
and hands it on. Invariants: identity comes from the token alone, never from the body; every request is bounded in size,
time and number; a refusal says why; nothing that a worker sends can stop the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

from aiohttp import web

from everstep.contract.messages import MAX_REPORT_BYTES, REPORT_PATH, MessageError, Report
from everstep_operator.shell.identity import IdentityCache, PodIdentity
from everstep_operator.telemetry.metrics import CONTENT_TYPE, Metrics, ReportResult

log = logging.getLogger("everstep.intake")


@dataclass(frozen=True, slots=True)
class Leading:
    """This replica holds the Lease."""


@dataclass(frozen=True, slots=True)
class Following:
    """Another replica holds the Lease and takes reports at `base_url`, such as `http://10.244.1.7:8080`."""

    base_url: str


@dataclass(frozen=True, slots=True)
class NoLeader:
    """Nobody is known to hold the Lease."""


Leadership: TypeAlias = Leading | Following | NoLeader

# A check returns None when all is well, else the reason; it must not block.
Check: TypeAlias = Callable[[], str | None]


class ReportRefused(Exception):  # it is an answer to the worker, not a fault of the operator
    """Raised by `accept`: the sender is known and may not report; the text is sent to it."""


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """Bounds of the server. Times in seconds."""

    host: str = "0.0.0.0"  # noqa: S104  # pods and the kubelet reach it through the pod's own address
    port: int = 8080  # 0: any free one, see `ReportIntake.port`
    max_in_flight: int = 512  # reports handled at once; more are answered 503
    body_seconds: float = 5.0
    check_seconds: float = 5.0  # of the token
    keepalive_seconds: float = 75.0
    stop_seconds: float = 5.0
    backlog: int = 1024


@dataclass(slots=True)
class _Answer:
    status: int
    reason: str
    result: ReportResult
    headers: dict[str, str] = field(default_factory=dict)


class ReportIntake:
    """Serves until `stop()`. `start()` raises OSError when the address is taken."""

    def __init__(
        self,
        *,
        identities: IdentityCache,
        accept: Callable[[PodIdentity, Report], None],
        leadership: Callable[[], Leadership],
        metrics: Metrics,
        ready: Mapping[str, Check] | None = None,
        alive: Mapping[str, Check] | None = None,
        settings: IntakeSettings | None = None,
    ) -> None:
        self._identities, self._accept, self._leadership, self._metrics = identities, accept, leadership, metrics
        self._ready, self._alive = dict(ready or {}), dict(alive or {})
        self._settings = settings or IntakeSettings()
        self._in_flight = 0
        self._unchecked: str | None = None  # why tokens cannot be checked at the moment
        self._runner: web.AppRunner | None = None
        self.port = self._settings.port

    async def start(self) -> None:
        """Listen; afterwards `port` is the port in use."""
        app = web.Application(client_max_size=MAX_REPORT_BYTES)
        app.router.add_post(REPORT_PATH, self._report)
        app.router.add_get("/healthz", self._probe(self._alive))
        app.router.add_get("/readyz", self._probe(self._ready))
        app.router.add_get("/metrics", self._scrape)
        s = self._settings
        runner = web.AppRunner(
            app,
            access_log=None,
            keepalive_timeout=s.keepalive_seconds,
            shutdown_timeout=s.stop_seconds,
            lingering_time=1.0,  # seconds that the rest of an unwanted body is still read and thrown away
            handle_signals=False,
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, s.host, s.port, backlog=s.backlog)
            await site.start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        self.port = int(runner.addresses[0][1])
        log.info("serving reports, probes and metrics", extra={"host": s.host, "port": self.port})

    async def stop(self) -> None:
        """Stop listening, finish what is under way (at most `stop_seconds`), close all connections."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def __aenter__(self) -> ReportIntake:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _report(self, request: web.Request) -> web.StreamResponse:
        if self._in_flight >= self._settings.max_in_flight:
            answer = _later("too many reports at once", ReportResult.BUSY)
        else:
            self._in_flight += 1
            try:
                answer = await self._answer(request)
            finally:
                self._in_flight -= 1
        self._metrics.report(answer.result)
        if answer.status == 204:
            return web.Response(status=204)
        if not request.content.at_eof():
            answer.headers["Connection"] = "close"  # do not read on what was not wanted
        return web.json_response({"reason": answer.reason}, status=answer.status, headers=answer.headers)

    async def _answer(self, request: web.Request) -> _Answer:
        match self._leadership():
            case Leading():
                pass
            case Following(base_url=url):
                location = {"Location": url.rstrip("/") + REPORT_PATH}
                return _Answer(307, "another replica leads", ReportResult.REDIRECTED, location)
            case NoLeader():
                return _later("no replica leads at the moment", ReportResult.NO_LEADER)
            case other:
                assert_never(other)
        # Who before what: an unknown sender gets none of its body parsed.
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return _unauthorized("send the pod's token as `Authorization: Bearer …`")
        try:
            async with asyncio.timeout(self._settings.check_seconds):
                identity = await self._identities.identify(token.strip())
        except Exception as e:
            reason = f"{type(e).__name__}: {e}"
            if reason != self._unchecked:  # every worker of every job runs into it: said when it changes
                self._unchecked = reason
                log.warning("cannot check the tokens of workers", extra={"reason": reason})
            return _later("the token cannot be checked at the moment", ReportResult.UNAVAILABLE)
        self._unchecked = None
        if identity is None:
            return _unauthorized("the token is not valid for this operator, or its pod is gone")
        return await self._take(request, identity)

    async def _take(self, request: web.Request, identity: PodIdentity) -> _Answer:
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                report = Report.decode(await request.read())
        except web.HTTPRequestEntityTooLarge:
            return _Answer(413, f"a report has at most {MAX_REPORT_BYTES} bytes", ReportResult.TOO_LARGE)
        except MessageError as e:
            return _Answer(400, str(e), ReportResult.MALFORMED)
        except (TimeoutError, ConnectionError):  # a connection that breaks here was a worker that died
            text = f"the body did not arrive within {self._settings.body_seconds} s"
            return _Answer(408, text, ReportResult.TIMED_OUT)
        who = {"namespace": identity.namespace, "pod": identity.pod_name}
        try:
            self._accept(identity, report)
        except ReportRefused as e:
            log.debug("report refused", extra={**who, "reason": str(e)})
            return _Answer(403, str(e), ReportResult.FORBIDDEN)
        except Exception:
            log.exception("report failed in the operator", extra={**who, "round": report.round})
            return _Answer(500, "the operator failed on this report; see its log", ReportResult.UNAVAILABLE)
        return _Answer(204, "", ReportResult.ACCEPTED)

    def _probe(self, checks: Mapping[str, Check]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(_: web.Request) -> web.StreamResponse:
            failed = {name: reason for name, check in sorted(checks.items()) if (reason := check()) is not None}
            lines = [f"[-] {name}: {failed[name]}" if name in failed else f"[+] {name}" for name in sorted(checks)]
            # Being answered at all shows that the event loop turns.
            return web.Response(
                status=503 if failed else 200, text="\n".join([*lines, "failed" if failed else "ok", ""])
            )

        return handle

    async def _scrape(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})


def _later(reason: str, result: ReportResult) -> _Answer:
    return _Answer(503, reason, result, {"Retry-After": "1"})


def _unauthorized(reason: str) -> _Answer:
    return _Answer(401, reason, ReportResult.UNAUTHORIZED, {"WWW-Authenticate": "Bearer"})
