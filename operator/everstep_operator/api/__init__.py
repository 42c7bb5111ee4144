"""The TrainingJob API: types, vocabulary, parsing and the CRD. It is pure: no I/O, no clock, no cluster."""

from everstep_operator.api.base import ApiError, SpecError
from everstep_operator.api.conditions import Cause, ConditionStatus, ConditionType, ReadyReason
from everstep_operator.api.events import EventReason, EventType, event_type
from everstep_operator.api.parse import parse_spec, parse_status
from everstep_operator.api.recovery import Hang, HangMode, Recovery, Rule, RuleAction
from everstep_operator.api.status import (
    CheckpointStatus,
    Condition,
    Failure,
    Progress,
    RecoveryRecord,
    Restarts,
    Roster,
    Status,
    WorkerRange,
    World,
)
from everstep_operator.api.types import (
    Checkpoint,
    Elastic,
    PodCleanup,
    Rendezvous,
    RendezvousBackend,
    TrainingJobSpec,
)

__all__ = [
    "ApiError",
    "Cause",
    "Checkpoint",
    "CheckpointStatus",
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "Elastic",
    "EventReason",
    "EventType",
    "Failure",
    "Hang",
    "HangMode",
    "PodCleanup",
    "Progress",
    "ReadyReason",
    "Recovery",
    "RecoveryRecord",
    "Rendezvous",
    "RendezvousBackend",
    "Restarts",
    "Roster",
    "Rule",
    "RuleAction",
    "SpecError",
    "Status",
    "TrainingJobSpec",
    "WorkerRange",
    "World",
    "event_type",
    "parse_spec",
    "parse_status",
]
