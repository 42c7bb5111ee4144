"""Carrying out a plan: order, leadership, what counts as done, and how a refusal reaches the next plan."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.contract.document import Sizes
from everstep_local.plan.simulation import agents as elastic_world
from everstep_local.plan.simulation import cluster as plan_world
from everstep_operator.api.status import Status
from everstep_operator.api.types import TrainingJobSpec
from everstep_operator.controller.apply import Applied, Applier
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
from everstep_operator.plan.actions import BeginRounds, CreatePod, CreateService, DeleteJob, DeletePod, SetSizes
from everstep_operator.plan.planner import plan
from everstep_operator.plan.snapshot import JobView
from everstep_operator.plan.stages import Stage, StageName, staged
from everstep_operator.rounds.documents import WriteRefused
from everstep_operator.runtime.expectations import Expectations
from everstep_operator.runtime.write_limit import WriteLimit

SPEC = TrainingJobSpec.model_validate({"replicas": 2, "template": {"spec": {"containers": [{"name": "worker"}]}}})
JOB = JobView("ns", "digits", "job-1", 1, "1", SPEC, Status(), datetime(2026, 1, 1, tzinfo=UTC))
KEY = ("ns", "digits")


class Server:
    """Names and their owners. `refuses` maps a name to the error that any write of it gets."""

    def __init__(self) -> None:
        self.owners: dict[str, str] = {}
        self.uids: dict[str, str] = {}
        self.refuses: dict[str, Exception] = {}
        self.loses: set[str] = set()  # carried out, and the answer lost
        self.log: list[str] = []
        self.version = "1"  # of every object
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

    async def set_sizes(self, job: JobView, sizes: Sizes, surge: int) -> None:
        if "sizes" in self.refuses:
            raise self.refuses["sizes"]
        self.log.append(f"sizes {sizes}, {surge} announced")

    async def begin_rounds(self, job: JobView, sizes: Sizes, after: int) -> None:
        if "rounds" in self.refuses:
            raise self.refuses["rounds"]
        self.log.append(f"rounds of {sizes} after {after}")

    async def get(self, resource: Any, namespace: str, name: str) -> KubeObject:
        if self.owners.get(name) in (None, "gone"):
            raise NotFound(name)
        return KubeObject(
            metadata=ObjectMeta(name=name, owner_references=(OwnerReference(uid=self.owners[name], controller=True),))
        )

    async def delete(
        self, resource: Any, namespace: str, name: str, *, uid: str, resource_version: str | None = None, **_: Any
    ) -> None:
        if name in self.refuses:
            raise self.refuses[name]
        if name not in self.uids:
            raise NotFound(name)
        if self.uids[name] != uid or resource_version not in (None, self.version):
            raise Conflict("a precondition")
        del self.uids[name]
        self.log.append(f"delete {name}")


class Hand:
    def __init__(self) -> None:
        self.server = Server()
        self.expectations: Expectations[tuple[str, str]] = Expectations()
        self.leads = True
        self.edited = False
        self.now = 0.0
        self.applier = Applier(
            self.server,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            self.expectations,
            require_leading=self.require,
            monotonic=lambda: self.now,
            set_sizes=self.server.set_sizes,
            begin_rounds=self.server.begin_rounds,
            is_superseded=lambda job: self.edited,
            limit=WriteLimit(),
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


def creating(*pods: CreatePod) -> tuple[Stage, ...]:
    return staged({StageName.CREATE: pods})


def deleting(name: str) -> DeletePod:
    return DeletePod(name, "u", 1, "")


async def test_stages_are_carried_out_one_after_the_other(hand: Hand) -> None:
    hand.server.uids["old"] = "u"
    stages = staged(
        {StageName.CREATE: (pod(0), pod(1)), StageName.CLEAR: (deleting("old"),), StageName.NETWORK: (SERVICE,)}
    )
    await hand.applier.apply(JOB, stages)
    assert hand.server.log == ["delete old", "create svc", "create w0", "create w1"]
    assert hand.waits_for() == {"w0", "w1", "u"}


async def test_sizes_that_cannot_be_told_stop_the_release_of_healthy_workers_and_nothing_else(hand: Hand) -> None:
    """One `RoundsUnavailable` stopped all pod calls of a pass."""
    hand.server.uids.update(lost="u", healthy="u")
    stages = staged(
        {
            StageName.CLEAR: (deleting("lost"),),
            StageName.CREATE: (pod(0),),
            StageName.SIZES: (SetSizes(Sizes(1, 2), "", surge=3),),
            StageName.RELEASE: (deleting("healthy"),),
        },
        {StageName.RELEASE: (StageName.SIZES,)},
    )
    hand.server.refuses["sizes"] = ServerError("etcd has no leader")
    with pytest.raises(ServerError):
        await hand.applier.apply(JOB, stages)
    assert hand.server.log == ["delete lost", "create w0"]
    hand.server.refuses.clear()
    await hand.applier.apply(JOB, stages)
    assert hand.server.log[2:] == ["sizes 1:2, 3 announced", "delete healthy"]


async def test_sizes_that_are_refused_hide_no_other_refusal_and_fail_no_pass(hand: Hand) -> None:
    """The rounds say what was refused there. A failed pass would be repeated with back-off, and forget the pod's."""
    hand.server.refuses |= {"sizes": WriteRefused("ConfigMap digits-rounds: exceeded quota"), "w0": Forbidden("no")}
    told: dict[StageName, tuple[Any, ...]] = {
        StageName.CREATE: (pod(0),),
        StageName.SIZES: (SetSizes(Sizes(1, 2), "", surge=3),),
        StageName.RELEASE: (deleting("healthy"),),
    }
    applied = await hand.applier.apply(JOB, staged(told, {StageName.RELEASE: (StageName.SIZES,)}))
    assert applied.create_refused == "no"
    assert hand.server.log == []


