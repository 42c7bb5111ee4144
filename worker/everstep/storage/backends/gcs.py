"""Google Cloud Storage over gcsfs: what the generic backend does, and uploads in parts.

gcsfs's default class asks for every bucket's kind over gRPC, which waits a minute where it is not allowed to, and whose
threads do not survive a fork. Its plain class speaks HTTP only; that is the one used. Parts go into a resumable
session, which takes them in order; the session expires after a week if nobody finishes it. Invariant: the object is
made by the last request of the session.
"""

from __future__ import annotations

from typing import Any, Final

from everstep.storage.backends.fsspec_store import FsspecStore, bucket_missing
from everstep.storage.base import Capabilities, check_name, part_size_for
from everstep.storage.errors import NotFound, RetryableError, TerminalError
from everstep.storage.upload import Data
from everstep.torch_private import names
from everstep.torch_private.libraries import endpoint_of, path_of, request_once

SCHEMES: Final = frozenset({"gs", "gcs"})
_UNIT: Final = 256 * 2**10  # parts must be multiples of it
_SECONDS: Final = 60.0


class GcsStore(FsspecStore):
    """Objects below `gs://bucket/prefix`. `options` go to gcsfs."""

    offers = Capabilities(parallel_parts=False)

    def start_upload(self, name: str, size_hint: int | None = None) -> GcsUpload:
        size = part_size_for(self.capabilities.part_size, size_hint)
        return GcsUpload(self, check_name(name), -(-size // _UNIT) * _UNIT)

    def _open(self) -> tuple[Any, str]:
        from gcsfs.core import GCSFileSystem  # noqa: PLC0415  an extra

        names.check("gcsfs")
        arguments = self.arguments()
        arguments.setdefault("requests_timeout", _SECONDS)
        fs = GCSFileSystem(**arguments)
        request_once(fs)  # its own retries are not at the pace that this package keeps
        return fs, path_of(fs, self.url)


class GcsUpload:
    """A resumable session. What the server has of it is asked for after an error, and not sent again."""

    def __init__(self, store: GcsStore, name: str, part_size: int) -> None:
        self._store = store
        self._name = name
        self.part_size = part_size
        self._sent = 0  # bytes that the server has, as far as is known
        self._unsure = False
        self._tail = b""  # the last part, which must name the size of the whole
        self._open = True
        fs, root = store.fs()
        bucket, _, key = f"{root}/{name}".partition("/")
        try:
            with store.translated("starting the upload of", name):
                headers, _ = fs.call(
                    "POST",
                    f"{endpoint_of(fs)}/upload/storage/v1/b/{bucket}/o",
                    uploadType="resumable",
                    json={"name": key},
                    headers={"X-Upload-Content-Type": "application/octet-stream"},
                )
        except NotFound as e:
            raise bucket_missing(e) from e
        self._session = str(headers["Location"])

    def write_part(self, number: int, data: Data) -> None:
        view, start = memoryview(data).cast("B"), number * self.part_size
        if len(view) < self.part_size:
            self._tail = bytes(view)
            return
        self._find_out()
        if start > self._sent:
            raise TerminalError(f"{self._store.url}: part {number} of {self._name} came before the one before it")
        self._send(view[self._sent - start :], "*")

    def commit(self) -> None:
        if self._open and not self._find_out():
            self._send(memoryview(self._tail), str(self._sent + len(self._tail)))
        self._open = False

    def abort(self) -> None:
        if self._open:
            self._open = False
            fs, _ = self._store.fs()
            try:
                with self._store.translated("aborting the upload of", self._name):
                    fs.call("DELETE", self._session, headers={"Content-Length": "0"})
            except NotFound:
                return

    def _send(self, data: memoryview, total: str) -> None:
        """The bytes after those that the server has; `total` is the size of the whole, or "*" if there is more."""
        if not data and total == "*":
            return
        first, last = self._sent, self._sent + len(data) - 1
        span = f"bytes {first}-{last}/{total}" if data else f"bytes */{total}"
        self._unsure = True
        fs, _ = self._store.fs()
        with self._store.translated("writing a part of", self._name):
            headers, _ = fs.call("PUT", self._session, headers={"Content-Range": span}, data=bytes(data))
        self._unsure = False
        if total == "*":
            self._sent = _kept(headers)
            if self._sent <= last:
                raise RetryableError(f"{self._store.url}: the server kept {self._sent} bytes of {self._name}")

    def _find_out(self) -> bool:
        """Ask what the server has, if the last answer was lost; whether the object exists already."""
        if not self._unsure:
            return False
        fs, _ = self._store.fs()
        with self._store.translated("asking for the state of", self._name):
            headers, body = fs.call("PUT", self._session, headers={"Content-Range": "bytes */*"}, data=b"")
        self._unsure = False
        if body and b'"generation"' in body:
            return True
        self._sent = _kept(headers)
        return False


def _kept(headers: Any) -> int:
    """Bytes that the server says it has: `Range: bytes=0-N`, or nothing."""
    text = headers.get("Range")
    return int(text.rsplit("-", 1)[1]) + 1 if text else 0
