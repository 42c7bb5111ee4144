"""Calls to the operator's HTTP server: the pod's token, the leader's address, and errors that say what to do.

Knows no rendezvous. The token is sent to the address that was configured, and to the one that this address names in a
redirect (307, its leader): same scheme, same path, one step, remembered until it fails. What the leader's address
answers is final only if the configured address says so too: an address in a cluster may be another's by now. So may
the configured one, for a moment: what is not an answer to the call, or not the operator's own refusal, is an outage.
A token that was accepted before may be refused for a moment too, while the file holds an expired one, or the cluster
changes its keys: an agent that has trained for days is not ended by one 401.
Invariants: a call is bounded in time and size; connections belong to the process that made them; the token is in no
message.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError, NameResolutionError, ReadTimeoutError
from urllib3.exceptions import SSLError as TransportSSLError

from everstep.contract.answers import is_refusal, words
from everstep.membership.backends.connections import Pool
from everstep.membership.backends.forks import after_fork
from everstep.membership.backends.sockets import Sockets
from everstep.membership.errors import StoreRefused, StoreUnavailable

MAX_TOKEN = 8000  # characters: more would not fit into a header
MAX_ERROR = 64 * 1024
PIECE = 64 * 1024  # bytes read at once


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds, and how often an address that does not answer is tried: half as often where replies are late."""

    connect: float = 0.5  # behind a Service each try may name, or be, a machine that is lost: ask again soon
    reply: float = 5.0  # an operator asks its API server, too
    tries: int = 4
    unauthorized: float = 60.0  # for which 401 is no final answer to an agent that was accepted before


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    data: bytes = field(repr=False)

    @property
    def reason(self) -> str:
        """What the server says about it."""
        return words(self.data) or self.data[:100].decode(errors="replace").strip() or "no reason given"


def base_url(text: str, default_port: int, *, tls: bool = False) -> str:
    """`[http[s]://]host[:port]` as a URL without a path. Raises ValueError."""
    split = urlsplit(text if "://" in text else f"{'https' if tls else 'http'}://{text}")
    if split.scheme not in ("http", "https") or not split.hostname or split.path not in ("", "/") or split.username:
        raise ValueError(f"{text!r}: [http[s]://]host[:port] is expected")
    host = f"[{split.hostname}]" if ":" in split.hostname else split.hostname
    standard = 443 if split.scheme == "https" else 80
    return f"{split.scheme}://{host}:{split.port or (standard if '://' in text else default_port)}"


