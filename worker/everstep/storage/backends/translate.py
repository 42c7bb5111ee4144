"""From a backend's exception to a storage error: the server's own code decides, where there is one.

Knows the shapes of botocore's, gcsfs's and Azure's exceptions without importing them.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from everstep.storage.errors import (
    AlreadyExists,
    NotFound,
    RetryableError,
    StorageError,
    StoreUnusable,
    TerminalError,
    Throttled,
    Truncated,
)

_EXISTS_CODES = {"PreconditionFailed", "412", "BlobAlreadyExists", "ConditionNotMet", "UnauthorizedBlobOverwrite"}
_BUCKET_CODES = {
    "NoSuchBucket", "InvalidBucketName", "PermanentRedirect", "AuthorizationHeaderMalformed", "ContainerNotFound",
    "ContainerBeingDeleted", "InvalidResourceName",
}  # fmt: skip
_THROTTLE_CODES = {
    "SlowDown",
    "TooManyRequests",
    "ThrottlingException",
    "Throttling",
    "RequestLimitExceeded",
    "ServerBusy",
}
UNSUPPORTED_CODES = {"NotImplemented", "MethodNotAllowed"}
EXPIRED_CODES = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_RETRY_CODES = EXPIRED_CODES | {
    "ConditionalRequestConflict", "OperationAborted", "ServiceUnavailable", "InternalError", "RequestTimeout",
    "RequestTimeTooSkewed", "IncompleteBody", "OperationTimedOut",
}  # fmt: skip
_RETRY_ERRNO = {
    errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE,
    errno.EHOSTUNREACH, errno.ENETUNREACH,
}  # fmt: skip
_WORDS = 400
# Error codes of a 404 that no S3 server wrote: a proxy or a stopping gateway gives it for objects that exist.
_BARE = {"", "404", "Not Found"}


def translate(e: Exception, where: str, *, bare_404_is_missing: bool = True) -> StorageError:
    """The storage error that a backend's exception stands for.

    s3fs maps a refused create to FileExistsError or to OSError(22), by the words the server chose, and hides the
    server's own code in `__cause__`.
    """
    code, status = server_code(e)
    words = " ".join(str(e).split())  # some clients put the whole answer there, line breaks and all
    text = f"{where}: {code or type(e).__name__}: {words[:_WORDS]}"
    if isinstance(e, FileExistsError) or code in _EXISTS_CODES or status == 412:
        return AlreadyExists(text)
    if code in _BUCKET_CODES:
        return StoreUnusable(f"{text}. The bucket of this URL does not exist or is elsewhere: create it or fix the URL")
    if code in _THROTTLE_CODES or status == 429:
        return _later(Throttled(text), e)
    if status == 501:
        return TerminalError(text)
    if code in _RETRY_CODES or status in (408, 409) or (status or 0) >= 500:
        return _later(RetryableError(text), e)
    if isinstance(e, PermissionError) or status in (401, 403) or str(e).startswith("Forbidden"):
        return StoreUnusable(f"{text}. The credentials may not do this: check the keys and the bucket's policy")
    if _no_credentials(e):
        return StoreUnusable(f"{text}. Set credentials (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)")
    if status == 404 and code in _BARE and not bare_404_is_missing:
        return RetryableError(
            f"{text}. An S3 server does not answer so: check whether the endpoint is one, and whether it is stopping"
        )
    if isinstance(e, FileNotFoundError | IsADirectoryError) or status == 404:
        return NotFound(text)
    if status == 416:
        return Truncated(text)
    if status is not None and 400 <= status < 500:
        return TerminalError(text)
    if _connection(e):
        return RetryableError(text)
    return TerminalError(text)


def server_code(e: BaseException) -> tuple[str, int | None]:
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
        if isinstance(status, str) and status.isdecimal():
            status = int(status)
        if isinstance(status, int) and 100 <= status < 600:
            code = getattr(seen, "error_code", None)
            return str(getattr(code, "value", code) or ""), status
        seen = seen.__cause__
    return "", None


def cannot_open(url: str, scheme: str, e: Exception) -> str:
    """The message when the file system of a scheme cannot be made."""
    extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
    if isinstance(e, ImportError) and scheme in extra:
        return f"{url}: the package for {scheme}:// is missing: pip install 'everstep[{extra[scheme]}]' ({e})"
    return f"{url}: {e}"


def _later(error: RetryableError, e: BaseException) -> RetryableError:
    error.retry_after = _retry_after(e)
    return error


def _retry_after(e: BaseException) -> float | None:
    """Seconds that the server asked to wait, whether it said so as a number or as a date."""
    seen: BaseException | None = e
    for _ in range(5):
        if seen is None:
            return None
        headers = _headers(getattr(seen, "response", None)) or getattr(seen, "headers", None)
        if headers:
            text = headers.get("retry-after") or headers.get("Retry-After")
            return _seconds(text) if text else None
        seen = seen.__cause__
    return None


def _headers(response: Any) -> Any:
    if isinstance(response, Mapping):
        return response.get("ResponseMetadata", {}).get("HTTPHeaders")
    return getattr(response, "headers", None)


def _seconds(text: str) -> float | None:
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


def _no_credentials(e: BaseException) -> bool:
    return type(e).__name__ in {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}


def _connection(e: BaseException) -> bool:
    """Errors without an answer from the server: sockets, time limits, and the clients' own wrappers of them."""
    if isinstance(e, ConnectionError | TimeoutError):
        return True
    if isinstance(e, OSError) and e.errno in _RETRY_ERRNO:
        return True
    client = ("aiohttp.", "botocore.", "aiobotocore.", "httpx.", "urllib3.", "requests.", "azure.core.", "gcsfs.")
    return type(e).__module__.startswith(client) and not isinstance(e, ValueError)
