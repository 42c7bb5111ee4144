"""Carries out the stages of a plan, in the order and with the dependencies that the plan says, and nothing else.

Every write is preceded by a check that this replica still leads, and waits for its turn among the writes of all jobs
(`runtime.write_limit`). Creates run in parallel up to a bound. No create begins once the job was edited or some seconds
have passed, because a slow API server must not keep a job from its next plan: the rest is left to that plan. An object
that exists already is taken as created if it is ours by UID, else it is reported as a collision. A refused create
(quota, admission) is kept as a reason for the next plan, since it is a state of the job and not an error of the
operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, assert_never

from everstep.contract import labels
from everstep.contract.document import Sizes
from everstep_operator import object_names
from everstep_operator.errors import TerminalError
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    KubeError,
    NotFound,
    Operation,
    Rejected,
)
from everstep_operator.kube.resources import (
    CLAIMS,
    NETWORK_POLICIES,
    PDBS,
    POD_GROUPS,
    PODS,
    SERVICES,
    WORKLOADS,
    Resource,
)
from everstep_operator.kube.wire import KubeObject, Unstructured, controller_of, controller_uid
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
from everstep_operator.plan.snapshot import JobView
from everstep_operator.plan.stages import Stage, StageName
from everstep_operator.rounds.documents import WriteRefused
from everstep_operator.runtime.expectations import Expectations
from everstep_operator.runtime.fair_queueing import Flow
from everstep_operator.runtime.parallel import Raised, Returned, run_bounded
from everstep_operator.runtime.write_limit import LimitedCallOutcome, NotBegun, WriteLane, WriteLimit
from everstep_operator.worker_pods import Key

T = TypeVar("T", bound=KubeObject)
_KINDS: Mapping[type, Resource[Any]] = {
    CreatePod: PODS, DeletePod: PODS,
    CreateService: SERVICES, DeleteService: SERVICES,
    CreateDisruptionBudget: PDBS, DeleteDisruptionBudget: PDBS,
    CreateNetworkPolicy: NETWORK_POLICIES, DeleteNetworkPolicy: NETWORK_POLICIES,
    CreateWorkload: WORKLOADS,
}  # fmt: skip
_OBJECTS = (StageName.NETWORK, StageName.GUARD, StageName.GANG)  # stages of objects beside the pods
CREATE_SECONDS = 2.0  # no create of a pass begins later: a create may take seconds, and a job may have thousands


@dataclass(frozen=True, slots=True)
class Applied:
    """What the API server refused, for the next plan. Retryable errors are raised instead."""

    collisions: tuple[str, ...] = ()  # sentences, as `object_names.name_collision` writes them
    create_refused: str | None = None  # of a pod
    object_refused: str | None = None  # of another object, with its kind and name
    left: int = 0  # actions that did not begin, because the next plan should decide about them
    # Resource versions of Workloads that were written, by their names: an older one must not be planned from.
    workloads: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(slots=True)
class _Refusals:
    collisions: list[str] = field(default_factory=list)
    pods: dict[str, str] = field(default_factory=dict)  # the server's words by object name
    objects: dict[str, str] = field(default_factory=dict)  # the same of other objects, by kind and name
    workloads: dict[str, str] = field(default_factory=dict)  # see `Applied`


class Applier:
    """`require_leading` raises when this replica may not write; `monotonic` is the clock of the expectations;
    `set_sizes` sets the sizes of a job's rounds, `begin_rounds` begins closed ones anew; `is_superseded`: whether a
    newer spec of the job is known."""

    def __init__(
        self,
        client: KubeClient,
        jobs: Resource[Unstructured],
        expectations: Expectations[Key],
        *,
        require_leading: Callable[[], object],
        monotonic: Callable[[], float],
        set_sizes: Callable[[JobView, Sizes, int], Awaitable[None]],
        begin_rounds: Callable[[JobView, Sizes, int], Awaitable[None]],
        is_superseded: Callable[[JobView], bool],
        limit: WriteLimit,
    ) -> None:
        self._client = client
        self._jobs = jobs
        self._expectations = expectations
        self._require_leading = require_leading
        self._monotonic = monotonic
        self._set_sizes, self._begin_rounds = set_sizes, begin_rounds
        self._is_superseded = is_superseded
        self._limit = limit

    async def apply(self, job: JobView, stages: tuple[Stage, ...]) -> Applied:
        """Carry out `stages`. Raises an error after all allowed attempts; of several errors, a short-lived one first.

        Raises at once if this replica no longer leads.
        """
        refusals = _Refusals()
        failed: set[StageName] = set()
        errors: list[Exception] = []
        left = 0
        for stage in stages:
            if not stage.may_begin(failed):
                failed.add(stage.name)
                continue
            self._require_leading()
            for outcome in await self._run(job, stage, refusals):
                match outcome:
                    case Returned(True):
                        continue
                    case Raised(error):
                        errors.append(error)
                    case NotBegun():
                        left += 1
                failed.add(stage.name)
        if errors:
            self._require_leading()
            raise min(errors, key=lambda error: isinstance(error, TerminalError))
        # Creates run in parallel: which of several refusals is shown must not depend on their order.
        pod, other = min(refusals.pods, default=None), min(refusals.objects, default=None)
        return Applied(
            tuple(sorted(refusals.collisions)),
            None if pod is None else refusals.pods[pod],
            None if other is None else f"{other}: {refusals.objects[other]}",
            left,
            refusals.workloads,
        )

    async def _run(self, job: JobView, stage: Stage, refusals: _Refusals) -> Sequence[LimitedCallOutcome[bool]]:
        calls = [partial(self._carry_out, job, action, refusals) for action in stage.actions]
        match stage.name:
            case StageName.SIZES:  # a write of the round store, which has connections of its own
                return await run_bounded(calls, 1)
            case StageName.CREATE:
                # The first creates of a pass may wait for their turn as long as it takes: else a job whose turn is
                # late would ask for one again and again.
                ends: list[float] = []

                def stop() -> bool:
                    return self._is_superseded(job) or (bool(ends) and self._monotonic() > ends[0])

                async def begun(call: Callable[[], Awaitable[bool]]) -> bool:
                    if not ends:
                        ends.append(self._monotonic() + CREATE_SECONDS)
                    return await call()

                return await self._limit.run(
                    WriteLane.CREATE, _flow(job), [partial(begun, call) for call in calls], stop=stop
                )
            case name:
                lane = (
                    WriteLane.CREATE
                    if name in (StageName.NETWORK, StageName.GUARD, StageName.GANG)
                    else WriteLane.CHANGE
                )
                return await self._limit.run(lane, _flow(job), calls, stop=lambda: False)

    async def _carry_out(self, job: JobView, action: Action, refusals: _Refusals) -> bool:
        """Whether the action's goal is reached now; False if the API server refused it."""
        self._require_leading()
        match action:
            case CreatePod() | CreateWorkload():
                return await self._create_expected(_KINDS[type(action)], job, action, refusals)
            case CreateService() | CreateDisruptionBudget() | CreateNetworkPolicy():
                return await self._create(_KINDS[type(action)], job, action.name, action.body, refusals)
            case DeletePod(name, uid, grace):
                await self._delete_expected(PODS, job, name, uid, grace=grace)
            case DeleteWorkload(name, uid, version):
                await self._delete_expected(WORKLOADS, job, name, uid, version=version)
            case DeleteService() | DeleteDisruptionBudget() | DeleteNetworkPolicy():
                await self._delete(_KINDS[type(action)], job, action.name, action.uid)
            case PatchWorkload() | ReturnQuota() | ReclaimPods() | SetPodsReady() | FinishWorkload():
                return await self._patch_workload(job, action, refusals)
            case CreatePodGroup() | PatchPodGroup() | DeletePodGroup():
                return await self._write_pod_group(job, action, refusals)
            case DeleteJob():
                # A rerun that somebody asks for in this moment must not be lost with the job.
                await self._delete(self._jobs, job, job.name, action.uid, version=job.resource_version)
            case SetSizes():
                return await _unless_refused(self._set_sizes(job, action.sizes, action.surge))
            case BeginRounds():
                return await _unless_refused(self._begin_rounds(job, action.sizes, action.after))
            case other:
                assert_never(other)
        return True

    async def _create_expected(
        self, resource: Resource[T], job: JobView, action: CreatePod | CreateWorkload, refusals: _Refusals
    ) -> bool:
        """Create an object without which no other plan is made: a pod, after its volume claims, or the Workload that
        charges pods."""
        for claim in action.claims if isinstance(action, CreatePod) else ():
            if not await self._create_claim(job, claim, refusals):
                return False
        key, name = (job.namespace, job.name), action.name
        self._expectations.expect(key, creations=[name], now=self._monotonic())
        try:
            created = await self._create(resource, job, name, action.body, refusals)
        except KubeError:
            # It may exist nevertheless, if the response was lost: the next create of this name shows it.
            self._expectations.cancel_creation(key, name)
            raise
        if not created:
            self._expectations.cancel_creation(key, name)
        return created

    async def _create_claim(self, job: JobView, body: dict[str, Any], refusals: _Refusals) -> bool:
        """One that is there already is used, also if a person made it: it holds what an earlier worker of this index
        kept. Not another job's, which may have the same name (template a-b of job c, and a of b-c), nor one that is
        being deleted, which goes with the last pod that has it."""
        name = body["metadata"]["name"]
        try:
            await self._client.create(CLAIMS, job.namespace, body)
            return True
        except (AlreadyExists, Forbidden, Invalid, Rejected) as e:
            problem = str(e)[:500]
        # A quota that is used up refuses a claim before the API server sees that it is there.
        with contextlib.suppress(NotFound, Forbidden):
            there = await self._client.get(CLAIMS, job.namespace, name)
            owner = there.metadata.labels.get(labels.JOB, job.name)
            if owner == job.name and there.metadata.deletion_timestamp is None:
                return True
            if owner == job.name:
                problem = "the one that is there is being deleted, and has to be gone first"
            else:
                problem = f"it is TrainingJob {owner}'s: give a template of one of the two jobs another name"
        refusals.objects[f"{CLAIMS.kind} {name}"] = problem
        return False

    async def _write_pod_group(
        self, job: JobView, action: CreatePodGroup | PatchPodGroup | DeletePodGroup, refusals: _Refusals
    ) -> bool:
        kind = POD_GROUPS[action.scheduler]
        match action:
            case CreatePodGroup():
                try:
                    return await self._create(kind, job, action.name, action.body, refusals)
                except NotFound:
                    problem = f"this cluster does not serve {kind.api_version}, which comes with {action.scheduler}"
                    refusals.objects[f"{kind.kind} {action.name}"] = problem
                    return False
            case PatchPodGroup():
                body = {"metadata": {"uid": action.uid}, "spec": action.spec}
                try:
                    await self._client.merge_patch(kind, job.namespace, action.name, body)
                except (Forbidden, Invalid, Rejected) as e:
                    refusals.objects[f"{kind.kind} {action.name}"] = str(e)[:500]
                    return False
            case DeletePodGroup():
                await self._delete(kind, job, action.name, action.uid)
        return True

    async def _patch_workload(
        self,
        job: JobView,
        action: PatchWorkload | ReturnQuota | ReclaimPods | SetPodsReady | FinishWorkload,
        refusals: _Refusals,
    ) -> bool:
        """Whether the Workload was as the plan saw it, and is as the plan wants it now. One that has changed comes into
        the cache, and to another plan."""
        name, version = action.name, action.version
        try:
            if isinstance(action, PatchWorkload):
                made = await self._client.merge_patch(
                    WORKLOADS, job.namespace, name, action.body, resource_version=version
                )
            else:
                made = await self._client.patch_status(
                    WORKLOADS, job.namespace, name, action.status, resource_version=version
                )
        except (Conflict, NotFound):
            return False
        except (Forbidden, Invalid, Rejected) as e:
            refusals.objects[f"{WORKLOADS.kind} {name}"] = str(e)[:500]
            return False
        refusals.workloads[name] = made.metadata.resource_version
        return True

    async def _create(
        self, resource: Resource[T], job: JobView, name: str, body: dict[str, object], refusals: _Refusals
    ) -> bool:
        """Whether an object of this job has the name now, so that its event will come or has come."""
        try:
            await self._client.create(resource, job.namespace, body)
        except AlreadyExists:
            try:
                existing = await self._client.get(resource, job.namespace, name)
            except NotFound as e:
                raise Conflict(
                    f"{name} was taken and is free again",
                    operation=Operation("create", resource.plural, job.namespace, name),
                ) from e
            if controller_uid(existing.metadata) != job.uid:
                whose, ends = controller_of(existing.metadata), existing.metadata.deletion_timestamp
                refusals.collisions.append(
                    object_names.name_collision(resource.kind, name, job.namespace, job.name, whose, ends)
                )
                return False
        except (Forbidden, Invalid, Rejected) as e:
            if resource is PODS:
                refusals.pods[name] = str(e)[:500]
            else:
                refusals.objects[f"{resource.kind} {name}"] = str(e)[:500]
            return False
        return True

    async def _delete_expected(
        self,
        resource: Resource[T],
        job: JobView,
        name: str,
        uid: str,
        grace: int | None = None,
        version: str | None = None,
    ) -> None:
        key = (job.namespace, job.name)
        self._expectations.expect(key, deletions=[uid], now=self._monotonic())
        try:
            if not await self._delete(resource, job, name, uid, grace, version):
                self._expectations.cancel_deletion(key, uid)
        except KubeError:
            self._expectations.cancel_deletion(key, uid)
            raise

    async def _delete(
        self,
        resource: Resource[T],
        job: JobView,
        name: str,
        uid: str | None,
        grace: int | None = None,
        version: str | None = None,
    ) -> bool:
        """Whether a deletion was begun; False when that object is gone, or another has its name."""
        try:
            await self._client.delete(
                resource,
                job.namespace,
                name,
                uid=uid,
                resource_version=version,
                grace_seconds=grace,
                propagation="Background",
            )
        except NotFound:
            return False
        except Conflict:
            return False  # the name belongs to a successor, or the job was edited: the next plan sees that
        return True


async def _unless_refused(write: Awaitable[None]) -> bool:
    """Whether the round store's document could be written. The next plan reads a refusal from the rounds, at the time
    of the retry of other refusals."""
    try:
        await write
    except WriteRefused:
        return False
    return True


def _flow(job: JobView) -> Flow:
    return Flow(job.namespace, job.name)
