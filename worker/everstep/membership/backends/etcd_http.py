"""Calls to etcd v3's JSON gateway: endpoints in turn, TLS, user and password, and errors that say what to do.

It knows nothing of the rendezvous. It uses plain HTTP, because gRPC's threads do not survive a fork in a training
process. Invariants: a call is bounded by `Limits`; connections belong to the process that made them; no message
contains a password.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError, NameResolutionError, NewConnectionError, ProtocolError, ReadTimeoutError
from urllib3.exceptions import SSLError as TransportSSLError

from everstep.contract.addresses import host_and_port
from everstep.membership.backends.sockets import PooledClient, brief
from everstep.membership.errors import StoreRefused, StoreUnavailable

DEFAULT_PORT = 2379
MAX_ENDPOINTS = 16
MAX_LINE = 8 * 1024 * 1024  # of a watch stream

# gRPC's status codes in the gateway's replies.
_INVALID, _NOT_FOUND, _DENIED, _UNAUTHENTICATED = 3, 5, 7, 16


_Body = Sequence[Mapping[str, Any]]  # more than one element only in a stream


class NotFound(StoreRefused):
    """etcd has no such lease, or has it no more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts in seconds, and how often all endpoints are tried."""

    connect: float = 1.0
    reply: float = 1.0  # longer than a write takes; then the next member is asked, as is needed after an election
    rounds: int = 2


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials and TLS files (paths of PEM files)."""

    user: str = ""
    password: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    def context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file or None)
        except OSError as e:  # ssl.SSLError is one
            files = ", ".join(filter(None, (self.ca_file, self.cert_file, self.key_file)))
            raise StoreRefused(f"cannot load the certificates ({files}): {e}") from e
        return context


def endpoints(text: str, *, tls: bool = False) -> tuple[str, ...]:
    """`host[:port][,host[:port]...]`, each with `http://` or `https://` if wanted, as URLs. Raises ValueError."""
    urls = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        split = urlsplit(part if "://" in part else f"{'https' if tls else 'http'}://{part}")
        if split.scheme not in ("http", "https") or not split.hostname or split.path not in ("", "/") or split.username:
            raise ValueError(f"endpoint {part!r}: [http[s]://]host[:port] is expected")
        urls.append(f"{split.scheme}://{host_and_port(split.hostname, split.port or DEFAULT_PORT)}")
    if not 1 <= len(urls) <= MAX_ENDPOINTS:
        raise ValueError(f"{len(urls)} endpoints in {text!r}: 1 to {MAX_ENDPOINTS} are expected, with commas between")
    return tuple(urls)


