"""Bad input: each error names what is wrong and what to do, at the first request. A server that stops is no error."""

import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.storage import ObjectStore, RetryingStore, StoreUnusable, open_store, probe
from testcluster.s3 import S3Server

MISSING = "everstep-missing"


def refused_by_probe(store: ObjectStore, text: str) -> None:
    slept: list[float] = []
    with pytest.raises(StoreUnusable, match=text):
        probe(RetryingStore(store, sleep=slept.append))
    assert slept == []


@pytest.mark.usefixtures("s3_server")
def test_missing_s3_bucket_is_named_at_once(place: Callable) -> None:
    place("s3_server")
    refused_by_probe(open_store(f"s3://{MISSING}/x"), rf"{MISSING}.*bucket.*create it or fix the URL")


@pytest.mark.usefixtures("s3_server")
def test_wrong_keys_are_refused_at_once(place: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    url = place("s3_server").url
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-it")
    refused_by_probe(open_store(url), "credentials may not do this")


@pytest.mark.usefixtures("gcs_server")
def test_missing_google_bucket_is_named_at_once(place: Callable) -> None:
    options = place("gcs_server").options
    refused_by_probe(open_store(f"gs://{MISSING}/x", options), rf"{MISSING}.*bucket.*create it or fix the URL")


@pytest.mark.usefixtures("azure_server")
def test_missing_azure_container_is_named_at_once(place: Callable) -> None:
    options = place("azure_server").options
    store = open_store(f"az://{MISSING}/x", options)
    refused_by_probe(store, rf"{MISSING}.*bucket.*create it or fix the URL")


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server that the test may stop."""
    server = S3Server(tmp_path)
    server.start()
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


@pytest.mark.long
@pytest.mark.usefixtures("s3_server")  # has the program built before the first test
def test_server_that_stops_and_comes_back_loses_no_object_to_its_readers(own_server: S3Server) -> None:
    # versitygw answers a bare 404 for a moment while it stops; none of it may be taken for a missing object.
    url = f"s3://{own_server.bucket('stopping')}/{uuid.uuid4().hex}"
    store = RetryingStore(open_store(url))
    store.put("log/1", b"x")
    done = threading.Event()
    errors: list[BaseException] = []
    reads: list[int] = []

    def read() -> None:
        buffer = memoryview(bytearray(1))
        try:
            while not done.is_set():
                assert store.get("log/1") == b"x"
                store.get_into("log/1", 0, buffer)
                assert store.size("log/1") == 1
                assert [i.name for i in store.list("log/")] == ["log/1"]
                reads.append(1)
        except BaseException as e:
            errors.append(e)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(3):
        before = len(reads)
        while len(reads) < before + 5 and not errors:
            done.wait(0.01)
        own_server.stop()
        own_server.start()
    done.set()
    for reader in readers:
        reader.join(60)
    assert errors == []
