"""The operator's HTTP servers: one for the routes of its callers, and one for probes and metrics.

Each has a port of its own, so that requests to one do not delay the other: the kubelet must not take an operator for
dead because workers send too much. A follower is Ready too, so that the Service reaches every replica; `auth`
redirects workers to the leader. Invariants: requests are bounded in size, time and number; no request of a worker can
stop the server.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from everstep_operator.endpoint import tls_connections
from everstep_operator.endpoint.auth import AT_FAULT
from everstep_operator.endpoint.connections import ConnectionBounds, Connections, connection_of
from everstep_operator.endpoint.listening import listen
from everstep_operator.telemetry.metrics import Format, Metrics

log = logging.getLogger("everstep.endpoint")
_http = logging.getLogger("everstep.endpoint.http")


def _is_ours(record: logging.LogRecord) -> bool:
    """Anybody can send bytes that are no HTTP. Each time aiohttp logs an error with a trace, though the mistake is the
    sender's, and is answered. The error and the frames of its trace refer to each other; without the trace they are
    freed at once."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return record.levelno > logging.DEBUG
    error.__traceback__ = None
    return False


_http.setLevel(logging.DEBUG)  # at which aiohttp logs the most frequent of these errors
_http.addFilter(_is_ours)

# For this long, all scrapers of one format get the same rendering of the metrics. Anybody may scrape, and the event
# loop stands still while they are rendered: up to 0.1 s.
SCRAPE_SECONDS = 1.0
# Connections in one turn of the event loop, 0.1 ms each: open ones are answered in between, and a newcomer does not
# wait long behind a flood of others.
ACCEPTED_AT_ONCE = 4
STOP_SECONDS = 5.0  # for requests in progress
HANDSHAKE_SECONDS = 3.0

# Nobody is admitted there: the kubelet connects anew for each probe, Prometheus for each scrape.
PROBE_BOUNDS = ConnectionBounds(strangers=128)

# A check returns None when all is well, else the reason; it must not block.
Check: TypeAlias = Callable[[], str | None]

AddRoutes: TypeAlias = Callable[[web.UrlDispatcher], None]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """`port` 0: any free port, see `HttpServer.port`."""

    host: str = ""  # empty: all addresses of this machine, of either family
    port: int = 8080
    backlog: int = 1024  # connections that wait to be accepted
    bounds: ConnectionBounds = field(default_factory=ConnectionBounds)
    tls: ssl.SSLContext | None = None


class HttpServer:
    """Serves until `stop()`. `start()` raises OSError when the address is taken."""

    def __init__(self, routes: Sequence[AddRoutes], options: ServerOptions) -> None:
        """Each of `routes` adds the paths that it answers."""
        self._routes, self._options = routes, options
        self._runner: web.AppRunner | None = None
        self._connections: Connections | None = None
        self._listening: list[asyncio.Server] = []
        self.port = options.port

    async def start(self) -> None:
        """Listen; afterwards `port` is the port in use."""
        app = web.Application(middlewares=[_counted])
        for add_to in self._routes:
            add_to(app.router)
        s = self._options
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_http,
            keepalive_timeout=s.bounds.idle_seconds,
            shutdown_timeout=STOP_SECONDS,
            lingering_time=1.0,  # seconds for which the rest of an unwanted body is received and dropped
            handle_signals=False,
            auto_decompress=False,  # workers do not compress, and a small body could expand to a large one
        )
        await runner.setup()
        assert runner.server is not None
        if s.tls is not None:
            tls_connections.make_small()
        connections = Connections(runner.server, s.bounds)
        try:
            loop = asyncio.get_running_loop()
            for listening in await listen(s.host, s.port):
                self._listening.append(
                    await loop.create_server(
                        connections.accept,
                        sock=listening,
                        backlog=ACCEPTED_AT_ONCE,
                        ssl=s.tls,
                        ssl_handshake_timeout=None if s.tls is None else HANDSHAKE_SECONDS,
                        ssl_shutdown_timeout=None if s.tls is None else HANDSHAKE_SECONDS,
                    )
                )
                self.port = int(listening.getsockname()[1])
                # asyncio accepts as many at once as may wait. More may wait than are accepted at once.
                listening.listen(s.backlog)
        except BaseException:
            self._close()
            await runner.cleanup()
            raise
        self._runner, self._connections = runner, connections

    def _close(self) -> None:
        for server in self._listening:
            server.close()
        self._listening.clear()

    async def stop(self) -> None:
        """Stop listening, finish requests in progress (at most `STOP_SECONDS`), close all connections."""
        runner, self._runner = self._runner, None
        if runner is not None and self._connections is not None:
            self._close()
            await runner.cleanup()
            self._connections.close()

    async def __aenter__(self) -> HttpServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class Probes:
    """The paths of the kubelet and of Prometheus. Nobody has to be admitted for them."""

    def __init__(self, metrics: Metrics, ready: Mapping[str, Check] | None = None) -> None:
        self._metrics, self._ready = metrics, dict(ready or {})
        self._scraped: dict[Format, tuple[bytes, float]] = {}  # each with the time of its rendering

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/healthz", alive)
        router.add_get("/readyz", self._readiness)
        router.add_get("/metrics", self._scrape)

    async def _readiness(self, _: web.Request) -> web.StreamResponse:
        failed = {name: reason for name, check in sorted(self._ready.items()) if (reason := check()) is not None}
        lines = [f"[-] {name}: {failed[name]}" if name in failed else f"[+] {name}" for name in sorted(self._ready)]
        return web.Response(status=503 if failed else 200, text="\n".join([*lines, "failed" if failed else "ok", ""]))

    async def _scrape(self, request: web.Request) -> web.StreamResponse:
        now = asyncio.get_running_loop().time()
        format_ = preferred_format(request.headers.getall(hdrs.ACCEPT, ()))
        body, rendered_at = self._scraped.get(format_, (b"", float("-inf")))
        if now >= rendered_at + SCRAPE_SECONDS:
            body = self._metrics.render(format_)
            self._scraped[format_] = body, now
        return web.Response(body=body, headers={"Content-Type": format_.value})


