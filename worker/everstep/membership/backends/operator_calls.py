"""Calls to the operator's HTTP server: the pod's token, the leader's address, and errors that say what to do.

It knows nothing of the rendezvous. The token is sent to the configured address, and to the leader's address, which the
configured one names in a redirect (307). A redirect is followed once, with the same scheme and path, and is remembered
until it fails. An address in a cluster may belong to another server by now. So a refusal by the leader's address is
final only if the configured address repeats it. For a moment, the configured address may belong to another server too:
an answer that does not fit the call, and is not the operator's own refusal, counts as an outage. A token that was
accepted before may also be refused for a moment: the file may hold an expired token, or the cluster may be changing its
keys. So one 401 does not end an agent that has trained for days.
Invariants: a call is bounded in time and size; connections belong to the process that made them; no message contains
the token.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NameResolutionError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
)
from urllib3.exceptions import SSLError as TransportSSLError

from everstep.contract import env
from everstep.contract.addresses import host_and_port
from everstep.contract.messages import is_refusal, words
from everstep.contract.rounds import LEADER_HEADER
from everstep.membership.backends.hedging import (
    LOOK_SECONDS,
    AnsweredLater,
    handshake_seconds,
    meanwhile,
    wait_for_answer,
)
from everstep.membership.backends.names import Names
from everstep.membership.backends.sockets import PooledClient, brief
from everstep.membership.errors import StoreRefused, StoreUnavailable
from everstep.membership.peers.probe import connect
from everstep.torch_private.libraries import OpensItself

# --- connections
# Connections to the operator that end soon after a machine falls silent, and that find a living machine. A machine that
# lost its power or its network closes no connection, so a caller would wait until its timeout. But its kernel
# acknowledges nothing either, and TCP finds that within `SILENT` seconds. A Service stands for several machines, and
# each attempt to connect reaches one of them. So while an attempt is not answered, another is made. A slow process is
# not mistaken for a lost machine: its kernel still answers, so the caller waits for it. Linux only.

SILENT = 1.5  # seconds in which sent data must be acknowledged; otherwise the connection ends
ALIVE = 1  # seconds of silence before a keepalive probe; a whole number
SPACING = 0.1  # seconds between attempts to connect
HANDSHAKE = 3.0  # seconds for the answers of TLS: a busy operator is connected at once, and answers later
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENT * 1000)),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ALIVE),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_names = Names()


def open_connection(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to the host; each of its addresses gets about `seconds` seconds. Raises OSError."""
    attempts = max(1, round(seconds / SPACING))
    last = 0
    for family, kind, _, _, address in _names.find(host, port):
        assert kind == socket.SOCK_STREAM
        made = connect(family, address, attempts, SPACING, spacing=SPACING)
        if isinstance(made, socket.socket):
            for option in _OPTIONS:
                made.setsockopt(*option)
            return made
        last = made
    if last:
        raise OSError(last, os.strerror(last))
    raise TimeoutError(errno.ETIMEDOUT, f"no answer in {seconds:g} s")


class _Opening(OpensItself):
    """Overrides how urllib3 opens a connection."""

    answer_seconds = 0.0  # at least so long may the other end take for what follows the connection

    def opened(self, host: str) -> socket.socket:
        mine: Any = self
        try:
            made = open_connection(host, mine.port, mine.timeout)
        except socket.gaierror as e:
            raise NameResolutionError(mine.host, mine, e) from e
        except TimeoutError as e:
            raise ConnectTimeoutError(mine, f"no connection to {mine.host}:{mine.port}: {e.strerror}") from e
        except OSError as e:
            raise NewConnectionError(mine, f"no connection to {mine.host}:{mine.port}: {e.strerror}") from e
        made.settimeout(max(mine.timeout, handshake_seconds(self.answer_seconds)))
        return made


class _Http(_Opening, AnsweredLater, HTTPConnection):
    pass


class _Https(_Opening, AnsweredLater, HTTPSConnection):
    answer_seconds = HANDSHAKE


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _Https


class Pool(PoolManager):
    """urllib3's pool manager, with these connections."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}


# --- operator calls

MAX_TOKEN = 8000  # characters; a longer token would not fit into a header
MAX_ERROR = 64 * 1024
PIECE = 64 * 1024  # bytes read at once


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts in seconds, and how often a silent address is tried: half as often if replies are late."""

    connect: float = 0.5  # short, because an attempt may reach, or be redirected to, a lost machine behind a Service
    reply: float = 5.0  # long enough for the operator to ask its API server
    tries: int = 4
    unauthorized: float = 60.0  # for this long, 401 is not final for an agent that was accepted before


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    data: bytes = field(repr=False)

    @property
    def reason(self) -> str:
        """The server's explanation."""
        return words(self.data) or self.data[:100].decode(errors="replace").strip() or "no reason given"


