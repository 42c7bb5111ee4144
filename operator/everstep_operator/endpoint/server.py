"""The operator's HTTP server: progress reports in; probes and metrics out; and what others add to it.

A follower is Ready too, so that the Service reaches whoever is there (`gate` sends workers on to the leader). It does
not know what a report means: it hands it on with who sent it. Invariants: identity comes from the token alone, never
from the body; every request is bounded in size, time and number; a refusal says why; nothing that a worker sends can
stop the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import web
from aiohttp.typedefs import Handler

from everstep.contract.messages import MAX_REPORT_BYTES, REPORT_PATH, MessageError, Report
from everstep_operator.endpoint.auth import LEGITIMATE, Answer, RequestAuth, Sender
from everstep_operator.endpoint.connection_limits import ConnectionLimits, connection_of
from everstep_operator.endpoint.listener import Listener
from everstep_operator.endpoint.tenant_limits import Shares
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.telemetry.metrics import CONTENT_TYPE, Metrics, ReportResult

log = logging.getLogger("everstep.endpoint")

SCRAPE_SECONDS = 0.25  # for which one rendering of the metrics is given to all who ask

# A check returns None when all is well, else the reason; it must not block.
Check: TypeAlias = Callable[[], str | None]


class ReportRefused(Exception):  # it is an answer to the worker, not a fault of the operator
    """Raised by `accept`: the sender is known and may not report; the text is sent to it."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Bounds of the server. Times in seconds."""

    host: str = "0.0.0.0"  # noqa: S104  # pods and the kubelet reach it through the pod's own address
    port: int = 8080  # 0: any free one, see `EndpointServer.port`
    max_in_flight: int = 4096  # reports handled at once; who asks for more than a share of it is answered 503
    keepalive_seconds: float = 75.0
    stop_seconds: float = 5.0
    backlog: int = 1024  # connections that wait to be accepted


class EndpointServer:
    """Serves until `stop()`. `start()` raises OSError when the address is taken."""

    def __init__(
        self,
        *,
        auth: RequestAuth,
        accept: Callable[[PodIdentity, Report], None],
        metrics: Metrics,
        routes: Callable[[web.UrlDispatcher], None] | None = None,
        ready: Mapping[str, Check] | None = None,
        alive: Mapping[str, Check] | None = None,
        settings: ServerOptions | None = None,
    ) -> None:
        """`routes` adds what else this server answers."""
        self._auth, self._accept, self._metrics, self._routes = auth, accept, metrics, routes
        self._ready, self._alive = dict(ready or {}), dict(alive or {})
        self._settings = settings or ServerOptions()
        self._room = Shares(self._settings.max_in_flight)
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._scraped, self._scraped_at = b"", float("-inf")
        self.port = self._settings.port

    async def start(self) -> None:
        """Listen; afterwards `port` is the port in use."""
        app = web.Application(middlewares=[_heard])
        app.router.add_post(REPORT_PATH, self._report)
        if self._routes is not None:
            self._routes(app.router)
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
            auto_decompress=False,  # no worker compresses, and a small body could become a large one
        )
        await runner.setup()
        try:
            assert runner.server is not None
            listener = Listener(ConnectionLimits(runner.server))
            self.port = await listener.open(s.host, s.port, s.backlog)
        except BaseException:
            await runner.cleanup()
            raise
        self._runner, self._listener = runner, listener
        log.info("serving reports, probes and metrics", extra={"host": s.host, "port": self.port})

    async def stop(self) -> None:
        """Stop listening, finish what is under way (at most `stop_seconds`), close all connections."""
        runner, self._runner = self._runner, None
        if runner is not None and self._listener is not None:
            self._listener.close()
            await runner.cleanup()

    async def __aenter__(self) -> EndpointServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _report(self, request: web.Request) -> web.StreamResponse:
        async with self._auth.admitted(request, self._room) as sender:
            answer = sender if isinstance(sender, Answer) else await self._answer(request, sender)
        self._metrics.report(answer.result)
        return answer.response(request)

    async def _answer(self, request: web.Request, sender: Sender) -> Answer:
        body = await self._auth.body(request, MAX_REPORT_BYTES, sender)
        if isinstance(body, Answer):
            return body
        try:
            report = Report.decode(body)
        except MessageError as e:
            return Answer(400, str(e), ReportResult.MALFORMED)
        who = {"namespace": sender.pod.namespace, "pod": sender.pod.pod_name}
        try:
            self._accept(sender.pod, report)
        except ReportRefused as e:
            log.debug("report refused", extra={**who, "reason": str(e)})
            return Answer(403, str(e), ReportResult.FORBIDDEN)
        except Exception:
            log.exception("report failed in the operator", extra={**who, "round": report.round})
            return Answer(500, "the operator failed on this report; see its log", ReportResult.UNAVAILABLE)
        return Answer(204, "", ReportResult.ACCEPTED)

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
        now = asyncio.get_running_loop().time()
        if now >= self._scraped_at + SCRAPE_SECONDS:  # anybody may ask, and it takes milliseconds
            self._scraped, self._scraped_at = self._metrics.render(), now
        return web.Response(body=self._scraped, headers={"Content-Type": CONTENT_TYPE})


@web.middleware
async def _heard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whoever is refused for their own fault, or comes without a name, pays for it."""
    try:
        return await handler(request)
    finally:
        if (connection := connection_of(request.transport)) is not None:
            connection.request_was_legitimate() if request.get(LEGITIMATE, False) else connection.request_was_refused()
