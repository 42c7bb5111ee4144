"""The shape of a plan: the new status, the actions that follow from it, the events, and when to plan again.

Ordering duty: the status is written first, by a compare-and-swap on the job's resourceVersion. The stages are carried
out after it, and events are written last. If the write is refused, no action may be taken and no event written.
`publish`: the actions follow from this very status, so it must be written even if only figures differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from everstep_operator.api.conditions import Cause
from everstep_operator.api.events import EventReason, event_type
from everstep_operator.api.status import Status
from everstep_operator.plan.actions import Action
from everstep_operator.plan.stages import Stage


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes event about the job, recorded only if the plan's status write succeeded."""

    reason: EventReason
    message: str

    def __str__(self) -> str:
        return f"event {event_type(self.reason)} {self.reason}: {self.message}"


@dataclass(frozen=True, slots=True)
class LostWorker:
    """The first lost worker of an incident. `node` None: it is not known where the worker ran. `at`: when it left its
    round, if the agents noticed that before the operator."""

    cause: Cause
    node: str | None
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Requeue:
    """Plan again after this long, even if no change is observed."""

    after: timedelta
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`status` is the whole status. The controller writes it only if it differs from the stored one."""

    status: Status
    stages: tuple[Stage, ...] = ()
    events: tuple[Event, ...] = ()
    requeue: Requeue | None = None
    lost: LostWorker | None = None  # an incident begins: counted if the status write succeeds
    publish: bool = False  # the status carries a new round: write it first
    reason: str = ""  # what this pass decided, or what it waits for

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of all stages."""
        return tuple(action for stage in self.stages for action in stage.actions)
