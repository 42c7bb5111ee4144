"""What a plan may ask for. A closed union: `shell.apply` matches on it and has no other way to change the cluster.

Ordering duty: when `Plan.publish` is set, the status must be written (compare-and-swap on the job's resourceVersion)
*before* any action; if that write is refused, no action may be taken. Actions are taken in their order; it is safe to
stop after any prefix, because every one of them is derived again from what is then observed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from everstep.contract.document import Sizes
from everstep_operator.api.status import Status


@dataclass(frozen=True, slots=True)
class CreateService:
    name: str
    body: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"create service {self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class CreatePod:
    name: str
    index: int
    incarnation: int
    body: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"create pod {self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete exactly this pod: the UID is a precondition, so that a successor of the same name is never hit."""

    name: str
    uid: str
    grace_seconds: int
    why: str

    def __str__(self) -> str:
        return f"delete pod {self.name} grace={self.grace_seconds}s ({self.why})"


@dataclass(frozen=True, slots=True)
class DeleteService:
    """With the UID as precondition: a job that was recreated under the same name has a service of the same name."""

    name: str
    uid: str
    why: str

    def __str__(self) -> str:
        return f"delete service {self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class CreateBudget:
    name: str
    body: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"create disruption budget {self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class DeleteBudget:
    """With the UID as precondition, as a service."""

    name: str
    uid: str
    why: str

    def __str__(self) -> str:
        return f"delete disruption budget {self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class DeleteJob:
    uid: str
    why: str

    def __str__(self) -> str:
        return f"delete job ({self.why})"


@dataclass(frozen=True, slots=True)
class SetSizes:
    """Tell the agents, through the round store, which sizes a round may have. Before any pod comes or goes for it."""

    sizes: Sizes
    why: str

    def __str__(self) -> str:
        return f"set sizes {self.sizes} ({self.why})"


Action = CreateService | CreatePod | DeletePod | DeleteService | CreateBudget | DeleteBudget | DeleteJob | SetSizes


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes event about the job, recorded only if the plan's status write succeeded."""

    reason: str
    message: str
    warning: bool = False

    def __str__(self) -> str:
        return f"event {'Warning' if self.warning else 'Normal'} {self.reason}: {self.message}"


@dataclass(frozen=True, slots=True)
class Requeue:
    """Look again after this long even if nothing is seen to change."""

    after: timedelta
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """`status` is the whole status wanted; the shell writes it only if it differs from what is there."""

    status: Status
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue: Requeue | None = None
    publish: bool = False  # the status carries a new round: write it first
    reason: str = ""  # what this pass decided, or what it waits for
