"""The operator dies after each of its writes in turn, or never learns that one was made (failure modes
17, 18, 20, 31, 38).

One life of a job is played: it starts, loses worker 1, recovers and completes. Whatever happens to the operator, the
end must be the one of a life in which nothing happened to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import pytest

from everstep_operator.kube.errors import NotFound
from support.apiserver.operators import NewPlace, Operators, Place

pytestmark = pytest.mark.apiserver

LIFE = 60.0  # seconds


class Story:
    """The job's life outside the operator: kubelets that run pods, one fault, and success."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.broken: str | None = None
        self.seen: dict[str, set[str]] = {}  # the UIDs that each pod name ever had

    async def advance(self) -> bool:
        """What happens next in the cluster; whether the job's life is over."""
        status = await self.place.status()
        pods = await self.place.pods()
        for name, pod in pods.items():
            self.seen.setdefault(name, set()).add(pod.metadata.uid)
        with contextlib.suppress(NotFound):  # the operator deletes pods meanwhile
            await self._fate(status, pods)
        conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
        return conditions.get("Complete") == "True" and not await self.place.services()

    async def _fate(self, status: dict[str, Any], pods: dict[str, Any]) -> None:
        world = status.get("world", {})
        phases = {name: pod.status.phase for name, pod in pods.items()}
        # A worker that has been Ready for longer than another one ran shows that the program does run, and the loss
        # counts otherwise. So that nobody sees this here who comes late, the nodes' clocks are ahead.
        await self.place.start_all(ahead=LIFE)
        if not world.get("formedAt"):
            return
        if world["round"] == 1 and self.broken is None and phases.get("digits-w1-0") == "Running":
            self.broken = "digits-w1-0"
            await self.place.end("digits-w1-0", 1, message="ValueError: once")
        elif world["round"] == 2:
            for name in ("digits-w0-1", "digits-w1-1"):
                if phases.get(name) == "Running":
                    await self.place.end(name, 0)

    async def end_state(self) -> dict[str, Any]:
        """All that must not depend on what happened to operators; times do."""
        status = await self.place.status()
        restarts = {k: v for k, v in status["restarts"].items() if not k.endswith("At")}
        pods = await self.place.pods()
        assert len({p.metadata.labels["everstep.dev/spec-hash"] for p in pods.values()}) == 1, "of one spec"
        return {
            "pods": {n: (p.status.phase, _without_hash(p.metadata.labels)) for n, p in pods.items()},
            "services": await self.place.services(),
            "round": status["world"]["round"],
            "size": status["world"]["size"],
            "restarts": restarts,
            "recoveries": [(r["cause"], r["worker"]) for r in status["recoveries"]],
            "conditions": {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]},
            "failure": status.get("failure"),
        }


def _without_hash(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in labels.items() if name != "everstep.dev/spec-hash"}


async def tell(story: Story, until: asyncio.Event | None = None) -> bool:
    """Play on until the job's life is over (True) or `until` is set."""
    deadline = time.monotonic() + LIFE
    while not await story.advance():
        if until is not None and until.is_set():
            return False
        assert time.monotonic() < deadline, f"the job did not end: {await story.place.status()}"
        await asyncio.sleep(0.02)
    return True


async def new_story(new_place: NewPlace) -> Story:
    place = await new_place()
    # One charged restart is allowed: a second charge of the same loss would fail the job.
    await place.create_job(recovery={"maxRestarts": 1, "backoffSeconds": {"initial": 0, "max": 0}})
    return Story(place)


