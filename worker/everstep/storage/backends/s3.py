"""S3 and its look-alikes over s3fs's client, with the calls that fsspec has no word for: parts, reads into a buffer.

s3fs gives the credentials, the client and its options; the requests are made here, because fsspec's own calls mix
several of them and answer a bare 404 as a missing object. Many bytes go over presigned URLs (`direct`), unless the
options ask for something that such a URL does not carry. Invariant: every create carries `If-None-Match: *`.
"""

from __future__ import annotations

import http.client
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import fsspec.asyn

from everstep.contract.forks import ForkLock
from everstep.storage.backends.fsspec_store import FsspecStore, Options
from everstep.storage.backends.translate import UNSUPPORTED_CODES, server_code
from everstep.storage.base import (
    Capabilities,
    ObjectInfo,
    check_folder,
    check_name,
    part_size_for,
    scatter,
    truncated,
    views_of,
)
from everstep.storage.errors import NotFound, RetryableError, TerminalError, Truncated
from everstep.storage.upload import Data
from everstep.torch_private.libraries import call_s3, innermost

# --- direct
# Bytes to and from presigned S3 URLs, straight between the caller's memory and the socket. s3fs sends through an event
# loop, and hashes and copies each body on the way: measured over plain HTTP, 12 times the CPU seconds of this. It still
# resolves the credentials and signs the URL; TLS protects the bytes on the wire, and what is read back is checked above
# this package. botocore's HTTP session brings proxies, certificates and time limits. Invariant: connections belong to
# the process that made the `Wire`.

CONNECTIONS: Final = 16
_ERROR_BYTES: Final = 64 * 2**10
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")


class WireError(Exception):
    """An answer that is not a success, in the shape of botocore's `ClientError.response`."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        code = _CODE.search(body)
        self.response = {
            "Error": {"Code": code[1].decode() if code else ""},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {k.lower(): v for k, v in headers.items()}},
        }
        super().__init__(f"HTTP {status}: {body[:200].decode(errors='replace')}")


class Wire:
    """Pooled connections; safe for many threads."""

    def __init__(self, connect_seconds: float, read_seconds: float, endpoint: str) -> None:
        from botocore.httpsession import URLLib3Session  # noqa: PLC0415  only S3 pays for the import
        from botocore.utils import get_environ_proxies  # noqa: PLC0415

        self._session: Any = URLLib3Session(
            verify=os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE") or True,
            proxies=get_environ_proxies(endpoint),
            timeout=(connect_seconds, read_seconds),
            max_pool_connections=CONNECTIONS,
        )

    def put(self, url: str, data: Data, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Send `data`; the headers of the answer. Raises `WireError` and botocore's connection errors."""
        view = memoryview(data).cast("B")
        answer = self._send("PUT", url, {"Content-Length": str(len(view)), **headers}, view)
        _answered(answer)  # so that the connection can be used again
        received: Mapping[str, str] = answer.headers
        return received

    def get(self, url: str, start: int, views: Sequence[memoryview]) -> int:
        """Fill the views, one after the other, with the bytes from `start`; how many there were. Raises as `put`, and
        `ConnectionError` if the answer breaks off."""
        wanted = sum(len(view) for view in views)
        answer = self._send("GET", url, {"Range": f"bytes={start}-{start + wanted - 1}"}, None)
        if answer.status_code != 206 and start:
            answer.raw.close()
            raise WireError(501, {}, b"the server ignores ranges")
        length = int(answer.headers.get("Content-Length", -1))
        try:
            done = _into(answer.raw, views)
        except (http.client.HTTPException, OSError) as e:
            answer.raw.close()
            raise ConnectionError(f"the answer broke off: {e!r}") from e
        if done == length:
            answer.raw.release_conn()  # the next request goes over it
            return done
        answer.raw.close()
        if done < min(wanted, length):
            raise ConnectionError(f"the answer broke off after {done} of {length} bytes")
        return done

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: memoryview | None) -> Any:
        from botocore.awsrequest import AWSPreparedRequest  # noqa: PLC0415

        answer = self._session.send(AWSPreparedRequest(method, url, dict(headers), body, stream_output=True))
        if answer.status_code >= 300:
            raise WireError(answer.status_code, answer.headers, _answered(answer))
        return answer


