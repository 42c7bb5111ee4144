"""The decisions of a pass over a job: a closed union. It does not say how they are carried out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from everstep_operator.api.conditions import FailedReason, ReadyReason, Rung
from everstep_operator.api.events import EventReason
from everstep_operator.api.status import Restarts
from everstep_operator.plan.outcome import Event, LostWorker
from everstep_operator.plan.state.losses import Loss
from everstep_operator.plan.state.roster import Roster


@dataclass(frozen=True, slots=True)
class Complete:
    """The job has succeeded. `message` says which of its workers did."""

    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The job ends without success. `loss` is the root cause, if that is a lost worker."""

    reason: FailedReason
    message: str
    loss: Loss | None = None
    event: EventReason = EventReason.JOB_FAILED


@dataclass(frozen=True, slots=True)
class RecoveryStart:
    """A recovery begins. If `follows` and one is open already, that one goes on. `rung`: how it is expected to end.
    `at`: when the agents noticed the loss, if they did before the operator. `stood`: how long that took, if they say
    so."""

    loss: Loss
    rung: Rung
    follows: bool
    at: datetime | None = None
    stood: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish this roster. `reason` None: the Ready condition does not mention it."""

    roster: Roster
    message: str
    reason: ReadyReason | None = None
    event: Event | None = None
    restarts: Restarts | None = None
    recovery: RecoveryStart | None = None
    lost: LostWorker | None = None  # an incident begins with this loss


@dataclass(frozen=True, slots=True)
class Repaired:
    """The published roster is right: agents replace a process by themselves. What that costs is recorded."""

    message: str
    event: Event
    recovery: RecoveryStart
    lost: LostWorker


@dataclass(frozen=True, slots=True)
class Wait:
    """Change nothing yet, and decide again after this long."""

    after: timedelta
    message: str


@dataclass(frozen=True, slots=True)
class Keep:
    """The published roster is right: create the missing pods."""


Decision = Complete | Failed | Publish | Repaired | Wait | Keep
