"""The answer to a commit is lost on its way from a real server: the upload is done, and says so when it is repeated.

Not from Google's emulator, which forgets a session that has ended; Google says of it that it is complete.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from everstep.storage import ObjectStore, RetryableError, RetryingStore, RetryPolicy, open_store
from everstep.testing.contract import pattern

PART = 5 * 2**20
DATA = pattern(PART + 9)
SECONDS = 30.0


class Lossy:
    """Passes bytes to a server and back. When `losing` is set, the next answer goes nowhere and its connection ends."""

    def __init__(self, endpoint: str) -> None:
        address = urlsplit(endpoint)
        self._server = (address.hostname, address.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.losing, self.lost = threading.Event(), threading.Event()
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                if answers and self.losing.is_set():
                    self.losing.clear()
                    self.lost.set()
                    break
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def lossy() -> Iterator[Callable[[str], Lossy]]:
    made: list[Lossy] = []

    def before(endpoint: str) -> Lossy:
        made.append(Lossy(endpoint))
        return made[-1]

    yield before
    for one in made:
        one.close()


def behind(
    name: str, place: Callable, lossy: Callable[[str], Lossy], monkeypatch: pytest.MonkeyPatch, server: Any
) -> tuple[ObjectStore, Lossy]:
    """A store whose requests go through a `Lossy`."""
    there, proxy = place(name), lossy(server.endpoint)
    if name == "s3_server":
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        return open_store(there.url, part_size=PART), proxy
    options = {
        key: value.replace(server.endpoint, proxy.endpoint) if isinstance(value, str) else value
        for key, value in there.options.items()
    }
    return open_store(there.url, options, part_size=PART), proxy


@pytest.fixture(params=["s3_server", "azure_server"])
def lost(
    request: pytest.FixtureRequest, place: Callable, lossy: Callable, monkeypatch: pytest.MonkeyPatch
) -> tuple[ObjectStore, Lossy]:
    server = request.getfixturevalue(request.param)
    return behind(request.param, place, lossy, monkeypatch, server)


@pytest.mark.long_but("azure_server")
@pytest.mark.usefixtures("s3_server", "azure_server")
def test_commit_whose_answer_was_lost_is_done_when_it_is_repeated(lost: tuple[ObjectStore, Lossy]) -> None:
    store, proxy = lost
    upload = RetryingStore(store, RetryPolicy(first=0.01, most=0.05, outage=SECONDS)).start_upload("a", len(DATA))
    for number in range(2):
        upload.write_part(number, DATA[number * PART : (number + 1) * PART])
    proxy.losing.set()
    upload.commit()
    assert proxy.lost.is_set()
    assert store.get("a") == DATA
    assert store.sweep_uploads(-60) == 0


@pytest.mark.usefixtures("s3_server")
def test_lost_answer_alone_is_an_error_that_may_pass(
    place: Callable, lossy: Callable, monkeypatch: pytest.MonkeyPatch, s3_server: Any
) -> None:
    store, proxy = behind("s3_server", place, lossy, monkeypatch, s3_server)
    upload = store.start_upload("a", 9)
    upload.write_part(0, b"some data")
    proxy.losing.set()
    with pytest.raises(RetryableError):
        upload.commit()
    upload.commit()
    assert store.get("a") == b"some data"
