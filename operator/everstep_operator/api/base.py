"""The model from which every API type derives: one place for casing, strictness, cross-field checks and errors.

It knows no field of a TrainingJob. Invariant: a check is written once, with its CEL text for the API server beside its
Python predicate, so a change of only one of them is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    StrictInt,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel

from everstep_operator.errors import TerminalError

INT32_MAX = 2**31 - 1
# The API server compares a `maximum` as a float, where 2**63 - 1 overflows to a negative bound.
SAFE_INT_MAX = 2**53 - 1


class ApiError(TerminalError):
    """Base of this package's errors. All of them are terminal for the object that was read."""


class SpecError(ApiError, ValueError):
    """A TrainingJob that may not run.

    `path` is the field as `kubectl explain` writes it (`spec.recovery.rules[0].action`). `problem` says what is wrong
    with it, and what to do.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Check:
    """A rule over several fields of one object, or over its change.

    The API server evaluates `cel` with `self` (and `oldSelf`) bound to the object. `holds` is the same rule in Python;
    None for a transition rule, which needs the old object. `field` is the fieldPath of the refusal, relative to the
    object (`.minReplicas`); empty for the object itself.
    """

    cel: str
    message: str
    field: str = ""
    holds: Callable[[Any], bool] | None = None

    def as_crd(self) -> dict[str, str]:
        rule = {"rule": self.cel, "message": self.message}
        return {**rule, "fieldPath": self.field} if self.field else rule


def _checks_into_schema(schema: dict[str, Any], model: type[ApiModel]) -> None:
    if model.CHECKS:
        schema["x-kubernetes-validations"] = [check.as_crd() for check in model.CHECKS]


class ApiModel(BaseModel):
    """Frozen, camelCase on the wire, snake_case in Python; an unknown field is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        json_schema_extra=_checks_into_schema,
    )

    CHECKS: ClassVar[tuple[Check, ...]] = ()

    @model_validator(mode="after")
    def _checks_hold(self) -> ApiModel:
        for check in self.CHECKS:
            if check.holds is not None and not check.holds(self):
                raise FieldError(check.field, check.message)
        return self

    def to_wire(self) -> dict[str, Any]:
        """JSON-ready with the API's names; a field without a value is absent, never null."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class StatusModel(ApiModel):
    """A part of a status. A newer operator may have written it, so unknown fields are ignored, not refused."""

    model_config = ConfigDict(extra="ignore")


class FieldError(ValueError):
    """A problem at `field`, relative to the validated object. It is a ValueError, so that pydantic passes it on."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def _in_utc(value: datetime) -> datetime:
    """The time in UTC, in which the first and last hours of the calendar of other zones have no place."""
    try:
        return value.astimezone(UTC)
    except OverflowError:
        return (datetime.min if value.year == 1 else datetime.max).replace(tzinfo=UTC, microsecond=0)


def _write_time(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# Whole seconds in UTC, as metav1.Time: so two statuses of one second compare equal, and the second is not written.
Timestamp = Annotated[
    AwareDatetime,
    AfterValidator(_in_utc),
    PlainSerializer(_write_time, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
# Values are never coerced: `replicas: true` or `"3"` is a mistake, not the number 1 or 3.
Int32 = Annotated[StrictInt, Field(le=INT32_MAX)]
Count = Annotated[StrictInt, Field(ge=0, le=SAFE_INT_MAX)]
Bool = StrictBool
# A DNS subdomain, such as the name of a Secret or a node.
ObjectName = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"),
]


def section(model: type[ApiModel], description: str) -> Any:
    """A nested object that is always there.

    Its default contains the nested defaults: the API server checks a default against the rules before it fills those
    in.
    """
    info: Any = Field(default_factory=model, description=description, json_schema_extra={"default": model().to_wire()})
    return info


def first_problem(root: str, error: ValidationError) -> SpecError:
    """The first failure of a pydantic validation as a field path and one sentence."""
    details = error.errors(include_url=False, include_input=False)[0]
    # Pydantic adds the names of a union's members (`constrained-int`) to the path. Only identifiers are field names.
    parts = [part for part in details["loc"] if isinstance(part, int) or part.isidentifier()]
    path = root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return SpecError(path + cause.field, cause.problem)
    if details["type"] == "extra_forbidden":
        return SpecError(path, "is not a field of this version; remove it or correct its name")
    return SpecError(path, details["msg"])
