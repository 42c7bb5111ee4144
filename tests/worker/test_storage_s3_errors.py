"""How the S3 backend reads a server's answers, over real HTTP: a scripted server says what a real one would."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from everstep.storage import (
    AlreadyExists,
    NotFound,
    ObjectStore,
    RetryableError,
    RetryingStore,
    RetryPolicy,
    StoreUnusable,
    TerminalError,
    Throttled,
    open_store,
    probe,
)

FAST = RetryPolicy(first=0.01, most=0.05, outage=5.0)
GONE = (404, "NoSuchUpload")


class ScriptedS3(ThreadingHTTPServer):
    """An S3 look-alike that keeps objects but ignores If-None-Match, and answers as its script says first.

    A script entry is (status, code), "lose" to store the object and close the connection without an answer, or "break"
    to close it in the middle of one.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script: list[tuple[int, str] | str] = []
        self.objects: dict[str, bytes] = {}
        self.requests = 0
        self.connections = 0
        self.retry_after = ""
        self.conditional = False
        self.upload = (200, "")  # what the end of an upload is answered, after the script

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedS3
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_PUT(self) -> None:
        body = self._body()
        self.server.requests += 1
        step = self.server.script.pop(0) if self.server.script else (200, "")
        if self.server.conditional and self.headers.get("If-None-Match") and self.path in self.server.objects:
            step = (412, "PreconditionFailed")
        if step == "lose":
            self.server.objects[self.path] = body
            self.close_connection = True
            return
        assert isinstance(step, tuple)
        if step[0] == 200:
            self.server.objects[self.path] = body
        self._answer(*step)

    def do_GET(self) -> None:
        self.server.requests += 1
        step = self.server.script.pop(0) if self.server.script else "serve"
        if isinstance(step, tuple):
            self._answer(*step)
            return
        body, status = self.server.objects[self.path.split("?")[0]], 200
        if asked := self.headers.get("Range"):
            first, last = asked.removeprefix("bytes=").split("-")
            body, status = body[int(first) : int(last) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if step == "break":
            self.close_connection = True
            body = body[: len(body) // 2]
        self.wfile.write(body)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """The beginning of an upload, and its end, which makes no object."""
        self._body()
        self.server.requests += 1
        if "uploads" in self.path:
            text = b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            return
        step = self.server.script.pop(0) if self.server.script else self.server.upload
        if step == "lose":
            self.close_connection = True
            return
        assert isinstance(step, tuple)
        self.server.upload = step if step == GONE else self.server.upload  # and it stays gone
        self._answer(*step)

    def _body(self) -> bytes:
        if self.headers.get("Expect") == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return data

    def _answer(self, status: int, code: str) -> None:
        text = (
            f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>scripted {code}</Message></Error>" if code else ""
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("ETag", '"0"')
        if self.server.retry_after:
            self.send_header("Retry-After", self.server.retry_after)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedS3]:
    server = ScriptedS3()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    yield server
    server.shutdown()
    server.server_close()


def test_store_that_ignores_the_condition_is_refused_by_the_probe(server: ScriptedS3) -> None:
    with pytest.raises(StoreUnusable, match=r"ignores conditional creates.*single_committer"):
        probe(open_store("s3://bucket/run"))


@pytest.mark.long_but("answer3-bucket")
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((403, "AccessDenied"), "credentials"),
        ((403, "InvalidAccessKeyId"), "credentials"),
        ((403, "SignatureDoesNotMatch"), "credentials"),
        ((404, "NoSuchBucket"), "bucket"),
        ((400, "InvalidBucketName"), "bucket"),
        ((404, "XAdminUserNotFound"), "refuses"),
        ((405, "MethodNotAllowed"), "credentials"),
    ],
)
def test_answer_that_never_changes_fails_at_once_and_says_why(
    server: ScriptedS3, answer: tuple[int, str], text: str
) -> None:
    server.script = [answer] * 5
    with pytest.raises(StoreUnusable, match=text):
        probe(RetryingStore(open_store("s3://bucket/run"), FAST))
    assert server.requests == 1


