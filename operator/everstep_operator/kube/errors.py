"""The errors of an API server, and which of them are to be retried.

Every HTTP error, broken stream and connection failure becomes exactly one of these errors. No exception of the
transport leaves the package.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from everstep_operator.errors import OperatorError, RetryableError, TerminalError

MESSAGE_LIMIT = 2000  # characters of a server's message that are kept, because error texts are logged


@dataclass(frozen=True, slots=True)
class FieldCause:
    """One reason of a refusal. `field` is a path such as `spec.replicas`; empty if the server named none."""

    reason: str
    message: str
    field: str


@dataclass(frozen=True, slots=True)
class Operation:
    """What a request does, for errors and metrics: `delete pods default/digits-w0-0`."""

    verb: str
    resource: str  # its plural, and the subresource: `pods`, `trainingjobs/status`
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        target = "/".join(part for part in (self.namespace, self.name) if part)
        return " ".join(part for part in (self.verb, self.resource, target) if part)


class KubeError(OperatorError):
    """Base of every error of this package; each is also a `RetryableError` or a `TerminalError`.

    `operation`: the request, if there was one. `status` is the HTTP code (0: no answer came). `reason` is the server's
    own word (`AlreadyExists`). `retry_after`: the seconds after which the server wants the next request, if it says so.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: Operation | None = None,
        status: int = 0,
        reason: str = "",
        causes: tuple[FieldCause, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        self.message = message[:MESSAGE_LIMIT]
        self.operation = operation
        self.status = status
        self.reason = reason
        self.causes = causes
        self.retry_after = retry_after
        head = " ".join(part for part in (str(status) if status else "", reason) if part)
        super().__init__(": ".join(part for part in (str(operation or ""), head, self.message) if part))


class Conflict(KubeError, RetryableError):
    """409: a precondition (resourceVersion, UID, field ownership) did not hold; read again and decide again."""


class Gone(KubeError, RetryableError):
    """410: the resource version or continue token is no longer in the server's history; list again."""


class TooManyRequests(KubeError, RetryableError):
    """429: the server's flow control refused before doing anything, so any verb may be repeated."""


class ServerError(KubeError, RetryableError):
    """5xx: whether a write happened is unknown."""


class ConnectionFailed(KubeError, RetryableError):
    """No complete answer came in time: refused, reset, TLS, time-out. Whether a write happened is unknown."""


class StreamBroken(KubeError, RetryableError):
    """A watch ended in the middle of a line, sent what is not JSON, or a line beyond the bound; reconnect."""


class NotFound(KubeError, TerminalError):
    """404: no such object, or no such resource (its CRD is not installed)."""


class AlreadyExists(KubeError, TerminalError):
    """409 with reason AlreadyExists: the name is taken. The caller finds out whether its own object has it."""


class Invalid(KubeError, TerminalError):
    """400 or 422: the object was refused; `causes` name the fields."""


class Forbidden(KubeError, TerminalError):
    """403: RBAC, quota, an admission policy or a terminating namespace refused."""


class Unauthorized(KubeError, TerminalError):
    """401 with freshly loaded credentials."""


class Rejected(KubeError, TerminalError):
    """Any other 4xx (405, 406, 413, 415, ...): a mistake in the request itself."""


class CredentialsError(KubeError, TerminalError):
    """The kubeconfig or the service-account files cannot be read."""


class _StatusCause(msgspec.Struct):
    reason: str = ""
    message: str = ""
    field: str = ""


class _StatusDetails(msgspec.Struct, rename="camel"):
    causes: list[_StatusCause] | None = None
    retry_after_seconds: int | None = None


class StatusBody(msgspec.Struct):
    """The part of a `v1.Status` body that is read."""

    message: str | None = ""
    reason: str | None = ""
    code: int | None = 0
    details: _StatusDetails | None = None


_status_decoder = msgspec.json.Decoder(StatusBody)


def from_response(status: int, headers: Mapping[str, str], body: bytes, operation: Operation) -> KubeError:
    """The error for an answer with code `status` >= 400. A body that is no Status (a proxy's page) is quoted."""
    try:
        parsed = _status_decoder.decode(body)
    except msgspec.DecodeError:
        text = body[:MESSAGE_LIMIT].decode("utf-8", "replace").strip()
        parsed = StatusBody(message=text or "the server gave no reason", code=status)
    return from_status(parsed, operation, code=status, retry_after=_seconds(headers.get("Retry-After")))


def from_status(
    status: StatusBody, operation: Operation, *, code: int | None = None, retry_after: float | None = None
) -> KubeError:
    """The error for a decoded Status: an answer's body, or the object of an ERROR event in a watch."""
    number = code or status.code or 0
    reason = status.reason or ""
    details = status.details or _StatusDetails()
    if retry_after is None and details.retry_after_seconds:
        retry_after = float(details.retry_after_seconds)
    fields: dict[str, Any] = {
        "operation": operation,
        "status": number,
        "reason": reason,
        "causes": tuple(FieldCause(c.reason, c.message, c.field) for c in details.causes or ()),
        "retry_after": retry_after,
    }
    return _class_of(number, reason)(status.message or "the server gave no reason", **fields)


_BY_CODE: dict[int, type[KubeError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    408: ConnectionFailed,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: TooManyRequests,
}


def _class_of(code: int, reason: str) -> type[KubeError]:
    if reason == "AlreadyExists":
        return AlreadyExists
    if reason == "Expired":
        return Gone
    if code >= 500:
        return ServerError
    return _BY_CODE.get(code, Rejected)


def _seconds(header: str | None) -> float | None:
    # Only the form in seconds is read: the API server never sends a date, and a proxy's clock cannot be trusted.
    return float(header) if header is not None and header.isascii() and header.isdigit() else None