class Gateway(PooledClient):
    """Thread-safe."""

    def __init__(self, urls: tuple[str, ...], access: Access | None = None, limits: Limits | None = None) -> None:
        self._urls, self._access, self._limits = urls, access or Access(), limits or Limits()
        self._at = 0  # index of the endpoint that answered last
        self._token = ""
        context = self._access.context() if any(url.startswith("https:") for url in urls) else None
        super().__init__(lambda: urllib3.PoolManager(num_pools=len(urls), maxsize=4, ssl_context=context))

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST to the first endpoint that answers. Raises StoreUnavailable or StoreRefused.

        A call may take effect twice: an endpoint that did not answer may have carried it out.
        """
        response = self._send(path, [body], stream=False)
        data = _object(path, response)
        # Every answer of etcd has a header. A stream's message has it inside `result`, or is an error.
        if "result" not in data and "error" not in data and not isinstance(data.get("header"), dict):
            raise StoreUnavailable(f"{path}: the answer is not etcd's: it has no header")
        return data

    def stream(self, path: str, requests: Sequence[Mapping[str, Any]], silence: float) -> Iterator[dict[str, Any]]:
        """Messages until the server ends the stream, or says nothing for `silence` seconds."""
        response = self._send(path, requests, stream=True, reply=silence)
        rest = b""
        try:
            for chunk in response.stream(65536, decode_content=False):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield json.loads(line)
                if len(rest) > MAX_LINE:
                    raise StoreUnavailable(f"a message of more than {MAX_LINE} bytes on {path}")
        except ReadTimeoutError:
            return
        except (HTTPError, ValueError) as e:
            raise StoreUnavailable(f"the stream of {path} broke: {brief(e)}") from e
        finally:
            response.close()

    def forget_token(self) -> None:
        """The next call authenticates again."""
        with self._lock:
            self._token = ""

    def _send(self, path: str, body: _Body, *, stream: bool, reply: float | None = None) -> Any:
        failures: dict[str, str] = {}
        with self._lock:
            first = self._at
        for attempt in range(self._limits.rounds * len(self._urls)):
            at = (first + attempt) % len(self._urls)
            url = self._urls[at]
            try:
                response = self._post(url, path, body, stream=stream, reply=reply)
            except (HTTPError, StoreUnavailable) as e:
                failures[url] = _explain(e, self._access)
                continue
            with self._lock:
                self._at = at
            return response
        with self._lock:
            self._at = (first + 1) % len(self._urls)
        raise StoreUnavailable("no etcd member answers: " + "; ".join(f"{url}: {why}" for url, why in failures.items()))

    def _post(self, url: str, path: str, body: _Body, *, stream: bool, reply: float | None = None) -> Any:
        """One request to one endpoint. Authenticates first, and again if the token is no longer accepted."""
        for last in (False, True):
            response = self._raw(url, path, body, self._authenticate(url), stream=stream, reply=reply)
            if response.status == 200:
                return response
            problem = _problem(response)
            if not last and self._access.user and problem.stale_token:
                self.forget_token()
                continue
            raise problem.error(url, self._access)
        raise AssertionError("unreachable")

    def _authenticate(self, url: str) -> str:
        if not self._access.user:
            return ""
        with self._lock:
            token = self._token
        if token:
            return token
        body = {"name": self._access.user, "password": self._access.password}
        response = self._raw(url, "/v3/auth/authenticate", [body], "", stream=False)
        if response.status != 200:
            problem = _problem(response)
            if "authentication is not enabled" in problem.text:
                return ""
            raise problem.error(url, self._access)
        token = str(_object("/v3/auth/authenticate", response).get("token", ""))
        if not token:
            raise StoreUnavailable(f"{url}: the answer is not etcd's: it has no token")
        with self._lock:
            self._token = token
        return token

    def _raw(self, url: str, path: str, body: _Body, token: str, *, stream: bool, reply: float | None = None) -> Any:
        return self._own_pool().request(
            "POST",
            url + path,
            body="\n".join(map(json.dumps, body)).encode(),
            headers={"Content-Type": "application/json", **({"Authorization": token} if token else {})},
            timeout=urllib3.Timeout(connect=self._limits.connect, read=reply or self._limits.reply),
            retries=False,
            redirect=False,
            preload_content=not stream,
        )


@dataclass(frozen=True, slots=True)
class _Problem:
    """The content of a reply whose status is not 200."""

    status: int
    code: int
    text: str

    @property
    def stale_token(self) -> bool:
        return self.code == _UNAUTHENTICATED or "revision of auth store is old" in self.text

    def error(self, url: str, access: Access) -> Exception:
        if self.status == 404 and "lease" not in self.text:
            # For a moment, another server may answer at an address that was etcd's. That must end no worker.
            return StoreUnavailable(
                f"{url} has no etcd v3 JSON gateway (404): it is etcd older than 3.4, no etcd, or was started with"
                " --enable-grpc-gateway=false"
            )
        if "authentication failed" in self.text:
            return StoreRefused(f"{url} refuses user {access.user!r}: wrong name or password")
        if "CommonName of client" in self.text:
            return StoreRefused(
                f"{url}: with users enabled, etcd's gateway takes no client certificate that has a common name: use one"
                " without, and `user` and `password_file`"
            )
        if "user name is empty" in self.text or (self.code == _DENIED and not access.user):
            return StoreRefused(f"{url} wants a user and a password: give `user` and `password_file`")
        if self.code == _DENIED:
            return StoreRefused(f"{url}: user {access.user!r} may not read and write the rendezvous' keys: {self.text}")
        if self.code == _NOT_FOUND:
            return NotFound(f"{url}: {self.text}")
        if self.code in (_INVALID, _UNAUTHENTICATED) and "leader" not in self.text:
            return StoreRefused(f"{url}: {self.text}")
        return StoreUnavailable(f"{self.status} {self.text}")


def _object(path: str, response: Any) -> dict[str, Any]:
    """The answer's body. Raises StoreUnavailable: another server may answer at an address that was etcd's."""
    try:
        data = json.loads(response.data or b"{}")
    except (HTTPError, ValueError, RecursionError) as e:
        raise StoreUnavailable(f"{path}: the answer is not etcd's: {brief(e)}") from e
    finally:
        response.release_conn()
    if not isinstance(data, dict):
        raise StoreUnavailable(f"{path}: the answer is not etcd's: no JSON object")
    return data


def _problem(response: Any) -> _Problem:
    try:
        text = bytes(response.data).decode(errors="replace")
    except HTTPError as e:
        text = brief(e)
    finally:
        response.release_conn()
    code = -1
    try:
        body = json.loads(text)
        error = body.get("error")
        if isinstance(error, dict):  # a stream's form of an error
            body, error = error, error.get("message")
        code, text = int(body.get("code", body.get("grpc_code", -1))), str(body.get("message") or error or text)
    except (ValueError, AttributeError, TypeError):
        pass
    return _Problem(response.status, code, text[:300])


def _explain(error: Exception, access: Access) -> str:
    """The meaning of a failed attempt, with the fix if there is one."""
    if isinstance(error, NameResolutionError):
        return "unknown host: check the endpoint's name"
    if isinstance(error, TransportSSLError):
        hint = "" if access.ca_file else " (give `ca_file` if the certificate is from a CA of your own)"
        return f"TLS: {brief(error)}{hint}"
    if isinstance(error, NewConnectionError):
        return f"cannot connect: {brief(error)}"
    if isinstance(error, ProtocolError):
        return f"{brief(error)} (an endpoint that speaks TLS needs https://)"
    return brief(error)
