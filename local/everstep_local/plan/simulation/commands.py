"""Commands of a transcript that are about the job as a whole: what its processes report, and what one may ask about it.

A command is a function of the world and its words. Those that change pods and nodes are methods of `World`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from everstep_local.plan.simulation.edits import EDITS
from everstep_local.plan.simulation.queueing import QUEUEING
from everstep_operator.api.conditions import ConditionType

if TYPE_CHECKING:
    from everstep_local.plan.simulation.cluster import World


def committed(world: World, step: str) -> None:
    healthy = replace(world.progress, checkpoint_error=None, checkpoint_damaged=None)
    world.progress = replace(healthy, committed_step=int(step), committed_at=world.now)


def skipped(world: World) -> None:
    """A save was due while the one before was still being written."""
    world.progress = replace(world.progress, skipped_saves=world.progress.skipped_saves + 1)


def commit_failed(world: World, error: str) -> None:
    world.progress = replace(world.progress, checkpoint_error=error)


def slow(world: World, text: str = "", rank: str = "") -> None:
    """Set the rank for which the others wait; without an argument there is none any more."""
    world.progress = replace(world.progress, straggler=text or None, straggler_rank=int(rank) if rank else None)


def damaged(world: World, text: str) -> None:
    world.progress = replace(world.progress, checkpoint_damaged=text)


def edited(world: World) -> str:
    """The spec is changed in a way that does not matter here; prints what the status says of it after a pass."""
    world.generation += 1
    text = world.reconcile()
    return f"{text}\ngeneration {world.generation}, observed {world.status.observed_generation}"


def replicas(world: World) -> str:
    """What the scale subresource shows."""
    return f"replicas {world.status.replicas}, {len(world.pods)} pods"


def attention(world: World) -> str:
    """What waits for a person, and whether the job stands still by it."""
    needs, stalled = map(world.status.condition, (ConditionType.NEEDS_ATTENTION, ConditionType.STALLED))
    if needs is None or stalled is None:
        return "nothing has needed attention"
    return f"needs attention {needs.status}, stalled {stalled.status}: {needs.message}"


def started(world: World) -> str:
    """Since when the job is active, and how long it was before."""
    start, earlier = world.status.start_time, world.status.earlier_active_seconds
    since = "not active" if start is None else f"active for {(world.now - start).total_seconds():g}s"
    return f"{since}, and for {earlier}s before"


def history(world: World) -> str:
    """The runs before this one."""
    return "\n".join(
        f"rerun {run.rerun}: {run.outcome}, {run.active_seconds}s, step {run.step}, committed {run.committed_step}, "
        f"{run.restarts} restarts: {run.message}"
        for run in world.status.history
    )


def excluded(world: World) -> str:
    """The nodes that new pods avoid."""
    return "\n".join(
        f"avoids {node.name} {'while it says so' if node.until is None else f'until {node.until:%H:%M:%S}'}: "
        + "; ".join(node.reasons)
        for node in world.status.excluded_nodes
    ) or "avoids no node"  # fmt: skip


def pods(world: World) -> str:
    return " ".join(sorted(world.pods)) or "none"


COMMANDS: dict[str, Callable[..., str | None]] = {
    **EDITS,
    **QUEUEING,
    "committed": committed,
    "skipped": skipped,
    "commit-failed": commit_failed,
    "slow": slow,
    "damaged": damaged,
    "edited": edited,
    "replicas": replicas,
    "attention": attention,
    "started": started,
    "history": history,
    "excluded": excluded,
    "pods": pods,
}