def fail_to_create(store: ObjectStore, server: ScriptedS3) -> None:
    store.create("log/0", b"x")
    pytest.fail(f"{server.requests} requests on {server.connections} connections; not asked yet: {server.script}")


@pytest.mark.long
@pytest.mark.parametrize(
    "answer",
    [(503, "SlowDown"), (500, "InternalError"), (503, "ServiceUnavailable"), (429, "TooManyRequests"),
     (409, "ConditionalRequestConflict"), (400, "RequestTimeout"), (409, "OperationAborted")],
)  # fmt: skip
def test_answer_that_may_change_is_retryable_and_survived(server: ScriptedS3, answer: tuple[int, str]) -> None:
    plain = open_store("s3://bucket/run")
    server.script = [answer]
    with pytest.raises(RetryableError, match=answer[1]):
        fail_to_create(plain, server)
    server.script = [answer] * 4
    RetryingStore(plain, FAST).create("log/0", b"x")
    assert b"x" in server.objects["/bucket/run/log/0"]


@pytest.mark.long
def test_refused_condition_is_already_exists_whatever_the_words(server: ScriptedS3) -> None:
    # s3fs gives FileExistsError only if the server names the condition, OSError(22) otherwise.
    store = open_store("s3://bucket/run")
    server.script = [(412, "PreconditionFailed")]
    with pytest.raises(AlreadyExists):
        store.create("log/0", b"x")
    server.script = [(412, "412")]
    with pytest.raises(AlreadyExists):
        store.create("log/0", b"x")


def test_response_lost_after_a_create_is_seen_as_already_exists_by_the_retry(server: ScriptedS3) -> None:
    server.conditional = True
    server.script = ["lose"]
    with pytest.raises(AlreadyExists):
        RetryingStore(open_store("s3://bucket/run"), FAST).create("log/0", b"x")
    assert len(server.objects) == 1


@pytest.mark.parametrize(
    ("script", "found", "done"),
    [
        ([GONE], b"of mine", False),  # an older object of the name, and somebody swept the upload
        (["lose", GONE], b"of mine", True),
        (["lose", GONE], b"of others", False),
    ],
)
def test_upload_that_is_no_more_is_done_only_if_its_commit_was_sent(
    server: ScriptedS3, script: list[tuple[int, str] | str], found: bytes, done: bool
) -> None:
    upload = RetryingStore(open_store("s3://bucket/run"), FAST).start_upload("a")
    upload.write_part(0, b"of mine")
    server.objects["/bucket/run/a"] = found
    server.script = script
    if done:
        upload.commit()
        return
    with pytest.raises(TerminalError, match="removed by another process"):
        upload.commit()


def test_server_that_stays_away_fails_within_the_bound(server: ScriptedS3) -> None:
    endpoint = server.endpoint
    server.shutdown()
    server.server_close()
    store = RetryingStore(
        open_store("s3://bucket/run", {"endpoint_url": endpoint}), RetryPolicy(first=0.01, most=0.05, outage=0.5)
    )
    started = time.monotonic()
    with pytest.raises(RetryableError, match="gave up after"):
        store.put("a", b"x")
    assert time.monotonic() - started < 30.0, "half a second, and the client's own beginnings on a busy machine"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "EVERSTEP_CHECKPOINT_URL"),
        ("foo://x/y", "unknown scheme 'foo'"),
        ("sftp://x/y", "no conditional create.*single_committer"),
        ("ftp://x/y", "not safe on an FTP server. Use sftp"),
        ("file://relative/path", "absolute path"),
        ("s3://", "names no bucket"),
    ],
)
def test_url_that_cannot_work_is_refused_with_the_fix(url: str, text: str) -> None:
    with pytest.raises(StoreUnusable, match=text):
        open_store(url)