def _into(raw: Any, views: Sequence[memoryview]) -> int:
    """Read a body into the views; how many bytes there were."""
    source, done = innermost(raw), 0
    for view in views:
        at = 0
        while at < len(view):
            count = source.readinto(view[at:])
            if not count:
                return done + at
            at += count
        done += at
    return done


def _answered(answer: Any) -> bytes:
    data = bytes(answer.raw.read(_ERROR_BYTES))
    answer.raw.drain_conn()
    return data


# --- s3

log = logging.getLogger("everstep.storage")

SCHEMES: Final = frozenset({"s3", "s3a"})
_OWN_CONFIG: Final = {
    "connect_timeout", "read_timeout", "retries", "response_checksum_validation", "signature_version"
}  # fmt: skip
_CONNECT_SECONDS: Final = 5
_READ_SECONDS: Final = 30
_DIRECT_BYTES: Final = 256 * 2**10  # from here on, signing a URL costs less than it saves
_URL_SECONDS: Final = 900
_URL_KEPT: Final = 300.0  # for how long one signature serves the reads of an object
_MOST_URLS: Final = 256
_MOST_PAGES: Final = 100_000


class S3Store(FsspecStore):
    """Objects below `s3://bucket/prefix`. `options` go to s3fs. `whole`: False for a look-alike that may write in
    place."""

    bare_404_is_missing = False

    def __init__(
        self, url: str, options: Options | None = None, part_size: int | None = None, *, whole: bool = True
    ) -> None:
        super().__init__(url, options, part_size)
        self.offers = Capabilities(whole=whole)
        self._wire_lock = ForkLock()
        self._wire: tuple[int, Wire | None] | None = None
        self._read_urls: dict[str, tuple[float, str]] = {}

    def create(self, name: str, data: Data) -> None:
        self._put_object(check_name(name), data, {"IfNoneMatch": "*"})

    def put(self, name: str, data: Data) -> None:
        self._put_object(check_name(name), data, {})

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        check_name(name)
        if start is not None and end is not None and start >= end:
            return b""
        limits = {} if start is None and end is None else {"Range": _range(start or 0, end)}
        try:
            with self.translated("reading", name):
                fs, _ = self.fs()
                return bytes(fsspec.asyn.sync(fs.loop, self._read, fs, name, limits))
        except Truncated:
            return b""

    def get_into(self, name: str, start: int, *buffers: memoryview) -> None:
        check_name(name)
        views, wanted = views_of(buffers)
        if not wanted:
            return
        try:
            with self.translated("reading", name):
                if wanted < _DIRECT_BYTES or (wire := self.wire()) is None:
                    data = self.get(name, start, start + wanted)
                    scatter(memoryview(data), views)
                    got = len(data)
                else:
                    got = wire.get(self._read_url(name), start, views)
        except Truncated:
            got = 0
        if got < wanted:
            raise truncated(self.url, name, start, wanted, got)

    def size(self, name: str) -> int | None:
        """The answer to HEAD has no body, so a 404 to it could be anyone's: then the listing decides."""
        check_name(name)
        bucket, key = self.at(name)
        with self.translated("looking at", name):
            try:
                return int(self.call("head_object", Bucket=bucket, Key=key)["ContentLength"])
            except FileNotFoundError:
                page = self.call("list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1)
            return next((int(o["Size"]) for o in page.get("Contents", ()) if o["Key"] == key), None)

    def list(self, folder: str = "") -> list[ObjectInfo]:
        check_folder(folder)
        bucket, prefix = self.at(folder)
        root = len(prefix) - len(folder)
        listed: list[ObjectInfo] = []
        more: dict[str, str] = {}
        with self.translated("listing", folder):
            for _ in range(_MOST_PAGES):
                page = self.call("list_objects_v2", Bucket=bucket, Prefix=prefix, **more)
                listed += (ObjectInfo(o["Key"][root:], int(o["Size"])) for o in page.get("Contents", ()))
                if not page.get("IsTruncated"):
                    break
                more = {"ContinuationToken": page["NextContinuationToken"]}
        return sorted(info for info in listed if not info.name.endswith("/"))  # folders that other tools left

    def delete(self, name: str) -> None:
        check_name(name)
        bucket, key = self.at(name)
        try:
            with self.translated("deleting", name):
                self.call("delete_object", Bucket=bucket, Key=key)
        except NotFound:
            return

    def start_upload(self, name: str, size_hint: int | None = None) -> S3Upload:
        return S3Upload(self, check_name(name), part_size_for(self.capabilities.part_size, size_hint))

    def sweep_uploads(self, older_than: float, dead: Callable[[str], bool] = lambda name: False) -> int:
        """Look-alikes that cannot list uploads have nothing that could be swept from here."""
        try:
            return self._sweep(older_than, dead)
        except TerminalError as e:
            if not _unsupported(e):
                raise
            return 0

    def _sweep(self, older_than: float, dead: Callable[[str], bool]) -> int:
        bucket, prefix = self.at("")
        swept = 0
        more: dict[str, str] = {}
        with self.translated("sweeping the uploads of", ""):
            for _ in range(_MOST_PAGES):
                page = self.call("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
                for upload in page.get("Uploads", ()):
                    is_dead = dead(upload["Key"][len(prefix) :])
                    if is_dead or time.time() - upload["Initiated"].timestamp() > older_than:
                        self._abort(bucket, upload["Key"], upload["UploadId"])
                        swept += 1
                if not page.get("IsTruncated"):
                    break
                more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
        return swept

    def at(self, name: str) -> tuple[str, str]:
        """Bucket and key of a name."""
        bucket, _, prefix = self.url.partition("://")[2].partition("/")
        return bucket, f"{prefix}/{name}" if prefix else name

    def call(self, method: str, **arguments: Any) -> Any:
        """One request through s3fs, which adds the user's own settings (encryption, requester pays)."""
        return self.fs()[0].call_s3(method, **arguments)

    def wire(self) -> Wire | None:
        """This process's direct connections; None if the options ask for what presigned URLs do not carry: headers of
        encryption or payment, own certificates, signatures other than version 4."""
        fs, _ = self.fs()
        with self._wire_lock:
            if self._wire is None or self._wire[0] != os.getpid():
                express = self.at("")[0].endswith("--x-s3")
                extra = express or fs.s3_additional_kwargs or fs.req_kw or "verify" in fs.client_kwargs
                plain = not extra and set(fs.config_kwargs) <= _OWN_CONFIG and "signature_version" in fs.config_kwargs
                endpoint = str(fs.endpoint_url or "https://s3.amazonaws.com")
                self._wire = os.getpid(), Wire(_CONNECT_SECONDS, _READ_SECONDS, endpoint) if plain else None
            return self._wire[1]

    def presigned(self, method: str, name: str, **arguments: Any) -> str:
        """A URL for one request about a name."""
        fs, _ = self.fs()
        return str(fs.url("/".join(self.at(name)), expires=_URL_SECONDS, client_method=method, **arguments))

    def forget(self) -> None:
        super().forget()
        self._read_urls.clear()

    def _read_url(self, name: str) -> str:
        """A URL for reads of a name, which says nothing of a range: to sign one takes as long as to move 8 MiB."""
        until, url = self._read_urls.get(name, (0.0, ""))
        if until < time.monotonic():
            url = self.presigned("get_object", name)
            if len(self._read_urls) >= _MOST_URLS:
                self._read_urls.clear()
            self._read_urls[name] = time.monotonic() + _URL_KEPT, url
        return url

    def arguments(self) -> dict[str, Any]:
        config = {
            "signature_version": "s3v4",
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "retries": {"mode": "standard", "total_max_attempts": 1},
            # Data is verified at a higher layer with stronger sums; some S3 clones send the whole's sum with a part.
            "response_checksum_validation": "when_required",
        }
        arguments = super().arguments()
        if arguments.get("anon"):
            del config["signature_version"]
        return {**arguments, "config_kwargs": config | arguments.get("config_kwargs", {})}

    def _open(self) -> tuple[Any, str]:
        fs, root = super()._open()
        fs.retries = 1
        return fs, root

    def _put_object(self, name: str, data: Data, condition: dict[str, str]) -> None:
        bucket, key = self.at(name)
        with self.translated("writing", name):
            if memoryview(data).nbytes >= _DIRECT_BYTES and (wire := self.wire()) is not None:
                headers = {"If-None-Match": condition["IfNoneMatch"]} if condition else {}
                wire.put(self.presigned("put_object", name, **condition), data, headers)
            else:
                self.call("put_object", Bucket=bucket, Key=key, Body=_body(data), **condition)

    async def _read(self, fs: Any, name: str, limits: dict[str, str]) -> bytes:
        bucket, key = self.at(name)
        answer = await call_s3(fs, "get_object", Bucket=bucket, Key=key, **limits)
        async with answer["Body"] as body:
            return bytes(await body.read())

    def _abort(self, bucket: str, key: str, upload_id: str) -> None:
        try:
            with self.translated("aborting the upload of", key):
                self.call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload_id)
        except TerminalError as e:
            if _unsupported(e):
                log.warning("%s cannot abort uploads; the parts of %s stay until its operator cleans up", self.url, key)
            elif not _gone(e):
                raise


class S3Upload:
    """A multipart upload. Its id outlives the client, so parts go on after the credentials were refreshed."""

    def __init__(self, store: S3Store, name: str, part_size: int) -> None:
        self._store = store
        self._name = name
        self.part_size = part_size
        self._bucket, self._key = store.at(name)
        self._lock = ForkLock()
        self._sent: dict[int, tuple[str, int]] = {}  # tag and bytes
        self._unsure = False  # a commit was sent, and its answer did not come
        with store.translated("starting the upload of", name):
            made = store.call("create_multipart_upload", Bucket=self._bucket, Key=self._key)
        self._id: str | None = str(made["UploadId"])

    def write_part(self, number: int, data: Data) -> None:
        with self._store.translated(f"writing part {number} of", self._name):
            which: dict[str, Any] = {"UploadId": self._id, "PartNumber": number + 1}
            wire = self._store.wire()
            if wire is not None:
                tag = wire.put(self._store.presigned("upload_part", self._name, **which), data, {})["ETag"]
            else:
                tag = self._store.call("upload_part", Bucket=self._bucket, Key=self._key, Body=_body(data), **which)[
                    "ETag"
                ]
        with self._lock:
            self._sent[number] = tag, memoryview(data).nbytes

    def commit(self) -> None:
        if self._id is None:
            return
        parts = [{"PartNumber": number + 1, "ETag": tag} for number, (tag, _) in sorted(self._sent.items())]
        try:
            with self._store.translated("committing", self._name):
                self._store.call(
                    "complete_multipart_upload", Bucket=self._bucket, Key=self._key, UploadId=self._id,
                    MultipartUpload={"Parts": parts},
                )  # fmt: skip
        except RetryableError:
            self._unsure = True
            raise
        except TerminalError as e:
            if not _gone(e):
                raise
            # An attempt before this one has succeeded and its answer was lost, or somebody swept the upload.
            size = sum(size for _, size in self._sent.values())
            if not self._unsure or self._store.size(self._name) != size:
                raise TerminalError(
                    f"{self._store.url}: the upload of {self._name} was removed by another process's clean-up"
                ) from e
        self._id = None

    def abort(self) -> None:
        if self._id is not None:
            self._store._abort(self._bucket, self._key, self._id)
            self._id = None


def _gone(e: TerminalError) -> bool:
    return e.__cause__ is not None and server_code(e.__cause__)[0] == "NoSuchUpload"


def _unsupported(e: TerminalError) -> bool:
    return e.__cause__ is not None and server_code(e.__cause__)[0] in UNSUPPORTED_CODES


def _range(start: int, end: int | None) -> str:
    return f"bytes={start}-{'' if end is None else end - 1}"


def _body(data: Data) -> bytes | bytearray:
    """botocore takes no memoryview."""
    return bytes(data) if isinstance(data, memoryview) else data
