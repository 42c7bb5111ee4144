"""What the time of a job went into, which nodes cost recoveries, and which new pods avoid: from the statuses of jobs
alone. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from everstep.jobs.view import View, moment

# The states of `status.stateSeconds` (ADR 0056), and what is in none of them yet.
STATES = {
    "productive": "new steps, with all that the script does between them",
    "replay": "steps that were taken again after a loss",
    "detect": "from a fault until it was noticed",
    "form": "enough workers ran, and had no world that trained",
    "restore": "the training state was read",
    "wait": "too few workers ran: capacity, images, start-up, back-off",
    "unknown": "the script reports nothing, or an older operator saw to the job",
}
PENDING = "pending"
MEANINGS = {**STATES, PENDING: "what it was shows with the next report, loss or status"}
# The stages of a recovery, by their fields of a record in `status.recoveries`: each with its name and its meaning.
STAGES = {
    "detectMs": ("detect", "from the fault until it was noticed"),
    "rendezvousMs": ("form", "from the notice to the new round"),
    "restoreMs": ("restore", "reading the training state"),
    "firstStepMs": ("first step", "from the restored state to the next step"),
}


def seconds_by_state(view: View, now: datetime) -> dict[str, int]:
    """Whole seconds by state, and those that the status does not attribute yet. They add up to the time for which the
    job was not suspended, until its end or `now`."""
    status = view.raw_status
    kept = status.get("stateSeconds") or {}
    seconds = {state: int(kept.get(state) or 0) for state in STATES}
    start = moment(str(status.get("startTime") or ""))
    end = view.over_at or now
    present = 0.0 if start is None else max(0.0, (end - start).total_seconds())
    active = int((status.get("earlierActiveSeconds") or 0) + present)
    # A clock that is behind the cluster's may make the life shorter than its parts.
    return {**seconds, PENDING: max(0, active - sum(seconds.values()))}


@dataclass(slots=True)
class NodeCost:
    """`node` None: nobody knows on which one the worker ran. `where` is the title of the source."""

    node: str | None
    where: str
    recoveries: int = 0
    seconds: float = 0.0  # from the faults to the first steps, as far as the records say
    lost_steps: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    jobs: list[str] = field(default_factory=list)
    last: str = ""  # RFC 3339
    excluded_by: list[str] = field(default_factory=list)  # jobs whose new pods avoid the node
    excluded_until: str = ""  # RFC 3339: until the last of them takes it again; empty: nobody knows
    reasons: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "node": self.node, "where": self.where, "recoveries": self.recoveries, "seconds": round(self.seconds, 3),
            "lost_steps": self.lost_steps, "causes": dict(sorted(self.causes.items())), "jobs": self.jobs,
            "last": self.last, "excluded_by": self.excluded_by, "excluded_until": self.excluded_until or None,
            "reasons": self.reasons,
        }  # fmt: skip


def by_node(views: Iterable[tuple[str, View]], now: datetime) -> list[NodeCost]:
    """Each node on which the first lost worker of a recovery ran, and each that new pods avoid, the one that cost most
    first. `views` with the titles of their sources. A status remembers the last ten recoveries."""
    costs: dict[tuple[str, str | None], NodeCost] = {}
    for where, view in views:
        job = f"{view.namespace}/{view.job}" if view.namespace else view.job
        for record in view.raw_status.get("recoveries") or ():
            if record.get("rung") == "regrow":  # a world that is whole again has lost nobody
                continue
            node = record.get("node") or None
            cost = costs.setdefault((where, node), NodeCost(node, where))
            cost.recoveries += 1
            cost.seconds += sum(int(record.get(part) or 0) for part in STAGES) / 1000
            cost.lost_steps += int(record.get("lostSteps") or 0)
            cost.causes[str(record.get("cause"))] += 1
            cost.last = max(cost.last, str(record.get("at") or ""), key=_order)
            if job not in cost.jobs:
                cost.jobs.append(job)
        for entry in view.raw_status.get("excludedNodes") or ():
            _exclude(costs, where, entry, job, now)
    return sorted(costs.values(), key=lambda cost: (-cost.seconds, -cost.recoveries, str(cost.node)))


def _exclude(
    costs: dict[tuple[str, str | None], NodeCost], where: str, entry: dict[str, Any], job: str, now: datetime
) -> None:
    name, until = str(entry.get("name")), str(entry.get("until") or "")
    if until and _order(until) <= now:
        return  # its operator has not written the status since
    cost = costs.setdefault((where, name), NodeCost(name, where))
    known = cost.excluded_until or not cost.excluded_by
    cost.excluded_until = max(cost.excluded_until, until, key=_order) if until and known else ""
    cost.excluded_by.append(job)
    cost.reasons += [reason for reason in entry.get("reasons") or () if reason not in cost.reasons]


def _order(at: str) -> datetime:
    return moment(at) or datetime.min.replace(tzinfo=UTC)