def base_url(text: str, default_port: int, *, tls: bool = False) -> str:
    """`[http[s]://]host[:port]` as a URL without a path. Raises ValueError."""
    split = urlsplit(text if "://" in text else f"{'https' if tls else 'http'}://{text}")
    if split.scheme not in ("http", "https") or not split.hostname or split.path not in ("", "/") or split.username:
        raise ValueError(f"{text!r}: [http[s]://]host[:port] is expected")
    standard = 443 if split.scheme == "https" else 80
    port = split.port or (standard if "://" in text else default_port)
    return f"{split.scheme}://{host_and_port(split.hostname, port)}"


class OperatorCalls(PooledClient):
    """Thread-safe. `url` has no path. Without `token_file`, no token is sent. `clock`: monotonic seconds."""

    def __init__(
        self,
        url: str,
        token_file: str = "",
        ca_file: str = "",
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        ca: str = "",
    ) -> None:
        """`ca_file`, or its text `ca`: PEM of the authorities by which a server of https:// is verified; without them,
        those of the system. The leader is reached at its pod's address, and verified under the host name of `url`."""
        self._url, self._token_file, self._limits = url, token_file, limits or Limits()
        self._clock = clock
        self._accepted = False
        self._named: str | None = None  # the leader, as an answer has named it last
        self._unauthorized_since: float | None = None  # the first 401 after the last answer
        self._leader: str | None = None
        settings: dict[str, Any] = {}
        if url.startswith("https:"):
            settings = {"ssl_context": _context(ca_file, ca), "server_hostname": urlsplit(url).hostname}
        super().__init__(lambda: Pool(num_pools=4, maxsize=4, **settings))

    def call(
        self,
        method: str,
        path: str,
        *,
        expect: Collection[int],
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        limit: int = 0,
        reply: float | None = None,
        hedged: bool = False,
    ) -> Reply:
        """An answer with one of the statuses `expect`, and at most `limit` bytes if it is 200.

        Raises StoreRefused if the operator itself refuses, and StoreUnavailable for every other answer. A 401 is
        StoreUnavailable too, within `Limits.unauthorized` seconds of the first one, if a call was answered before. A
        call may take effect twice: an address that did not answer may have carried it out. `hedged`: while it waits,
        another leader is looked for; if one is found, every call that waits for the old one is sent there.
        """
        seconds = reply or self._limits.reply
        wanted = _Call(method, path, body, dict(headers or {}), frozenset(expect), limit, seconds, hedged)
        return self._ask_leader(wanted) or self._ask(wanted)

    def _ask_leader(self, wanted: _Call) -> Reply | None:
        """The answer of the leader; None if it is not known, or does not answer as expected: then it is forgotten."""
        for _ in range(3):  # another one may be found while the first one is waited for
            leader = self._leader
            if leader is None:
                break
            with contextlib.suppress(HTTPError, StoreUnavailable):
                answer = self._send(leader, wanted)
                if answer.status in wanted.expect:
                    self._was_accepted(answer, leader, wanted)
                    return answer
            with self._lock:
                if self._leader == leader:
                    self._leader = None
        return None

    def _ask(self, wanted: _Call) -> Reply:
        """Ask the configured address, and the one to which it redirects."""
        why, left = "", self._limits.tries
        while left > 0:
            try:
                reply, at = self._send(self._url, wanted), self._url
                if reply.status == 307:
                    at = self._target(reply.headers.get("Location", ""), wanted)
                    reply = self._send(at, wanted)
            except HTTPError as e:
                if (answer := self._ask_leader(wanted)) is not None:  # it was found while this call waited
                    return answer
                why = _explain(e)
                left -= 2 if isinstance(e, ReadTimeoutError) else 1
                continue
            if reply.status == 307:
                raise StoreUnavailable(f"{at} was named as the operator's leader and names another: it is not settled")
            if reply.status not in wanted.expect:
                raise self._again(at, reply) or _error(at, reply)
            self._was_accepted(reply, at, wanted)
            return reply
        raise StoreUnavailable(f"the operator at {self._url} does not answer: {why}")

    def _was_accepted(self, reply: Reply, at: str, wanted: _Call) -> None:
        with self._lock:
            self._accepted, self._unauthorized_since = True, None
        if at != self._url:
            self._leader = at
        with contextlib.suppress(StoreUnavailable):  # a leader that names itself in a way that is not followed
            self._follow(self._leader_of(reply, wanted) or (at if at != self._url else None))

    def _follow(self, named: str | None) -> bool:
        """Note who leads. If that is another than before, calls that wait for the former one are sent there, because it
        may be frozen: it would not end them. Whether it is another."""
        with self._lock:
            former = self._named
            self._named = named or former
            if named is None or former in (None, named):
                return False
            self._leader = named
        self._end_connections(self._own_pool())
        return True

    def _look_for_another(self, wanted: _Call) -> bool | None:
        """Whether another replica leads by now; None if nobody answers. See `hedging`."""
        try:
            reply = self._raw(self._url, replace(wanted, reply=LOOK_SECONDS, hedged=False), self._token())
            return self._follow(self._leader_of(reply, wanted))
        except (HTTPError, StoreUnavailable):
            return None

    def _leader_of(self, reply: Reply, wanted: _Call) -> str | None:
        """The leader that the answer names."""
        if reply.status == 307:
            return self._target(reply.headers.get("Location", ""), wanted)
        named = reply.headers.get(LEADER_HEADER)
        return None if not named or reply.status not in wanted.expect else self._target(named + wanted.path, wanted)

    def _again(self, at: str, reply: Reply) -> StoreUnavailable | None:
        """The error to raise for a 401 that is not final yet; None if it is final, or no 401."""
        if reply.status != 401:
            return None
        with self._lock:
            if not self._accepted:
                return None
            now = self._clock()
            since = self._unauthorized_since = now if self._unauthorized_since is None else self._unauthorized_since
        if now - since >= self._limits.unauthorized:
            return None
        return StoreUnavailable(
            f"{at} answers 401: {reply.reason} (the token was accepted before: tried again for"
            f" {self._limits.unauthorized:g} s)"
        )

    def _target(self, location: str, wanted: _Call) -> str:
        """The target of a redirect. Refused if the token could go to a server for which it was not meant."""
        url = location.removesuffix(wanted.path)
        try:
            split, mine = urlsplit(url), urlsplit(self._url)
            good = (
                url != location and split.scheme == mine.scheme and bool(split.hostname) and split.port is not None
                and (split.path, split.query, split.fragment, split.username) == ("", "", "", None)
            )  # fmt: skip
        except ValueError:
            good = False
        if not good:
            raise StoreUnavailable(
                f"{self._url} redirects to {location[:200]!r}: only the same scheme and path at another host:port are"
                " followed, because the pod's token goes with it"
            )
        return url

    def _send(self, url: str, wanted: _Call) -> Reply:
        """One request, and a second one if the token was refused and the file holds another by now."""
        token = self._token()
        reply = self._raw(url, wanted, token)
        if reply.status in (401, 403) and (fresh := self._token()) != token:
            reply = self._raw(url, wanted, fresh)
        return reply

    def _token(self) -> str:
        if not self._token_file:
            return ""
        try:
            with Path(self._token_file).open(encoding="ascii") as file:
                token = file.read(MAX_TOKEN + 1).strip()
        except (OSError, UnicodeDecodeError) as e:
            raise StoreUnavailable(f"the pod's token cannot be read: {e}") from e
        if not token.isprintable() or len(token) >= MAX_TOKEN:
            raise StoreRefused(f"{self._token_file} holds no token: {len(token)} characters or more, or not one line")
        return token

    def _raw(self, url: str, wanted: _Call, token: str) -> Reply:
        headers = {**wanted.headers, **({"Authorization": f"Bearer {token}"} if token else {})}
        pool = self._own_pool()
        look = partial(self._look_for_another, wanted)
        hedge = partial(wait_for_answer, seconds=wanted.reply, look=look) if wanted.hedged else None
        try:
            with meanwhile(hedge):
                response = pool.request(
                    wanted.method,
                    url + wanted.path,
                    body=wanted.body,
                    headers=headers,
                    timeout=urllib3.Timeout(connect=self._limits.connect, read=wanted.reply),
                    retries=False,
                    redirect=False,
                    preload_content=False,
                )
        except HTTPError:
            pool.clear()  # idle connections may lead to the same silent machine
            raise
        limit = wanted.limit if response.status == 200 else MAX_ERROR
        try:
            data = b""
            # Read to the end: a truncated body is no answer, and a single `read` does not show truncation.
            while part := response.read(PIECE, decode_content=False):
                data += part
                if len(data) > limit:
                    raise StoreUnavailable(f"{url} answers with more than {limit} bytes")
        except BaseException:
            response.close()
            raise
        response.release_conn()
        return Reply(response.status, response.headers, data)


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    path: str
    body: bytes | None
    headers: dict[str, str]
    expect: frozenset[int]
    limit: int
    reply: float
    hedged: bool