async def test_job_that_was_edited_since_the_plan_is_not_deleted(hand: Hand) -> None:
    """A rerun may be asked for as its time to live ends."""
    hand.server.uids[JOB.name] = JOB.uid
    stages = staged({StageName.END: (DeleteJob(JOB.uid, ""),)})
    hand.server.version = "2"
    await hand.applier.apply(JOB, stages)
    assert hand.server.log == []
    hand.server.version = JOB.resource_version
    await hand.applier.apply(JOB, stages)
    assert hand.server.log == [f"delete {JOB.name}"]


async def test_rounds_are_begun_anew_after_the_round_that_the_plan_saw_and_a_refusal_fails_no_pass(hand: Hand) -> None:
    stages = staged({StageName.SIZES: (BeginRounds(Sizes(1, 2), 7, ""),)})
    hand.server.refuses["rounds"] = WriteRefused("ConfigMap digits-rounds: exceeded quota")
    await hand.applier.apply(JOB, stages)
    assert hand.server.log == []
    hand.server.refuses.clear()
    await hand.applier.apply(JOB, stages)
    assert hand.server.log == ["rounds of 1:2 after 7"]


@pytest.mark.parametrize("error", [ServerError("etcd has no leader"), Forbidden("exceeded quota")])
async def test_service_that_cannot_be_made_stops_the_pods_that_need_it(hand: Hand, error: KubeError) -> None:
    hand.server.refuses["svc"] = error
    actions: dict[StageName, tuple[Any, ...]] = {StageName.NETWORK: (SERVICE,), StageName.CREATE: (pod(0),)}
    if isinstance(error, Forbidden):
        applied = await hand.applier.apply(JOB, staged(actions, {StageName.CREATE: (StageName.NETWORK,)}))
        assert applied.object_refused == f"Service svc: {error}"
        assert applied.create_refused is None
    else:
        with pytest.raises(ServerError):
            await hand.applier.apply(JOB, staged(actions, {StageName.CREATE: (StageName.NETWORK,)}))
    assert hand.server.log == []


async def test_of_two_errors_the_one_that_passes_sooner_decides_when_to_come_back(hand: Hand) -> None:
    hand.server.refuses["old"] = Forbidden("a policy protects this pod")
    hand.server.refuses["w0"] = ServerError("etcd has no leader")
    with pytest.raises(ServerError):
        await hand.applier.apply(JOB, staged({StageName.CLEAR: (deleting("old"),), StageName.CREATE: (pod(0), pod(1))}))
    assert hand.server.log == ["create w1"]


@settings(max_examples=60, deadline=None)
@given(
    elastic=st.booleans(),
    lost=st.sets(st.integers(0, 3)),
    replicas=st.integers(2, 6),
    fails=st.integers(0, 2**12 - 1),
    service=st.booleans(),
)
def test_toy_cluster_of_the_property_tests_fails_as_this_does(
    elastic: bool,
    lost: set[int],
    replicas: int,
    fails: int,
    service: bool,
) -> None:
    """What they find holds only if they cut plans where this cuts them."""
    world = elastic_world.ElasticWorld() if elastic else plan_world.World()
    world.spec["replicas"] = 4
    world.do_settle()
    world.do_ready(*map(str, range(4)))
    world.do_settle()
    for i in lost:
        world.do_fail(str(i), "137")
    world.spec["replicas"] = replicas
    if not service:
        world.service = None
    decided = plan(world.snapshot())
    expected: list[str] = []
    world.act = lambda action: expected.append(str(action))
    world.apply(decided, plan_world.Cut(fails=fails))

    done: list[str] = []
    hand = Hand()
    numbers = iter(range(1000))

    async def one(job: JobView, action: Any, refusals: Any) -> bool:
        if fails >> next(numbers) & 1:
            raise ServerError("no")
        done.append(str(action))
        return True

    hand.applier._carry_out = one  # type: ignore[method-assign]
    with contextlib.suppress(ServerError):
        asyncio.run(hand.applier.apply(JOB, decided.stages))
    assert sorted(done) == sorted(expected)


