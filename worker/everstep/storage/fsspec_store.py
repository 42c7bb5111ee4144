"""Any object store that fsspec reaches, through the few calls whose meaning is the same on all of them.

Invariants:
- One attempt a call: s3fs's and botocore's own retries are switched off, because the bound is `retry`'s to keep.
- No listing cache: a cached listing would hide another writer's commit.
- The file system belongs to the process that made it. Its event-loop thread does not survive a fork, so a child makes
  its own on first use.
- `create` is conditional only where the backend sends a true precondition; other schemes are refused by `open_store`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fsspec

from everstep.storage.base import Capabilities, Data, ObjectInfo, ObjectStore, check_folder, check_name
from everstep.storage.errors import AlreadyExists, NotFound, RetryableError, StorageError, StoreUnusable, TerminalError

S3 = frozenset({"s3", "s3a"})
# Schemes whose fsspec backend turns mode="create" into a precondition that the server checks.
CONDITIONAL = S3 | {"gs", "gcs", "az", "abfs", "abfss"}

_CONNECT_SECONDS = 5
_READ_SECONDS = 30

_EXISTS_CODES = {"PreconditionFailed", "412"}
_BUCKET_CODES = {"NoSuchBucket", "InvalidBucketName", "PermanentRedirect", "AuthorizationHeaderMalformed"}
_RETRY_CODES = {
    "ConditionalRequestConflict", "OperationAborted", "SlowDown", "ServiceUnavailable", "InternalError",
    "RequestTimeout", "RequestTimeTooSkewed", "ThrottlingException", "TooManyRequests", "ExpiredToken",
    "NoSuchUpload", "IncompleteBody",
}  # fmt: skip
_RETRY_ERRNO = {
    errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE,
    errno.EHOSTUNREACH, errno.ENETUNREACH,
}  # fmt: skip


class FsspecStore(ObjectStore):
    """Objects below `url`. `options` go to the fsspec file system (keys, endpoint and the like)."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._url = url.rstrip("/")
        self._scheme = url.split("://", 1)[0]
        self._options = dict(options or {})
        self._lock = threading.Lock()
        self._made: tuple[int, Any, str] | None = None

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_create=self._scheme in CONDITIONAL, multipart=False)

    def create(self, name: str, data: Data) -> None:
        self._write(name, data, "create")

    def put(self, name: str, data: Data) -> None:
        self._write(name, data, "overwrite")

    def get(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        check_name(name)
        if start is not None and end is not None and start >= end:
            return b""  # no HTTP range means "nothing"
        try:
            with self._translated("reading", name):
                fs, root = self._fs()
                return bytes(fs.cat_file(f"{root}/{name}", start=start, end=end))
        except TerminalError as e:
            if e.__cause__ is not None and _server_code(e.__cause__)[1] == 416:
                return b""  # a range after the end, which slices and files answer with nothing
            raise

    def size(self, name: str) -> int | None:
        check_name(name)
        try:
            with self._translated("looking at", name):
                fs, root = self._fs()
                info = fs.info(f"{root}/{name}")
                return int(info["size"] or 0) if info["type"] == "file" else None
        except NotFound:
            return None

    def list(self, folder: str = "") -> list[ObjectInfo]:
        check_folder(folder)
        try:
            with self._translated("listing", folder):
                fs, root = self._fs()
                found = fs.find(f"{root}/{folder}".rstrip("/"), detail=True)
        except NotFound:
            return []
        prefix = f"{root}/".lstrip("/")
        listed = ((path.lstrip("/").removeprefix(prefix), info) for path, info in found.items())
        return sorted(ObjectInfo(name, int(info["size"] or 0)) for name, info in listed if name.startswith(folder))

    def delete(self, name: str) -> None:
        check_name(name)
        try:
            with self._translated("deleting", name):
                fs, root = self._fs()
                fs.rm_file(f"{root}/{name}")
        except NotFound:
            return

    def _write(self, name: str, data: Data, mode: str) -> None:
        check_name(name)
        with self._translated("writing", name):
            fs, root = self._fs()
            body = bytes(data) if isinstance(data, memoryview) else data
            fs.pipe_file(f"{root}/{name}", body, mode=mode)

    def _fs(self) -> tuple[Any, str]:
        """This process's file system, and the path of the store's root on it."""
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():
                try:
                    fs, root = fsspec.core.url_to_fs(self._url, **self._arguments())
                except (ImportError, ValueError) as e:
                    raise StoreUnusable(_cannot_open(self._url, self._scheme, e)) from e
                if self._scheme in S3:
                    fs.retries = 1
                self._made = (os.getpid(), fs, str(root).rstrip("/"))
            return self._made[1], self._made[2]

    def _arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False, "asynchronous": False}
        if self._scheme in S3:
            arguments["config_kwargs"] = {
                "connect_timeout": _CONNECT_SECONDS,
                "read_timeout": _READ_SECONDS,
                "retries": {"mode": "standard", "total_max_attempts": 1},
            }
        return arguments | self._options

    @contextmanager
    def _translated(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except Exception as e:
            raise translate(e, f"{self._url}: {doing} {name or '/'}") from e


def translate(e: Exception, where: str) -> StorageError:
    """The storage error that a backend's exception stands for.

    s3fs maps a refused create to FileExistsError or to OSError(22), by the words the server chose, and hides the
    server's own code in `__cause__`; that code decides where there is one.
    """
    code, status = _server_code(e)
    text = f"{where}: {code or type(e).__name__}: {e}"
    if isinstance(e, FileExistsError) or code in _EXISTS_CODES or status == 412:
        return AlreadyExists(text)
    if code in _BUCKET_CODES:
        return StoreUnusable(f"{text}. The bucket of this URL does not exist or is elsewhere: create it or fix the URL")
    if code in _RETRY_CODES or status in (408, 409, 429) or (status or 0) >= 500:
        return RetryableError(text)
    if isinstance(e, PermissionError) or status in (401, 403):
        return StoreUnusable(f"{text}. The credentials may not do this: check the keys and the bucket's policy")
    if _no_credentials(e):
        return StoreUnusable(f"{text}. Set credentials (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)")
    if isinstance(e, FileNotFoundError) or status == 404:
        return NotFound(text)
    if status is not None and 400 <= status < 500:
        return TerminalError(text)
    if _connection(e):
        return RetryableError(text)
    return TerminalError(text)


def _server_code(e: BaseException) -> tuple[str, int | None]:
    """The error code and HTTP status that the server sent, looked for along the chain of causes."""
    seen: BaseException | None = e
    for _ in range(5):
        if seen is None:
            break
        response = getattr(seen, "response", None)
        if isinstance(response, Mapping):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return str(response.get("Error", {}).get("Code", "")), status
        status = getattr(seen, "status", None) or getattr(seen, "status_code", None) or getattr(seen, "code", None)
        if isinstance(status, int) and 100 <= status < 600:
            return "", status
        seen = seen.__cause__
    return "", None


def _no_credentials(e: BaseException) -> bool:
    return type(e).__name__ in {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}


def _connection(e: BaseException) -> bool:
    """Errors without an answer from the server: sockets, time limits, and the clients' own wrappers of them."""
    if isinstance(e, ConnectionError | TimeoutError):
        return True
    if isinstance(e, OSError) and e.errno in _RETRY_ERRNO:
        return True
    client = ("aiohttp.", "botocore.", "aiobotocore.", "httpx.", "urllib3.", "azure.core.", "gcsfs.")
    return type(e).__module__.startswith(client) and not isinstance(e, ValueError)


def _cannot_open(url: str, scheme: str, e: Exception) -> str:
    extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(scheme, "azure")
    if isinstance(e, ImportError):
        return f"{url}: the package for {scheme}:// is missing; install everstep[{extra}] ({e})"
    return f"{url}: {e}"