def _context(ca_file: str, ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None, cadata=ca or None)
    except OSError as e:  # ssl.SSLError is one
        raise StoreRefused(f"cannot load the certificates ({ca_file or env.CA_CERTIFICATES}): {e}") from e


def _error(url: str, reply: Reply) -> Exception:
    text = f"{url} answers {reply.status}: {reply.reason}"
    if not is_refusal(reply.status, reply.data):
        if reply.status == 404:
            text += " (it is no Everstep operator, or one of an older release without a round store)"
        return StoreUnavailable(text)
    if reply.status == 401:
        text += " (the token is that of this pod, from EVERSTEP_TOKEN_FILE or `token_file`)"
    return StoreRefused(text)


def _explain(error: Any) -> str:
    if isinstance(error, NameResolutionError):
        return "unknown host: check the endpoint's name"
    text = brief(error)
    if not isinstance(error, TransportSSLError):
        ended = isinstance(error, ProtocolError)
        return f"{text}; if that port speaks TLS, write https://" if ended else text
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"TLS: {text}: the certificate is judged by `ca_file`, else {env.CA_CERTIFICATES}, else the image's own"
    if "WRONG_VERSION_NUMBER" in text:
        return f"TLS: {text}: that port does not speak TLS: write http://, or its port for TLS"
    return f"TLS: {text}"
