"""What a web server's answers, and the lack of one, mean: only its own 404 and 410 say that an object is missing."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from everstep.storage import NotFound, RetryableError, RetryingStore, RetryPolicy, StoreUnusable, open_store

BODY = b"0123456789"
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A web server that answers each GET and HEAD as it is told; its URL."""
    servers = []

    def start(answer: Callable[[BaseHTTPRequestHandler], None]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self)

            def do_HEAD(self) -> None:
                answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/run"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join(10)
        server.server_close()


def status(code: int) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def whole(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(BODY)))
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(BODY)


def reset(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def refused() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}/run"


@pytest.mark.parametrize("case", ["refused", "reset", "unknown host", "500", "429"])
def test_server_that_does_not_answer_is_asked_again(case: str, serve: Serve) -> None:
    match case:
        case "refused":
            url = refused()
        case "unknown host":
            url = "http://nobody.invalid/run"
        case _:
            url = serve(reset if case == "reset" else status(int(case)))
    store = open_store(url)
    for operation in (store.size, store.get):
        with pytest.raises(RetryableError, match="log/a"):
            operation("log/a")
    with pytest.raises(RetryableError):
        store.list("log/")


@pytest.mark.parametrize("code", [404, 410])
def test_only_the_servers_word_makes_an_object_missing(code: int, serve: Serve) -> None:
    store = open_store(serve(status(code)))
    assert store.size("log/a") is None
    with pytest.raises(NotFound):
        store.get("log/a")


@pytest.mark.parametrize("code", [401, 403])
def test_forbidden_is_an_error_at_once(code: int, serve: Serve) -> None:
    store = open_store(serve(status(code)))
    for operation in (store.size, store.get):
        with pytest.raises(StoreUnusable, match="credentials"):
            operation("log/a")


def test_connection_that_breaks_once_changes_no_answer(serve: Serve) -> None:
    broken: set[str] = set()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if handler.command not in broken:
            broken.add(handler.command)
            reset(handler)
        else:
            whole(handler)

    store = RetryingStore(open_store(serve(answer)), RetryPolicy(first=0.01))
    assert store.size("log/a") == len(BODY)
    assert store.get("log/a") == BODY
    assert broken == {"HEAD", "GET"}


def test_tls_to_a_server_without_it_says_so_at_once(serve: Serve) -> None:
    store = RetryingStore(open_store(serve(whole).replace("http://", "https://")))
    began = time.monotonic()
    for operation in (store.size, store.get):
        with pytest.raises(StoreUnusable, match="write http:// for https://"):
            operation("log/a")
    assert time.monotonic() - began < 20


def test_port_that_is_none_says_so_at_once() -> None:
    with pytest.raises(StoreUnusable, match="check its host and port"):
        RetryingStore(open_store("http://host:99999/run")).size("log/a")


def test_server_without_ranges_head_or_lengths_gives_the_same_bytes(serve: Serve) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "HEAD":
            return status(405)(handler)
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(BODY)
        return None

    store = open_store(serve(answer))
    assert store.size("a") == len(BODY)
    ends = (None, 0, 3, 10, 99)
    for start in (None, 0, 2, 9, 12):
        for end in ends:
            assert store.get("a", start, end) == BODY[start:end], (start, end)
