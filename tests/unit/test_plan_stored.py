"""Jobs that an older operator left in etcd go on: `stored_jobs.jsonl` has statuses as that operator wrote them.

Each line is one job: its spec (with the template of `plan_world`), its status, what else the operator saw at that
moment, and under `goes_on` what that operator did then, for several things that may happen next. The file was made with
the planner of `35419f3`, before c10d jobs had a roster in memory. It is never made anew. Only the disruption budget
follows another rule since then: a job that waits has none. And pods that were told to end are looked at again, and new
ones prefer other nodes than one that was just lost.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from everstep_local.plan.simulation import agents as elastic_world
from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.api.parse import parse_status
from everstep_operator.plan.snapshot import DisruptionBudgetView, ReportedProgress, WorkerPod
from everstep_operator.round_view import RoundView

STORED = [json.loads(line) for line in Path(__file__).with_name("stored_jobs.jsonl").read_text().splitlines()]
CASES = [(job, commands) for job in STORED for commands in job["goes_on"]]


def restored(job: dict[str, Any]) -> Any:
    """The toy cluster as the older operator left it."""
    c10d = job["spec"]["rendezvous"]["backend"] == "c10d"
    world = plan_world.World() if c10d else elastic_world.ElasticWorld()
    world.now = datetime.fromisoformat(job["now"])
    world.spec = {**job["spec"], "template": plan_world.TEMPLATE}
    world.status = parse_status(job["status"])
    pods = TypeAdapter(list[WorkerPod]).validate_python([{"round": None, **pod} for pod in job["pods"]])
    world.pods = {pod.name: pod for pod in pods}
    world.uids = len(pods) * 100
    world.service = job["service"]
    world.progress = TypeAdapter(ReportedProgress).validate_python(job["progress"])
    world.view = TypeAdapter(RoundView).validate_python(job["round"]) if "round" in job else None
    if "disruption_budget" in job:
        world.disruption_budget = DisruptionBudgetView(**job["disruption_budget"])
    return world


def test_stored_jobs_are_of_every_backend_and_of_fixed_and_elastic_size() -> None:
    kinds = {(job["spec"]["rendezvous"]["backend"], "elastic" in job["spec"]) for job in STORED}
    assert kinds == {("c10d", False), ("etcd", False), ("etcd", True), ("everstep", False), ("everstep", True)}


@pytest.mark.parametrize(("job", "commands"), CASES, ids=[f"{job['name']}: {c!r}" for job, c in CASES])
def test_stored_job_goes_on_as_the_operator_that_wrote_it_would(job: dict[str, Any], commands: str) -> None:
    world = restored(job)
    printed = [world.run(line) for line in commands.splitlines()]
    done = "\n".join(text for text in printed if text).splitlines()
    assert without_later_rules(done) == without_later_rules(job["goes_on"][commands])


def without_later_rules(lines: list[str]) -> list[str]:
    later = ("disruption budget", "(a pod has not ended)")
    lines = [line.replace(", not on n2 if possible", "") for line in lines]
    return [line for line in lines if not any(text in line for text in later) and not line.startswith("nothing to do")]