def expected(uid: str) -> dict[str, Any]:
    def labels(index: int) -> dict[str, str]:
        return {
            "everstep.dev/job": "digits", "everstep.dev/job-uid": uid, "everstep.dev/worker-index": str(index),
            "everstep.dev/incarnation": "1", "everstep.dev/round": "2", "app.kubernetes.io/managed-by": "everstep",
        }  # fmt: skip

    return {
        "pods": {f"digits-w{i}-1": ("Succeeded", labels(i)) for i in (0, 1)},
        "services": [],
        "round": 2,
        "size": 2,
        "restarts": {"userCode": 1, "infrastructure": 0, "preemption": 0, "startFailures": 0, "total": 1, "inWindow": 1,
                     "withoutProgress": 1, "rejections": 0, "rejectedBy": [], "lostNodes": [], "unstarted": 0,
                     "startTimeouts": 0, "spareFailures": 0, "suspectNodes": []},
        "recoveries": [("Error", 1)],
        "conditions": {
            "Ready": ("True", "Complete"), "Reconciling": ("False", "Complete"), "Stalled": ("False", "Complete"),
            "QuorumReached": ("False", "Waiting"), "Recovering": ("False", "Complete"),
            "Resizing": ("False", "Complete"), "Suspended": ("False", "Complete"),
            "Complete": ("True", "Complete"), "Failed": ("False", "Complete"),
        },
        "failure": None,
    }  # fmt: skip


async def assert_ended_well(story: Story) -> None:
    uid = (await story.place.job()).metadata.uid
    ended, wanted = await story.end_state(), expected(uid)
    other = {key: (value, wanted[key]) for key, value in ended.items() if value != wanted[key]}
    assert not other, f"these differ (as they ended, as expected): {other}"
    twice = {name: uids for name, uids in story.seen.items() if len(uids) > 1}
    assert not twice, f"one incarnation of a worker was two pods: {twice}"


async def undisturbed(new_place: NewPlace) -> list[str]:
    """The writes of an operator to which nothing happens."""
    story = await new_story(new_place)
    async with Operators(story.place).run() as client:
        assert await tell(story)
    await assert_ended_well(story)
    return list(client.writes)


@pytest.mark.long
async def test_operator_killed_after_any_single_write_leaves_the_same_job(new_place: NewPlace) -> None:
    """Cases 17 and 18."""
    writes = await undisturbed(new_place)
    assert len(writes) >= 12, writes

    async def life(dies_after: int) -> None:
        story = await new_story(new_place)
        operators = Operators(story.place)
        async with operators.run(dies_after=dies_after) as client:
            over = await tell(story, client.dead)
        if not over:
            async with operators.run():
                assert await tell(story)
        await assert_ended_well(story)

    await in_groups([life(n) for n in range(1, len(writes) + 1)])


@pytest.mark.long
async def test_answer_of_any_single_write_lost_leaves_the_same_job(new_place: NewPlace) -> None:
    """Case 31, for every write: it happened, and the operator was told that the connection broke."""
    writes = await undisturbed(new_place)

    async def life(loses: int) -> None:
        story = await new_story(new_place)
        async with Operators(story.place).run(loses=loses):
            assert await tell(story)
        await assert_ended_well(story)

    await in_groups([life(n) for n in range(len(writes))])


async def in_groups(lives: list[Any], size: int = 8) -> None:
    for start in range(0, len(lives), size):
        async with asyncio.TaskGroup() as group:
            for life in lives[start : start + size]:
                group.create_task(life)


async def test_operator_that_dies_at_every_write_charges_a_loss_once(new_place: NewPlace) -> None:
    """Case 20: a crash loop in which each life gets one write done, or none."""
    story = await new_story(new_place)
    deaths = 0
    over = False
    while not over:
        assert deaths < 100, "no progress from life to life"
        async with Operators(story.place).run(dies_after=deaths % 2) as client:
            over = await tell(story, client.dead)
        deaths += 1
    assert deaths > 20
    await assert_ended_well(story)


@pytest.mark.long
async def test_two_operators_that_both_believe_to_lead_make_one_pod_set(new_place: NewPlace) -> None:
    """Case 38: nothing rests on the Lease; compare-and-swap, names and UIDs are the fence."""
    story, other = await new_story(new_place), await new_place()
    operators = Operators(story.place)
    async with operators.run(), operators.run(lease=other.namespace):
        assert await tell(story)
    await assert_ended_well(story)
