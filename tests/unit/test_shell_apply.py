"""Carrying out a plan: order, leadership, what counts as done, and how a refusal reaches the next plan."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from everstep.contract.document import Sizes
from everstep_operator.api.status import Status
from everstep_operator.api.types import TrainingJobSpec
from everstep_operator.kube.errors import (
    AlreadyExists,
    Conflict,
    ConnectionFailed,
    Forbidden,
    KubeError,
    NotFound,
    ServerError,
)
from everstep_operator.kube.wire import KubeObject, ObjectMeta, OwnerReference
from everstep_operator.plan.actions import CreatePod, CreateService, DeletePod, SetSizes
from everstep_operator.plan.snapshot import JobView
from everstep_operator.runtime.expectations import Expectations
from everstep_operator.shell.apply import Applied, Applier

SPEC = TrainingJobSpec.model_validate({"replicas": 2, "template": {"spec": {"containers": [{"name": "worker"}]}}})
JOB = JobView("ns", "digits", "job-1", 1, "1", SPEC, Status(), datetime(2026, 1, 1, tzinfo=UTC))
KEY = ("ns", "digits")


class Server:
    """Names and their owners. `refuses` maps a name to the error that any write of it gets."""

    def __init__(self) -> None:
        self.owners: dict[str, str] = {}
        self.uids: dict[str, str] = {}
        self.refuses: dict[str, KubeError] = {}
        self.loses: set[str] = set()  # carried out, and the answer lost
        self.log: list[str] = []
        self.open = 0
        self.most = 0

    async def create(self, resource: Any, namespace: str, body: Any) -> None:
        name = body["metadata"]["name"]
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(0)
        self.open -= 1
        if name in self.refuses:
            raise self.refuses[name]
        if name in self.owners:
            raise AlreadyExists(f"{name} exists")
        self.owners[name] = body["owner"]
        self.log.append(f"create {name}")
        if name in self.loses:
            raise ConnectionFailed("the answer was lost")

    async def set_sizes(self, job: JobView, sizes: Sizes) -> None:
        if "sizes" in self.refuses:
            raise self.refuses["sizes"]
        self.log.append(f"sizes {sizes}")

    async def get(self, resource: Any, namespace: str, name: str) -> KubeObject:
        if self.owners.get(name) in (None, "gone"):
            raise NotFound(name)
        return KubeObject(
            metadata=ObjectMeta(name=name, owner_references=(OwnerReference(uid=self.owners[name], controller=True),))
        )

    async def delete(self, resource: Any, namespace: str, name: str, *, uid: str, **_: Any) -> None:
        if name in self.refuses:
            raise self.refuses[name]
        if name not in self.uids:
            raise NotFound(name)
        if self.uids[name] != uid:
            raise Conflict("uid")
        del self.uids[name]
        self.log.append(f"delete {name}")


class Hand:
    def __init__(self) -> None:
        self.server = Server()
        self.expectations: Expectations[tuple[str, str]] = Expectations()
        self.leads = True
        self.applier = Applier(
            self.server,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            self.expectations,
            require_leading=self.require,
            monotonic=lambda: 0.0,
            set_sizes=self.server.set_sizes,
        )

    def require(self) -> None:
        if not self.leads:
            raise PermissionError("another replica leads")

    def waits_for(self) -> set[str]:
        held = self.expectations.pending(KEY, 0.0)
        return set() if held is None else set(held.creations | held.deletions)


@pytest.fixture
def hand() -> Hand:
    return Hand()


def pod(index: int) -> CreatePod:
    name = f"w{index}"
    return CreatePod(name, index, 0, {"metadata": {"name": name}, "owner": "job-1"}, "")


SERVICE = CreateService("svc", {"metadata": {"name": "svc"}, "owner": "job-1"}, "")


async def test_service_comes_first_and_deletes_come_before_creates(hand: Hand) -> None:
    hand.server.uids["old"] = "u"
    await hand.applier.apply(JOB, (pod(0), DeletePod("old", "u", 1, ""), pod(1), SERVICE))
    assert hand.server.log == ["create svc", "delete old", "create w0", "create w1"]
    assert hand.waits_for() == {"w0", "w1", "u"}


async def test_no_pod_comes_or_goes_before_the_agents_were_told_the_sizes(hand: Hand) -> None:
    hand.server.uids["old"] = "u"
    actions = (pod(0), DeletePod("old", "u", 1, ""), SetSizes(Sizes(1, 2), ""))
    hand.server.refuses["sizes"] = ServerError("etcd has no leader")
    with pytest.raises(ServerError):
        await hand.applier.apply(JOB, actions)
    assert hand.server.log == []
    hand.server.refuses.clear()
    await hand.applier.apply(JOB, actions)
    assert hand.server.log == ["sizes 1:2", "delete old", "create w0"]


async def test_many_creates_run_in_parallel_up_to_a_bound(hand: Hand) -> None:
    await hand.applier.apply(JOB, tuple(pod(i) for i in range(100)))
    assert len(hand.server.owners) == 100
    assert 1 < hand.server.most <= 16


async def test_replica_that_lost_its_lead_writes_nothing_more(hand: Hand) -> None:
    hand.leads = False
    with pytest.raises(PermissionError):
        await hand.applier.apply(JOB, (SERVICE, pod(0)))
    assert hand.server.log == []


async def test_pod_that_exists_already_is_taken_as_created_if_it_is_ours(hand: Hand) -> None:
    hand.server.owners["w0"] = "job-1"
    assert await hand.applier.apply(JOB, (pod(0), pod(1))) == Applied()


async def test_name_that_another_owner_holds_is_reported_and_not_waited_for(hand: Hand) -> None:
    """Case 8: the pod of a deleted job of the same name is not ours."""
    hand.server.owners["w0"] = "job-of-the-same-name-before"
    assert await hand.applier.apply(JOB, (pod(0), pod(1))) == Applied(collisions=("w0",))
    assert hand.waits_for() == {"w1"}


async def test_name_that_was_just_freed_is_tried_again_soon(hand: Hand) -> None:
    hand.server.owners["w0"] = "gone"
    with pytest.raises(Conflict):
        await hand.applier.apply(JOB, (pod(0), pod(1)))
    assert hand.waits_for() == {"w1"}


async def test_create_whose_answer_is_lost_is_not_waited_for_and_found_the_next_time(hand: Hand) -> None:
    hand.server.loses.add("w0")
    with pytest.raises(ConnectionFailed):
        await hand.applier.apply(JOB, (pod(0),))
    assert hand.waits_for() == set()
    assert await hand.applier.apply(JOB, (pod(0),)) == Applied()
    assert hand.server.log == ["create w0"]


async def test_refusals_are_shown_the_same_way_whichever_came_last(hand: Hand) -> None:
    """Case 16: a message that changed from pass to pass would be written to the status from pass to pass."""
    for index in (3, 1, 2):
        hand.server.refuses[f"w{index}"] = Forbidden(f"w{index}: exceeded quota")
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        applied = await hand.applier.apply(JOB, tuple(pod(i) for i in order))
        assert applied.create_refused is not None
        assert "w1: exceeded quota" in applied.create_refused
    assert hand.waits_for() == {"w0"}


async def test_error_that_may_pass_is_raised_after_the_other_creates(hand: Hand) -> None:
    hand.server.refuses["w0"] = ServerError("etcd has no leader")
    with pytest.raises(ServerError):
        await hand.applier.apply(JOB, tuple(pod(i) for i in range(3)))
    assert set(hand.server.owners) == {"w1", "w2"}
    assert hand.waits_for() == {"w1", "w2"}


@pytest.mark.parametrize("known", [None, "another-uid"])
async def test_delete_of_a_pod_that_is_gone_or_replaced_is_done_and_not_waited_for(
    hand: Hand, known: str | None
) -> None:
    if known is not None:
        hand.server.uids["old"] = known
    await hand.applier.apply(JOB, (DeletePod("old", "u", 1, ""),))
    assert hand.waits_for() == set()
    assert hand.server.uids == ({"old": known} if known else {})
