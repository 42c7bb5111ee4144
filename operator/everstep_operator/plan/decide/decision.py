"""What a pass over a job decides: a closed union, and nothing about how it is carried out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from everstep_operator.api.conditions import FailedReason, ReadyReason, Rung
from everstep_operator.api.events import EventReason
from everstep_operator.api.status import Restarts
from everstep_operator.plan.outcome import Event
from everstep_operator.plan.state.losses import Loss
from everstep_operator.plan.state.roster import Roster


@dataclass(frozen=True, slots=True)
class Complete:
    """The job has ended well; so many workers succeeded."""

    workers: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a job ends without success; `loss` is the root cause, where a lost worker is."""

    reason: FailedReason
    message: str
    loss: Loss | None = None
    event: EventReason = EventReason.JOB_FAILED


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery begins, or goes on if `follows` and one is open already; by this rung, as far as can be told."""

    loss: Loss
    rung: Rung
    follows: bool


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish this roster. `reason` None: the Ready condition says what it would say anyway."""

    roster: Roster
    message: str
    reason: ReadyReason | None = None
    event: Event | None = None
    restarts: Restarts | None = None
    recovery: Recovery | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Change nothing yet, and decide again after this long."""

    after: timedelta
    message: str


@dataclass(frozen=True, slots=True)
class Keep:
    """The published workers are right: make what is missing of them."""


Decision = Complete | Failed | Publish | Wait | Keep