class OperatorCalls:
    """Thread-safe. `url` is without a path; no `token_file`: no token is sent. `clock`: monotonic seconds."""

    def __init__(
        self,
        url: str,
        token_file: str = "",
        ca_file: str = "",
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url, self._token_file, self._limits = url, token_file, limits or Limits()
        self._clock = clock
        self._accepted = False
        self._unauthorized_since: float | None = None  # the first 401 after the last answer
        self._lock = threading.Lock()
        self._leader: str | None = None
        self._pool: Pool | None = None
        self._sockets = Sockets()
        self._context = _context(ca_file) if url.startswith("https:") else None
        after_fork(self)

    def forked(self) -> None:
        """The parent's sockets are left alone: two processes must not speak on one connection."""
        self._lock, self._pool = threading.Lock(), None
        self._sockets.forked()

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
    ) -> Reply:
        """An answer with one of the statuses `expect`, and at most `limit` bytes if it is 200.

        Raises StoreRefused where the operator itself refuses, and StoreUnavailable whatever else is answered; also for
        401 within `Limits.unauthorized` seconds of the first one, if a call was answered before. A call may have been
        carried out by an address that did not answer, and is then carried out again.
        """
        wanted = _Call(method, path, body, dict(headers or {}), frozenset(expect), limit, reply or self._limits.reply)
        leader = self._leader
        if leader is not None:
            try:
                found = self._send(leader, wanted)
            except (HTTPError, StoreUnavailable):
                found = None
            if found is not None and found.status in wanted.expect:
                self._was_accepted()
                return found
            self._leader = None
        return self._ask(wanted)

    def close(self) -> None:
        """End what is under way too; no call succeeds any more."""
        with self._lock:
            pool, self._pool = self._pool, None
        self._sockets.shut()
        if pool is not None:
            pool.clear()

    def _ask(self, wanted: _Call) -> Reply:
        """At the configured address, and where it points to."""
        why, left = "", self._limits.tries
        while left > 0:
            try:
                found, at = self._send(self._url, wanted), self._url
                if found.status == 307:
                    at = self._target(found, wanted)
                    found = self._send(at, wanted)
            except HTTPError as e:
                why = _explain(e)
                left -= 2 if isinstance(e, ReadTimeoutError) else 1
                continue
            if found.status == 307:
                raise StoreUnavailable(f"{at} was named as the operator's leader and names another: it is not settled")
            if found.status not in wanted.expect:
                raise self._again(at, found) or _error(at, found)
            self._was_accepted()
            if at != self._url:
                self._leader = at
            return found
        raise StoreUnavailable(f"the operator at {self._url} does not answer: {why}")

    def _was_accepted(self) -> None:
        with self._lock:
            self._accepted, self._unauthorized_since = True, None

    def _again(self, at: str, found: Reply) -> StoreUnavailable | None:
        """For a 401 that is not final yet."""
        if found.status != 401:
            return None
        with self._lock:
            if not self._accepted:
                return None
            now = self._clock()
            since = self._unauthorized_since = now if self._unauthorized_since is None else self._unauthorized_since
        if now - since >= self._limits.unauthorized:
            return None
        return StoreUnavailable(
            f"{at} answers 401: {found.reason} (the token was accepted before: tried again for"
            f" {self._limits.unauthorized:g} s)"
        )

    def _target(self, found: Reply, wanted: _Call) -> str:
        """Where a redirect leads; not followed if the token would go where nobody may have meant it to."""
        location = found.headers.get("Location", "")
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
        """One request; a second one if the token was refused and the file holds another by now."""
        token = self._token()
        found = self._raw(url, wanted, token)
        if found.status in (401, 403) and (fresh := self._token()) != token:
            found = self._raw(url, wanted, fresh)
        return found

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
        try:
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
            pool.clear()  # others that stand idle may lead to the same silent machine
            raise
        limit = wanted.limit if response.status == 200 else MAX_ERROR
        try:
            data = b""
            # To its end, which one `read` does not tell: a body that was cut off is no answer.
            while part := response.read(PIECE, decode_content=False):
                data += part
                if len(data) > limit:
                    raise StoreUnavailable(f"{url} answers with more than {limit} bytes")
        except BaseException:
            response.close()
            raise
        response.release_conn()
        return Reply(response.status, response.headers, data)

    def _own_pool(self) -> Pool:
        with self._lock:
            if self._pool is None:
                self._pool = self._sockets.of(Pool(num_pools=4, maxsize=4, ssl_context=self._context))
            return self._pool


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    path: str
    body: bytes | None
    headers: dict[str, str]
    expect: frozenset[int]
    limit: int
    reply: float


def _context(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as e:  # ssl.SSLError is one
        raise StoreRefused(f"cannot load the certificates ({ca_file}): {e}") from e


def _error(url: str, found: Reply) -> Exception:
    text = f"{url} answers {found.status}: {found.reason}"
    if not is_refusal(found.status, found.data):
        if found.status == 404:
            text += " (it is no Everstep operator, or one of an older release without a round store)"
        return StoreUnavailable(text)
    if found.status == 401:
        text += " (the token is that of this pod, from EVERSTEP_TOKEN_FILE or `token_file`)"
    return StoreRefused(text)


def _explain(error: Any) -> str:
    if isinstance(error, NameResolutionError):
        return "unknown host: check the endpoint's name"
    text = str(error)
    text = text if len(text) <= 200 else text[:197] + "..."
    return f"TLS: {text}" if isinstance(error, TransportSSLError) else text
