"""An HTTP session with the API server. It is renewed with its credentials.

Invariant: after a 401, or a certificate that does not verify, a request is repeated at most once, with credentials that
were loaded after the failure. Requests in flight finish on the old session, which is closed after the last of them. To
close it at once would cut healthy watches, and leave the outcome of writes unknown.

The official client is used for kubeconfigs alone, and sends no requests: it copies each body value by value, and looks
for the environment's proxy and .netrc in a thread before each request, which cost more than the request (ADR 0047).
"""

import asyncio
import json
import ssl
import urllib.request
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import aiohttp
import msgspec
from yarl import URL

from everstep_operator.kube import credentials
from everstep_operator.kube.access import Access
from everstep_operator.kube.errors import ConnectionFailed, KubeError, Operation, from_response
from everstep_operator.kube.framing import MAX_BODY

RELOAD_EVERY = 5.0  # least seconds between two loads: an exec plug-in starts a process, and bad credentials stay bad
USER_AGENT = "everstep-operator"
READ_BUFFER = 2**21  # bytes of an answer that wait for their reader: a watch sends many events at once


@dataclass(frozen=True, slots=True)
class Request:
    """A request. `total` bounds the whole exchange in seconds, `connect` the TCP and TLS handshakes. `check` is called
    right before it is sent, each time, and raises if it must not be."""

    method: str
    path: str
    operation: Operation
    query: tuple[tuple[str, str], ...] = ()
    body: Mapping[str, Any] | None = None
    content_type: str = "application/json"
    accept: str = "application/json"
    total: float = 30.0
    connect: float = 5.0
    check: Callable[[], object] = lambda: None


@dataclass(slots=True)
class _Generation:
    """The connections with one set of credentials, and how many requests use them."""

    access: Access
    http: aiohttp.ClientSession
    proxy: str | None
    users: int = 0
    retired: bool = False


class Session:
    """Sends requests. It does not know what they mean."""

    def __init__(self, source: credentials.Source, connections: int) -> None:
        self._source = source
        self._connections = connections
        self._current: _Generation | None = None
        self._loaded_at = 0.0
        self._lock = asyncio.Lock()

    async def close(self) -> None:
        """Close the connections; requests in flight fail with `ConnectionFailed`."""
        if self._current is not None:
            await self._current.http.close()
            self._current = None

    @asynccontextmanager
    async def send(self, request: Request) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """An answer with a code below 400, whose body is not read yet. Raises `KubeError`, also for errors inside the
        block."""
        used = await self._newer_than(None)
        try:
            async with self._exchange(used, request) as response:
                if response.status != 401:
                    yield response
                    return
            refused: KubeError | None = None
        except _BadCertificate as error:
            refused = error
        fresh = await self._newer_than(used)
        async with self._exchange(fresh, request) as response:
            if response.status == 401:
                raise refused or await _error_of(response, request.operation)
            yield response

    @asynccontextmanager
    async def _exchange(self, used: _Generation, request: Request) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Send one request with one generation of credentials. Every code from 400 on except 401 is raised as its
        error."""
        used.users += 1
        response: aiohttp.ClientResponse | None = None
        try:
            response = await _call(used, request)
            if response.status >= 400 and response.status != 401:
                raise await _error_of(response, request.operation)
            yield response
        except (aiohttp.ClientConnectorCertificateError, ssl.SSLCertVerificationError) as error:
            raise _BadCertificate(
                f"the server's certificate is not trusted by {used.access.authority}: {error}",
                operation=request.operation,
            ) from error
        except TimeoutError as error:
            raise ConnectionFailed(
                f"no complete answer within {request.total:g} s", operation=request.operation
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionFailed(f"{type(error).__name__}: {error}", operation=request.operation) from error
        finally:
            if response is not None:
                # A connection with unread bytes cannot be used again, so aiohttp drops it.
                response.release() if response.content.at_eof() else response.close()
            used.users -= 1
            if used.retired and not used.users:
                await used.http.close()

    async def _newer_than(self, used: _Generation | None) -> _Generation:
        """The current generation. If it is still `used`, it is loaded again, unless that was tried moments ago."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            old = self._current
            if old is not None and (old is not used or now - self._loaded_at < RELOAD_EVERY):
                return old
            access = await credentials.load(self._source)
            self._current, self._loaded_at = _generation(access, self._connections), now
            if old is not None:
                old.retired = True
                if not old.users:
                    await old.http.close()
            return self._current


class _BadCertificate(ConnectionFailed):
    """TLS refused the server: its CA may have been rotated."""


def _generation(access: Access, connections: int) -> _Generation:
    connector = aiohttp.TCPConnector(limit=connections, ssl=access.tls)
    http = aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=READ_BUFFER,
        headers={"User-Agent": USER_AGENT},
    )
    return _Generation(access, http, access.proxy or environment_proxy(access.server))


def environment_proxy(server: str) -> str | None:
    """The proxy that HTTPS_PROXY, HTTP_PROXY and NO_PROXY name for the API server at this URL."""
    url = urlsplit(server)
    if url.hostname is None or urllib.request.proxy_bypass(url.hostname):
        return None
    return urllib.request.getproxies().get(url.scheme)


async def _call(used: _Generation, request: Request) -> aiohttp.ClientResponse:
    # No compression: inside a cluster it costs the server more than it saves on the network.
    headers = {"Accept": request.accept, "Accept-Encoding": "identity", "Content-Type": request.content_type}
    access = used.access
    if authorization := await access.authorization():
        headers["Authorization"] = authorization
    query = f"?{urlencode(request.query)}" if request.query else ""
    request.check()
    return await used.http.request(
        request.method,
        URL(f"{access.server}{request.path}{query}", encoded=True),
        headers=headers,
        data=None if request.body is None else encoded(request.body),
        timeout=aiohttp.ClientTimeout(total=request.total, sock_connect=request.connect),
        proxy=used.proxy,
        proxy_headers=access.proxy_headers,
        server_hostname=access.tls_server_name,
    )


def encoded(body: Mapping[str, Any]) -> bytes:
    """The body as JSON."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:  # half of a surrogate pair: this encoder escapes it, and the server replaces it
        return json.dumps(body).encode("ascii")


async def read_body(response: aiohttp.ClientResponse, operation: Operation) -> bytes:
    """The whole body. Raises `ConnectionFailed` beyond `MAX_BODY` bytes."""
    parts: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > MAX_BODY:
            raise ConnectionFailed(f"the answer exceeds {MAX_BODY} bytes", operation=operation, status=response.status)
        parts.append(chunk)
    return b"".join(parts)


async def _error_of(response: aiohttp.ClientResponse, operation: Operation) -> KubeError:
    return from_response(response.status, response.headers, await read_body(response, operation), operation)
