"""Messages between worker and operator. JSON objects, bounded, versioned; unknown fields are ignored by both sides.

A worker's process posts a `Report` to `EVERSTEP_REPORT_URL` with its pod's token as bearer. The token names the pod;
nothing in the body is trusted for identity. The operator answers 204, or 307 to the leader, or 4xx with a reason.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypeGuard

from everstep.contract.fields import MAX_NUMBER, short

# --- answers
# What the operator says when it does not do what was asked, and how to tell that from what others say. Between a worker
# and the operator stand proxies, a Service whose rules are old for a moment, and addresses that belonged to another
# pod. So a status alone says nothing: a refusal is the operator's only if its body is. What is not the operator's is an
# outage, which ends by itself; it never ends a worker.

# 401: the token; 403: this pod may not; 400 and 413: what was sent can never be taken.
REFUSALS = frozenset({400, 401, 403, 413})
MAX_WORDS = 300  # characters


def words(body: bytes) -> str | None:
    """The operator's reason: a JSON object with `reason` and nothing else. None: another wrote this."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or list(content) != ["reason"] or not isinstance(content["reason"], str):
        return None
    return content["reason"][:MAX_WORDS]


def is_refusal(status: int, body: bytes) -> bool:
    """Whether the operator itself refuses, so that asking again cannot help."""
    return status in REFUSALS and words(body) is not None


# --- messages

MAX_REPORT_BYTES = 16 * 1024
MAX_METRICS = 8
MAX_METRIC_NAME = 40
WIDEST = 2**63  # above every whole number of 64 bits
REPORT_PATH = "/v1/report"


class MessageError(ValueError):
    """The bytes are not a message of this contract; the text names the field."""


class Phase(StrEnum):
    """What the process was doing when it sent the report."""

    START = "start"  # the training process runs; the process group may not exist yet
    RESTORE = "restore"  # state was read from a commit (or there was none); training starts
    TRAIN = "train"
    SAVE = "save"  # a commit was made
    SAVE_FAILED = "save-failed"  # an attempt to commit failed; training goes on
    SAVE_SKIPPED = "save-skipped"  # the save before is still being written
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Report:
    """Progress of one training process.

    Times are seconds since the epoch on the worker's clock; the operator uses them only relative to each other.
    """

    phase: Phase
    rank: int
    world_size: int
    at: float
    round: int = 0
    step: int | None = None  # highest completed optimizer step
    total_steps: int | None = None
    epoch: int | None = None
    step_seconds: float | None = None  # mean duration of the steps completed since the previous report
    restored_step: int | None = None  # with RESTORE: the step of the commit read, None when there was none
    restore_seconds: float | None = None
    committed_step: int | None = None  # last commit that this process knows of
    committed_at: float | None = None
    checkpoint_error: str | None = None
    straggler: str | None = None  # the rank that the others wait for, in words
    straggler_rank: int | None = None  # and as a number; older workers do not send it
    rehearsed: str | None = None  # the rehearsal of this very program, in words
    peak_memory: int | None = None  # most bytes of RAM that the process has held at once
    peak_device_memory: int | None = None  # and of its accelerator's memory, in tensors
    metrics: dict[str, float] = field(default_factory=dict)

    def encode(self) -> bytes:
        body = {k: v for k, v in asdict(self).items() if v is not None}
        data = json.dumps(body, separators=(",", ":"), allow_nan=True).encode()
        if len(data) > MAX_REPORT_BYTES:
            raise MessageError(f"report is {len(data)} bytes, at most {MAX_REPORT_BYTES} are allowed")
        return data

    @classmethod
    def decode(cls, data: bytes) -> Report:
        """Parse a report; raises MessageError naming the first field that is wrong."""
        if len(data) > MAX_REPORT_BYTES:
            raise MessageError(f"report is {len(data)} bytes, at most {MAX_REPORT_BYTES} are allowed")
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise MessageError(f"report is not JSON: {e}") from e
        if not isinstance(body, dict):
            raise MessageError("report is not a JSON object")
        try:
            phase = Phase(named if isinstance(named := body.get("phase"), str) else "")
        except ValueError as e:
            raise MessageError(f"phase: {short(named)} is not one of {[p.value for p in Phase]}") from e
        return cls(
            phase=phase,
            rank=_int(body, "rank", 0) or 0,
            world_size=_int(body, "world_size", 1) or 1,
            at=_float(body, "at") or 0.0,
            round=_int(body, "round", below=MAX_NUMBER) or 0,
            step=_int(body, "step"),
            total_steps=_int(body, "total_steps"),
            epoch=_int(body, "epoch"),
            step_seconds=_float(body, "step_seconds"),
            restored_step=_int(body, "restored_step"),
            restore_seconds=_float(body, "restore_seconds"),
            committed_step=_int(body, "committed_step"),
            committed_at=_float(body, "committed_at"),
            checkpoint_error=_text(body, "checkpoint_error"),
            straggler=_text(body, "straggler"),
            straggler_rank=_int(body, "straggler_rank"),
            rehearsed=_text(body, "rehearsed"),
            peak_memory=_int(body, "peak_memory", below=MAX_NUMBER),
            peak_device_memory=_int(body, "peak_device_memory", below=MAX_NUMBER),
            metrics=_metrics(body.get("metrics", {})),
        )


def _int(body: dict[str, Any], name: str, low: int = 0, below: int = WIDEST) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < below:
        raise MessageError(f"{name}: {short(value)} is not an integer from {low} to {below - 1}")
    return value


def _float(body: dict[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if not _is_number(value) or not math.isfinite(value) or value < 0:
        raise MessageError(f"{name}: {short(value)} is not a finite number of 64 bits and at least 0")
    return float(value)


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it fits into 64 bits: no float can be made of a longer integer, and nothing counts so far."""
    return type(value) is float or (type(value) is int and -WIDEST <= value < WIDEST)


def _text(body: dict[str, Any], name: str, limit: int = 500) -> str | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise MessageError(f"{name}: {short(value)} is not a string")
    return value[:limit]


def _metrics(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > MAX_METRICS:
        raise MessageError(f"metrics: an object of at most {MAX_METRICS} numbers is expected")
    for name, number in value.items():
        if not isinstance(name, str) or len(name) > MAX_METRIC_NAME:
            raise MessageError(f"metrics: the name {short(name)} is longer than {MAX_METRIC_NAME} characters")
        if not _is_number(number):
            raise MessageError(f"metrics.{name}: {short(number)} is not a number of 64 bits")
    return {name: float(number) for name, number in value.items()}
