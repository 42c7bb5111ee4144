"""What the conditions of a job say of its checkpoints."""

from __future__ import annotations

import pytest

from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.api.conditions import ConditionStatus, ConditionType


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("Occupied: s3://b/run: job 5f1c, process 7 on letters-w0-0 has the log (record 3)", "InUse"),
        ("StoreUnusable: s3://b/run: writing log/0: AccessDenied", "Unusable"),
        ("step 20: 503 from the store", "CommitFailed"),
    ],
)
def test_condition_says_why_there_are_no_commits(error: str, reason: str) -> None:
    world = plan_world.World()
    for line in ("job replicas=2", "settle", "ready 0 1", "step 10", f'commit-failed "{error}"', "reconcile"):
        world.run(line)
    condition = world.status.condition(ConditionType.CHECKPOINT_HEALTHY)
    assert (condition.status, condition.reason, condition.message) == (ConditionStatus.FALSE, reason, error)
    for line in ("committed 30", "reconcile"):
        world.run(line)
    assert world.status.condition(ConditionType.CHECKPOINT_HEALTHY).status is ConditionStatus.TRUE