async def test_many_creates_run_in_parallel_up_to_a_bound(hand: Hand) -> None:
    await hand.applier.apply(JOB, creating(*(pod(i) for i in range(100))))
    assert len(hand.server.owners) == 100
    assert 1 < hand.server.most <= 24


async def test_replica_that_lost_its_lead_writes_nothing_more(hand: Hand) -> None:
    hand.leads = False
    with pytest.raises(PermissionError):
        await hand.applier.apply(JOB, staged({StageName.NETWORK: (SERVICE,), StageName.CREATE: (pod(0),)}))
    assert hand.server.log == []


async def test_pod_that_exists_already_is_taken_as_created_if_it_is_ours(hand: Hand) -> None:
    hand.server.owners["w0"] = "job-1"
    assert await hand.applier.apply(JOB, creating(pod(0), pod(1))) == Applied()


async def test_name_that_another_owner_holds_is_reported_and_not_waited_for(hand: Hand) -> None:
    """Case 8: the pod of a deleted job of the same name is not ours."""
    hand.server.owners["w0"] = "job-of-the-same-name-before"
    applied = await hand.applier.apply(JOB, creating(pod(0), pod(1)))
    assert [text.split(" has ")[0] for text in applied.collisions] == ["Pod w0"]
    assert hand.waits_for() == {"w1"}


async def test_name_that_was_just_freed_is_tried_again_soon(hand: Hand) -> None:
    hand.server.owners["w0"] = "gone"
    with pytest.raises(Conflict):
        await hand.applier.apply(JOB, creating(pod(0), pod(1)))
    assert hand.waits_for() == {"w1"}


async def test_create_whose_answer_is_lost_is_not_waited_for_and_found_the_next_time(hand: Hand) -> None:
    hand.server.loses.add("w0")
    with pytest.raises(ConnectionFailed):
        await hand.applier.apply(JOB, creating(pod(0)))
    assert hand.waits_for() == set()
    assert await hand.applier.apply(JOB, creating(pod(0))) == Applied()
    assert hand.server.log == ["create w0"]


async def test_refusals_are_shown_the_same_way_whichever_came_last(hand: Hand) -> None:
    """Case 16: a message that changed from pass to pass would be written to the status from pass to pass."""
    for index in (3, 1, 2):
        hand.server.refuses[f"w{index}"] = Forbidden(f"w{index}: exceeded quota")
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        applied = await hand.applier.apply(JOB, creating(*(pod(i) for i in order)))
        assert applied.create_refused is not None
        assert "w1: exceeded quota" in applied.create_refused
    assert hand.waits_for() == {"w0"}


async def test_error_that_may_pass_is_raised_after_the_other_creates(hand: Hand) -> None:
    hand.server.refuses["w0"] = ServerError("etcd has no leader")
    with pytest.raises(ServerError):
        await hand.applier.apply(JOB, creating(*(pod(i) for i in range(3))))
    assert set(hand.server.owners) == {"w1", "w2"}
    assert hand.waits_for() == {"w1", "w2"}


@pytest.mark.parametrize("known", [None, "another-uid"])
async def test_delete_of_a_pod_that_is_gone_or_replaced_is_done_and_not_waited_for(
    hand: Hand, known: str | None
) -> None:
    if known is not None:
        hand.server.uids["old"] = known
    await hand.applier.apply(JOB, staged({StageName.CLEAR: (deleting("old"),)}))
    assert hand.waits_for() == set()
    assert hand.server.uids == ({"old": known} if known else {})


async def test_job_that_is_edited_meanwhile_leaves_its_creates_to_the_next_plan(hand: Hand) -> None:
    create = hand.server.create

    async def edited_by_the_second(resource: Any, namespace: str, body: Any) -> None:
        hand.edited = body["metadata"]["name"] == "w1" or hand.edited
        await create(resource, namespace, body)

    hand.server.create = edited_by_the_second  # type: ignore[method-assign]
    applied = await hand.applier.apply(JOB, creating(*(pod(i) for i in range(100))))
    assert 0 < applied.left < 100
    assert len(hand.server.owners) == 100 - applied.left
    assert hand.waits_for() == set(hand.server.owners), "nothing is expected of a create that was not sent"


async def test_creates_that_take_long_leave_the_others_to_the_next_plan(hand: Hand) -> None:
    create = hand.server.create

    async def slow(resource: Any, namespace: str, body: Any) -> None:
        await create(resource, namespace, body)
        hand.now += 2.5

    hand.server.create = slow  # type: ignore[method-assign]
    applied = await hand.applier.apply(JOB, creating(*(pod(i) for i in range(100))))
    assert applied.left > 50
    assert len(hand.server.owners) == 100 - applied.left
