"""What a plan may ask for. A closed union: `controller.apply` matches on it and has no other way to change the cluster.

Each is safe to leave out and to take twice: it is derived again from what is then observed. In which order they are
taken is said by `stages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from everstep.contract.document import Sizes


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
class CreateDisruptionBudget:
    name: str
    body: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"create disruption budget {self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class DeleteDisruptionBudget:
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
    """Tell the agents, through the round store, which sizes a round may have. Before a healthy worker goes for it."""

    sizes: Sizes
    why: str

    def __str__(self) -> str:
        return f"set sizes {self.sizes} ({self.why})"


Action = (
    CreateService
    | CreatePod
    | DeletePod
    | DeleteService
    | CreateDisruptionBudget
    | DeleteDisruptionBudget
    | DeleteJob
    | SetSizes
)