def preferred_format(accept: Sequence[str]) -> Format:
    """The format of the metrics that a request with these Accept headers prefers; the plain one unless OpenMetrics is
    named. What is no number as a weight counts as 1."""
    weights: dict[str, float] = {}
    for choice in ",".join(accept).split(","):
        media_type, *parameters = (part.strip().lower() for part in choice.split(";"))
        pairs = (parameter.partition("=") for parameter in parameters)
        weight = next((value.strip() for name, _, value in pairs if name.strip() == "q"), "1")
        number = float(weight) if re.fullmatch(r"[01](\.\d{0,3})?", weight) else 1.0
        weights[media_type] = max(number, weights.get(media_type, 0.0))
    openmetrics = weights.get("application/openmetrics-text", 0.0)
    return Format.OPENMETRICS if openmetrics > 0 and openmetrics >= weights.get("text/plain", 0.0) else Format.PLAIN


async def alive(_: web.Request) -> web.StreamResponse:
    """The fact that there is an answer shows that the event loop runs."""
    return web.Response(text="ok\n")


def add_alive(router: web.UrlDispatcher) -> None:
    """For the other replicas, which ask the leader at the address that its Lease names (`leader_probe`)."""
    router.add_get("/healthz", alive)


def add_refusal_of_plain_calls(url: str) -> AddRoutes:
    """Every path answers why nothing is taken there, for workers with the address from before TLS. They are not refused
    by it: they ask again, and train on meanwhile."""

    async def refuse(_: web.Request) -> web.StreamResponse:
        reason = f"calls are taken by TLS alone, at {url}: a pod of before TLS has to be made anew"
        return web.json_response({"reason": reason}, status=426, headers={"Upgrade": "TLS/1.3"})

    def add_to(router: web.UrlDispatcher) -> None:
        router.add_route("*", "/{path:.*}", refuse)

    return add_to


@web.middleware
async def _counted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the connection of each request, and refuse bodies in chunks: workers send none, and a chunk of one byte, or
    with a long extension, costs its reader as much as a large one."""
    connection = connection_of(request.transport)
    if connection is None or not connection.request_began(request.content_length or 0):
        raise web.HTTPServiceUnavailable  # nobody reads it
    response: web.StreamResponse | None = None
    try:
        if hdrs.TRANSFER_ENCODING in request.headers:
            request[AT_FAULT] = True
            text = "send the body in one piece, with Content-Length, not with Transfer-Encoding"
            response = web.json_response({"reason": text}, status=411)
        else:
            response = await handler(request)
        return response
    except web.HTTPException as e:
        response, request[AT_FAULT] = e, True  # no such path or method
        raise
    finally:
        whole = request.content.is_eof()
        if not whole and response is not None:
            response.force_close()
        connection.request_ended(at_fault=request.get(AT_FAULT, False), whole=whole)
