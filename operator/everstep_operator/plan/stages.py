"""The order in which a plan's actions are taken, and which of them a failed action stops.

A plan is a list of stages. The actions of one stage do not depend on each other: they run in parallel, and each may
succeed or fail. A stage begins when every action of the earlier stages has ended, and only if no stage that it needs
has failed. A stage that is left out counts as failed. A failure stops nothing else.

So the writes of an operator that dies are always these: the status, all stages before the running one, and any subset
of the running one. The property tests cut plans at exactly these points
(`local/everstep_local/plan/simulation/cluster.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from everstep_operator.plan.actions import (
    Action,
    BeginRounds,
    CreateDisruptionBudget,
    CreateNetworkPolicy,
    CreatePod,
    CreatePodGroup,
    CreateService,
    CreateWorkload,
    DeleteDisruptionBudget,
    DeleteJob,
    DeleteNetworkPolicy,
    DeletePod,
    DeletePodGroup,
    DeleteService,
    DeleteWorkload,
    FinishWorkload,
    PatchPodGroup,
    PatchWorkload,
    ReclaimPods,
    ReturnQuota,
    SetPodsReady,
    SetSizes,
)


class StageName(StrEnum):
    """In the order in which they are carried out."""

    ADMISSION = "admission"  # what is asked of a queue: its answer is for a later plan
    CLEAR = "clear"  # pods that were lost or replaced, or belong to an older round: their successors need the room
    NETWORK = "network"  # the service that gives pods their host names
    GUARD = "guard"  # the disruption budget and the network policy: no pod waits for them
    GANG = "gang"  # the group by which a scheduler places all pods together or none
    CREATE = "create"  # pods, each after its volume claims
    SIZES = "sizes"  # what the round store gives to the agents: their sizes, or a new document
    RELEASE = "release"  # healthy workers that are no longer wanted
    CLEAN = "clean"  # the remaining objects of a finished job
    QUOTA = "quota"  # what a queue gets back, because pods were seen to be gone
    END = "end"  # the job itself


ORDER = tuple(StageName)
ALLOWED: Mapping[StageName, tuple[type[Action], ...]] = {
    StageName.ADMISSION: (CreateWorkload, PatchWorkload, DeleteWorkload, SetPodsReady),
    StageName.CLEAR: (DeletePod,),
    StageName.NETWORK: (CreateService,),
    StageName.GUARD: (CreateDisruptionBudget, DeleteDisruptionBudget, CreateNetworkPolicy, DeleteNetworkPolicy),
    StageName.GANG: (CreatePodGroup, PatchPodGroup, DeletePodGroup),
    StageName.CREATE: (CreatePod,),
    StageName.SIZES: (SetSizes, BeginRounds),
    StageName.RELEASE: (DeletePod,),
    StageName.CLEAN: (DeletePod, DeleteService, DeleteDisruptionBudget, DeleteNetworkPolicy, DeletePodGroup),
    StageName.QUOTA: (ReturnQuota, ReclaimPods, FinishWorkload, DeleteWorkload),
    StageName.END: (DeleteJob,),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """Actions that may run in any order. `needs`: the earlier stages that must have succeeded before this one
    begins."""

    name: StageName
    actions: tuple[Action, ...]
    needs: frozenset[StageName] = frozenset()

    def may_begin(self, failed: Collection[StageName]) -> bool:
        """`failed` are the stages of which an action failed, and those that were left out."""
        return self.needs.isdisjoint(failed)


def staged(
    actions: Mapping[StageName, Collection[Action]], needs: Mapping[StageName, Collection[StageName]] | None = None
) -> tuple[Stage, ...]:
    """The stages that have actions, in their order."""
    dependencies = needs or {}
    return tuple(
        Stage(name, tuple(actions[name]), frozenset(dependencies.get(name, ()))) for name in ORDER if actions.get(name)
    )


def broken_rule(stages: tuple[Stage, ...]) -> str | None:
    """What is wrong with the stages of a plan, if anything is."""
    positions = [ORDER.index(stage.name) for stage in stages]
    if positions != sorted(set(positions)):
        return f"stages {[str(stage.name) for stage in stages]} are not in their order, each once"
    for stage in stages:
        if any(ORDER.index(needed) >= ORDER.index(stage.name) for needed in stage.needs):
            return f"stage {stage.name} needs {sorted(stage.needs)}, which come later"
        for action in stage.actions:
            if not isinstance(action, ALLOWED[stage.name]):
                return f"stage {stage.name} has the action {action}"
    return None
