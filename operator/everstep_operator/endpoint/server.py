"""The operator's HTTP server: probes, metrics, and the routes of its callers.

A follower is Ready too, so that the Service reaches every replica; `auth` redirects workers to the leader. Invariants:
requests are bounded in size, time and number; no request of a worker can stop the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from everstep_operator.endpoint.auth import LEGITIMATE
from everstep_operator.endpoint.connection_limits import ConnectionLimits, connection_of
from everstep_operator.endpoint.listener import Listener
from everstep_operator.telemetry.metrics import CONTENT_TYPE, Metrics

log = logging.getLogger("everstep.endpoint")
_http = logging.getLogger("everstep.endpoint.http")
# Anybody can send what is no HTTP, and each time aiohttp logs an error with a trace: it is the sender's, and answered.
_http.addFilter(lambda r: not (r.exc_info and isinstance(r.exc_info[1], HttpProcessingError)))

SCRAPE_SECONDS = 0.25  # for this long, all scrapers get the same rendering of the metrics

# A check returns None when all is well, else the reason; it must not block.
Check: TypeAlias = Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Bounds of the server. Times in seconds."""

    host: str = "0.0.0.0"  # noqa: S104  # pods and the kubelet reach it through the pod's own address
    port: int = 8080  # 0: any free port, see `EndpointServer.port`
    keepalive_seconds: float = 75.0
    stop_seconds: float = 5.0
    backlog: int = 1024  # connections that wait to be accepted


class EndpointServer:
    """Serves until `stop()`. `start()` raises OSError when the address is taken."""

    def __init__(
        self,
        routes: Sequence[Callable[[web.UrlDispatcher], None]],
        *,
        metrics: Metrics,
        ready: Mapping[str, Check] | None = None,
        options: ServerOptions | None = None,
    ) -> None:
        """Each of `routes` adds the paths that it answers."""
        self._routes, self._metrics, self._ready = routes, metrics, dict(ready or {})
        self._options = options or ServerOptions()
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._scraped, self._scraped_at = b"", float("-inf")
        self.port = self._options.port

    async def start(self) -> None:
        """Listen; afterwards `port` is the port in use."""
        app = web.Application(middlewares=[_heard])
        for add_to in self._routes:
            add_to(app.router)
        app.router.add_get("/healthz", self._probe({}))
        app.router.add_get("/readyz", self._probe(self._ready))
        app.router.add_get("/metrics", self._scrape)
        s = self._options
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http,
            keepalive_timeout=s.keepalive_seconds,
            shutdown_timeout=s.stop_seconds,
            lingering_time=1.0,  # seconds for which the rest of an unwanted body is read and discarded
            handle_signals=False,
            auto_decompress=False,  # workers do not compress, and a small body could expand to a large one
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
        """Stop listening, finish requests in progress (at most `stop_seconds`), close all connections."""
        runner, self._runner = self._runner, None
        if runner is not None and self._listener is not None:
            self._listener.close()
            await runner.cleanup()

    async def __aenter__(self) -> EndpointServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _probe(self, checks: Mapping[str, Check]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(_: web.Request) -> web.StreamResponse:
            failed = {name: reason for name, check in sorted(checks.items()) if (reason := check()) is not None}
            lines = [f"[-] {name}: {failed[name]}" if name in failed else f"[+] {name}" for name in sorted(checks)]
            # The fact that there is an answer shows that the event loop runs.
            return web.Response(
                status=503 if failed else 200, text="\n".join([*lines, "failed" if failed else "ok", ""])
            )

        return handle

    async def _scrape(self, _: web.Request) -> web.StreamResponse:
        now = asyncio.get_running_loop().time()
        if now >= self._scraped_at + SCRAPE_SECONDS:  # a rendering takes milliseconds, and anybody may scrape
            self._scraped, self._scraped_at = self._metrics.render(), now
        return web.Response(body=self._scraped, headers={"Content-Type": CONTENT_TYPE})


@web.middleware
async def _heard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Charge the connection for a request that was refused by its sender's fault, or whose sender is unknown."""
    try:
        return await handler(request)
    finally:
        if (connection := connection_of(request.transport)) is not None:
            connection.request_was_legitimate() if request.get(LEGITIMATE, False) else connection.request_was_refused()
