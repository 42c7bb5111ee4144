"""Case 79: credentials that expire in the middle of an upload are read again, and the upload goes on where it was.

A proxy in front of the real S3 server knows which session tokens are valid now, as S3 itself would. It signs what it
passes on itself, because the server knows permanent keys only.
"""

import http.client
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from everstep.storage import RetryingStore, RetryPolicy, open_store
from everstep.testing.contract import pattern
from testcluster.s3 import S3Server

PART = 5 * 2**20
FAST = RetryPolicy(first=0.01, most=0.05, outage=20.0)
PASSED = {"content-type", "content-md5", "content-length", "range", "if-none-match"}
EXPIRED = b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>The token has expired</Message></Error>"


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, and whether the token was still good."""

    what: str
    accepted: bool


class TokenProxy(ThreadingHTTPServer):
    """Passes requests whose session token is `token`; `on_request` may change it first."""

    daemon_threads = True

    def __init__(self, endpoint: str, access_key: str, secret_key: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend = urlsplit(endpoint).netloc
        self.keys = Credentials(access_key, secret_key)
        self.token = "token-1"
        self.seen: list[Request] = []
        self.on_request: Callable[[str], None] = lambda what: None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: TokenProxy
    protocol_version = "HTTP/1.1"

    def _forward(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        what = self.command + (f" part {query['partNumber'][0]}" if "partNumber" in query else "")
        what += " uploads" if "uploads" in query else ""
        if self.headers.get("Expect") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.on_request(what)
        token = self.headers.get("x-amz-security-token") or query.get("X-Amz-Security-Token", [""])[0]
        accepted = token == self.server.token
        self.server.seen.append(Request(what, accepted))
        if not accepted:
            self._answer(400, [], EXPIRED)
            return
        headers = {k: v for k, v in self.headers.items() if k.lower() in PASSED}
        request = AWSRequest(self.command, f"http://{self.server.backend}{self._path()}", headers, body)
        S3SigV4Auth(self.server.keys, "s3", "us-east-1").add_auth(request)
        connection = http.client.HTTPConnection(self.server.backend, timeout=30)
        connection.request(self.command, self._path(), body, dict(request.headers.items()))
        reply = connection.getresponse()
        data = reply.read()
        self._answer(reply.status, reply.getheaders(), data)
        connection.close()

    def _path(self) -> str:
        """The path without the parameters of a signature, which is this proxy's to make."""
        path, _, query = self.path.partition("?")
        kept = [p for p in query.split("&") if not p.lower().startswith(("x-amz-", "x-id="))]
        return path + ("?" + "&".join(kept) if any(kept) else "")

    do_PUT = do_POST = do_GET = do_HEAD = do_DELETE = _forward

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        self.send_response_only(status)
        kept = [(k, v) for k, v in headers if k.lower() not in ("connection", "transfer-encoding", "content-length")]
        length = {k.lower(): v for k, v in headers}.get("content-length") if self.command == "HEAD" else None
        for name, value in [*kept, ("Content-Length", length or str(len(data)))]:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenProxy]:
    proxy = TokenProxy(s3_server.endpoint, s3_server.access_key, s3_server.secret_key)
    threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    for name, value in (s3_server.env | {"AWS_ENDPOINT_URL": proxy.endpoint}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-1")
    s3_server.bucket("everstep-tests")
    yield proxy
    proxy.shutdown()
    proxy.server_close()


def test_token_that_expires_between_parts_is_read_again_and_no_part_is_sent_twice(proxy: TokenProxy) -> None:
    refused = 0

    def expire(what: str) -> None:
        """The token changes when part 3 arrives; who refreshes credentials needs a moment longer."""
        nonlocal refused
        if what == "PUT part 3":
            proxy.token = "token-2"
            refused += 1
            if refused == 3:
                os.environ["AWS_SESSION_TOKEN"] = "token-2"

    proxy.on_request = expire
    store = RetryingStore(open_store("s3://everstep-tests/expiring", part_size=PART), FAST)
    data = pattern(5 * PART + 11)
    with store.open_write("shard", len(data)) as writer:
        for start in range(0, len(data), PART // 2):
            writer.write(data[start : start + PART // 2])
        writer.commit()
    writes = [r.what for r in proxy.seen if r.accepted and r.what.startswith(("PUT", "POST"))]
    assert writes == ["POST uploads", *(f"PUT part {n}" for n in range(1, 7)), "POST"]
    assert [r.what for r in proxy.seen if not r.accepted] == ["PUT part 3"] * 3
    assert store.get("shard") == data


def test_options_that_are_a_function_give_fresh_credentials(proxy: TokenProxy, s3_server: S3Server) -> None:
    given: list[str] = []

    def options() -> dict[str, str]:
        given.append(proxy.token)
        return {"key": s3_server.access_key, "secret": s3_server.secret_key, "token": proxy.token}

    store = RetryingStore(open_store("s3://everstep-tests/renewed", options), FAST)
    store.put("a", b"x")
    proxy.token = "token-2"
    assert store.get("a") == b"x"
    assert given == ["token-1", "token-2"]
