"""The server's refusals, in the server's own form.

Every refusal becomes a `v1.Status`, and goes through the same `errors.from_status` as an answer over HTTP. So class,
reason and causes of an error are the same as with a real server.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from everstep_operator.kube.errors import FieldCause, KubeError, Operation, StatusBody, from_status

OPTIMISTIC_LOCK = "the object has been modified; please apply your changes to the latest version and try again"


@dataclass(frozen=True, slots=True)
class FieldError:
    """One wrong field. `kind` is the server's word after `FieldValue` (Required, Invalid, TooLong, ...)."""

    kind: str
    field: str
    message: str

    @property
    def reason(self) -> str:
        return f"FieldValue{self.kind}"


def required(field: str, detail: str = "") -> FieldError:
    return FieldError("Required", field, f"Required value: {detail}" if detail else "Required value")


def invalid(field: str, value: Any, detail: str) -> FieldError:
    return FieldError("Invalid", field, f"Invalid value: {shown(value)}: {detail}")


def type_invalid(field: str, value: Any, detail: str) -> FieldError:
    return FieldError("TypeInvalid", field, f"Invalid value: {shown(value)}: {detail}")


def not_supported(field: str, value: Any, supported: Sequence[Any]) -> FieldError:
    listed = ", ".join(shown(choice) for choice in supported)
    return FieldError("NotSupported", field, f"Unsupported value: {shown(value)}: supported values: {listed}")


def forbidden(field: str, detail: str) -> FieldError:
    return FieldError("Forbidden", field, f"Forbidden: {detail}")


def duplicate(field: str, value: Any) -> FieldError:
    return FieldError("Duplicate", field, f"Duplicate value: {shown(value)}")


def too_long(field: str, limit: int) -> FieldError:
    return FieldError("TooLong", field, f"Too long: may not be more than {limit} bytes")


def too_many(field: str, length: int, limit: int) -> FieldError:
    return FieldError("TooMany", field, f"Too many: {length}: must have at most {limit} items")


def shown(value: Any) -> str:
    """A value as the server prints it in a message: JSON, bounded."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if len(text) <= 200 else text[:200] + "..."


class Refusal(Exception):
    """A request that was answered with an error. `error` makes the exception that a client raises."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        causes: Sequence[FieldError] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message
        self.causes, self.retry_after = tuple(causes), retry_after

    def error(self, operation: Operation) -> KubeError:
        made = from_status(StatusBody(self.message, self.reason, self.code), operation, retry_after=self.retry_after)
        made.causes = tuple(FieldCause(cause.reason, cause.message, cause.field) for cause in self.causes)
        return made


def not_found(plural: str, name: str) -> Refusal:
    return Refusal(404, "NotFound", f'{plural} "{name}" not found')


def no_such_resource() -> Refusal:
    return Refusal(404, "NotFound", "the server could not find the requested resource")


def already_exists(plural: str, name: str) -> Refusal:
    return Refusal(409, "AlreadyExists", f'{plural} "{name}" already exists')


def conflict(plural: str, name: str, detail: str = OPTIMISTIC_LOCK) -> Refusal:
    message = f'Operation cannot be fulfilled on {plural} "{name}": {detail}'
    return Refusal(409, "Conflict", message)


def failed_precondition(plural: str, name: str, what: str, expected: str, actual: str) -> Refusal:
    return conflict(
        plural, name, f"Precondition failed: {what} in precondition: {expected}, {what} in object meta: {actual}"
    )


def bad_request(message: str) -> Refusal:
    return Refusal(400, "BadRequest", message)


def unprocessable(kind: str, name: str, errors: Sequence[FieldError]) -> Refusal:
    """422 with every wrong field. `kind` is written as `TrainingJob.everstep.dev`."""
    parts = [f"{error.field}: {error.message}" for error in errors]
    text = parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"
    return Refusal(422, "Invalid", f'{kind} "{name}" is invalid: {text}', causes=errors)


def expired(version: int, floor: int) -> Refusal:
    return Refusal(410, "Expired", f"too old resource version: {version} ({floor})")


def terminating(plural: str, name: str, namespace: str) -> Refusal:
    text = f"namespace {namespace} is being terminated"
    message = (
        f'{plural} "{name}" is forbidden: unable to create new content in namespace {namespace} because it is '
        "being terminated"
    )
    refusal = Refusal(403, "Forbidden", message)
    refusal.causes = (_NamespaceTerminating("Forbidden", "metadata.namespace", text),)
    return refusal


class _NamespaceTerminating(FieldError):
    @property
    def reason(self) -> str:
        return "NamespaceTerminating"