def test_missing_package_of_a_scheme_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys  # noqa: PLC0415

    for module in ["gcsfs", "gcsfs.core", *(m for m in sys.modules if m.startswith("gcsfs."))]:
        monkeypatch.setitem(sys.modules, module, None)
    nowhere = {"token": "anon", "endpoint_url": "http://127.0.0.1:9"}  # nothing may leave the loopback if this fails
    with pytest.raises(StoreUnusable, match=r"install 'everstep\[gcs\]'"):
        open_store("gs://bucket/run", nowhere).put("a", b"x")


@pytest.mark.parametrize("text", ["7", "Wed, 21 Oct 2099 07:28:00 GMT", "soon"])
def test_wait_that_a_server_asks_for_reaches_the_retries(server: ScriptedS3, text: str) -> None:
    server.retry_after = text
    server.script = [(503, "SlowDown")]
    with pytest.raises(Throttled) as caught:
        open_store("s3://bucket/run").put("a", b"x")
    match text:
        case "7":
            assert caught.value.retry_after == 7.0
        case "soon":
            assert caught.value.retry_after is None
        case _:
            assert caught.value.retry_after is not None
            assert caught.value.retry_after > 10_000


@pytest.mark.parametrize("answer", [(404, "")])
def test_404_that_no_s3_server_wrote_is_retryable_and_survived(server: ScriptedS3, answer: tuple[int, str]) -> None:
    # What versitygw answers for a moment while it stops, whatever is asked for.
    plain = open_store("s3://bucket/run")
    plain.put("log/0", b"x")
    server.script = [answer]
    with pytest.raises(RetryableError, match="whether it is stopping"):
        plain.get("log/0")
    server.script = [answer]
    with pytest.raises(RetryableError, match="whether it is stopping"):
        plain.list("log/")
    server.script = [answer, answer]  # HEAD, and the listing that is asked because a HEAD has no words
    with pytest.raises(RetryableError, match="whether it is stopping"):
        plain.size("log/0")
    server.script = [answer] * 3
    assert b"x" in RetryingStore(plain, FAST).get("log/0")


def test_answer_that_breaks_off_is_retryable_and_never_a_shorter_object(server: ScriptedS3) -> None:
    data = bytes(range(256)) * 4096
    server.objects["/bucket/run/a"] = data
    plain, buffer = open_store("s3://bucket/run"), bytearray(2**20)
    server.script = ["break"]
    with pytest.raises(RetryableError, match="broke off after 524288 of 1048576"):
        plain.get_into("a", 0, memoryview(buffer))
    server.script = ["break"]
    RetryingStore(plain, FAST).get_into("a", 0, memoryview(buffer)[:1000], memoryview(buffer)[1000:])
    assert buffer == data


def test_reads_of_one_object_share_a_connection(server: ScriptedS3) -> None:
    server.objects["/bucket/run/a"] = bytes(2**21)
    store, buffer = open_store("s3://bucket/run"), memoryview(bytearray(2**20))
    for start in range(0, 2**21, 2**20):
        store.get_into("a", start, buffer)
    assert (server.requests, server.connections) == (2, 1)


def test_object_that_s3_says_does_not_exist_is_missing(server: ScriptedS3) -> None:
    server.script = [(404, "NoSuchKey")]
    with pytest.raises(NotFound):
        open_store("s3://bucket/run").get("log/0")


def test_web_page_can_be_read_and_not_written(server: ScriptedS3) -> None:
    server.objects["/run/log/0"] = b"0123456789"
    store = open_store(f"{server.endpoint}/run")
    assert not store.capabilities.writable
    assert store.get("log/0") == b"0123456789"
    for write in (lambda: store.create("a", b""), lambda: store.put("a", b""), lambda: store.delete("a")):
        with pytest.raises(StoreUnusable, match="can only be read"):
            write()
    with pytest.raises(StoreUnusable, match=r"can only be read.*s3://"):
        probe(store)
