"""The actions that a plan may ask for. The union is closed: `controller.apply` matches on it and changes the cluster in
no other way.

Each action may be left out or taken twice without harm: the next plan derives it again from what it observes. `stages`
has the order in which actions are taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from everstep.contract.document import Sizes
from everstep_operator.api.types import GangScheduler


@dataclass(frozen=True, slots=True)
class _Create:
    kind: ClassVar[str]
    name: str
    body: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"create {self.kind} {self.name} ({self.why})"


class CreateService(_Create):
    __slots__ = ()
    kind = "service"


class CreateDisruptionBudget(_Create):
    __slots__ = ()
    kind = "disruption budget"


class CreateNetworkPolicy(_Create):
    __slots__ = ()
    kind = "network policy"


@dataclass(frozen=True, slots=True)
class CreatePod:
    """`claims`: the volume claims that have to be there before the pod; those that are there already are used."""

    name: str
    index: int
    incarnation: int
    body: dict[str, Any]
    why: str
    claims: tuple[dict[str, Any], ...] = ()

    def __str__(self) -> str:
        names = ", ".join(str(claim["metadata"]["name"]) for claim in self.claims)
        return f"create pod {self.name} ({self.why}{f', with {names}' if names else ''})"


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete exactly this pod. The UID is a precondition, so a successor of the same name is never deleted."""

    name: str
    uid: str
    grace_seconds: int
    why: str

    def __str__(self) -> str:
        return f"delete pod {self.name} grace={self.grace_seconds}s ({self.why})"


@dataclass(frozen=True, slots=True)
class _Delete:
    """Delete exactly this object. The UID is a precondition, because a job recreated under the same name has objects of
    the same names."""

    kind: ClassVar[str]
    name: str
    uid: str
    why: str

    def __str__(self) -> str:
        return f"delete {self.kind} {self.name} ({self.why})"


class DeleteService(_Delete):
    __slots__ = ()
    kind = "service"


class DeleteDisruptionBudget(_Delete):
    __slots__ = ()
    kind = "disruption budget"


class DeleteNetworkPolicy(_Delete):
    __slots__ = ()
    kind = "network policy"


@dataclass(frozen=True, slots=True)
class CreatePodGroup:
    scheduler: GangScheduler
    name: str
    body: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"create pod group {self.name} for {self.scheduler} ({self.why})"


@dataclass(frozen=True, slots=True)
class PatchPodGroup:
    """Change exactly this group. The UID is a precondition."""

    scheduler: GangScheduler
    name: str
    uid: str
    spec: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"change pod group {self.name} of {self.scheduler} ({self.why})"


@dataclass(frozen=True, slots=True)
class DeletePodGroup:
    """Delete exactly this group. The UID is a precondition."""

    scheduler: GangScheduler
    name: str
    uid: str
    why: str

    def __str__(self) -> str:
        return f"delete pod group {self.name} of {self.scheduler} ({self.why})"


class CreateWorkload(_Create):
    __slots__ = ()
    kind = "workload"


@dataclass(frozen=True, slots=True)
class DeleteWorkload:
    """Delete exactly this Workload of Kueue, and only as it was seen: it may have been admitted since."""

    name: str
    uid: str
    version: str
    why: str

    def __str__(self) -> str:
        return f"delete workload {self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class PatchWorkload:
    """Change what is asked for while no quota is reserved, or give up what is. `version` is a precondition, as of a
    status below."""

    name: str
    version: str
    body: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"change workload {self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class _PatchStatus:
    """One write of a Workload's status, as it was seen: its conditions are replaced as a whole."""

    verb: ClassVar[str]
    name: str
    version: str
    status: dict[str, Any]
    why: str

    def __str__(self) -> str:
        return f"{self.verb} {self.name} ({self.why})"


class ReturnQuota(_PatchStatus):
    """Give all quota back. The Workload stays in its queue."""

    __slots__ = ()
    verb = "return the quota of workload"


class ReclaimPods(_PatchStatus):
    """Give the quota of some pods back."""

    __slots__ = ()
    verb = "reclaim pods of workload"


class SetPodsReady(_PatchStatus):
    __slots__ = ()
    verb = "say of the pods of workload"


class FinishWorkload(_PatchStatus):
    __slots__ = ()
    verb = "finish workload"


@dataclass(frozen=True, slots=True)
class DeleteJob:
    uid: str
    why: str

    def __str__(self) -> str:
        return f"delete job ({self.why})"


@dataclass(frozen=True, slots=True)
class SetSizes:
    """Set, in the round store, the sizes that a round may have, and announce how many workers are created for the
    places of those that have to leave. Healthy workers are released only after that."""

    sizes: Sizes
    why: str
    surge: int = 0

    def __str__(self) -> str:
        return f"set sizes {self.sizes} ({self.why})"


@dataclass(frozen=True, slots=True)
class BeginRounds:
    """Begin the job's document of rounds anew, with these sizes, if it is still that which was closed after round
    `after`. The agents of the run that closed it have ended."""

    sizes: Sizes
    after: int
    why: str

    def __str__(self) -> str:
        return f"begin rounds of {self.sizes} anew after round {self.after} ({self.why})"


Action = (
    CreateService
    | CreatePod
    | DeletePod
    | DeleteService
    | CreateDisruptionBudget
    | DeleteDisruptionBudget
    | CreateNetworkPolicy
    | DeleteNetworkPolicy
    | CreatePodGroup
    | PatchPodGroup
    | DeletePodGroup
    | CreateWorkload
    | PatchWorkload
    | DeleteWorkload
    | ReturnQuota
    | ReclaimPods
    | SetPodsReady
    | FinishWorkload
    | DeleteJob
    | SetSizes
    | BeginRounds
)


def forced_deletes(actions: Iterable[Action]) -> set[str]:
    """The uids of the pods of which the API server knows nothing more as soon as these are taken."""
    return {each.uid for each in actions if isinstance(each, DeletePod) and each.grace_seconds == 0}
