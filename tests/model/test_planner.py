"""The planner asks for nothing that the model's operators may not do.

The cluster model is explored with operators that follow the rules of docs/adr/0001. Here the real `plan()` is asked
about every belief that such an operator ever held, however stale, and each of its actions must keep the rules.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from everstep.contract import labels
from everstep_operator import object_names
from everstep_operator.api.status import Status, World
from everstep_operator.api.types import TrainingJobSpec
from everstep_operator.plan.actions import CreatePod, DeletePod
from everstep_operator.plan.outcome import Plan
from everstep_operator.plan.planner import plan
from everstep_operator.plan.snapshot import Exit, JobView, PodPhase, Snapshot, WorkerPod
from support.protocol.cluster import Cluster, ClusterModel, Job, Pod
from support.protocol.explorer import explore

NOW = datetime(2026, 11, 21, tzinfo=UTC)
WORKERS = 2
pytestmark = pytest.mark.timeout(600)
SPEC = TrainingJobSpec.model_validate(
    {
        "replicas": WORKERS,
        "rendezvous": {"backend": "c10d"},  # the protocol's: a round is a set of pods
        "recovery": {"maxRestarts": 1000},
        "template": {"spec": {"containers": [{"name": "worker", "image": "train", "command": ["torchrun", "t.py"]}]}},
    }
)
Belief = tuple[Job, tuple[Pod, ...]]


@pytest.fixture(scope="module")
def beliefs() -> list[Belief]:
    """What any operator ever believes: the job and the job's own pods, as its caches show them."""
    found: dict[Belief, None] = {}

    def collect(state: Cluster) -> None:
        for operator in state.operators:
            if (job := operator.job) is not None:
                own = tuple(p for p in operator.pods if p.owner == job.uid)
                uids = {p.uid: i for i, p in enumerate(own)}
                pods = tuple(p._replace(uid=uids[p.uid]) for p in own)
                found[job._replace(version=0), pods] = None
                for lost in pods:  # whichever had failed by then
                    found[job._replace(version=0), tuple(p._replace(running=p != lost) for p in pods)] = None

    explore(ClusterModel(indices=WORKERS, rounds=2, faults=0), 250_000, collect)
    return sorted(found)


def name_of(pod: Pod) -> str:
    return object_names.pod_name("digits", pod.worker, object_names.incarnation_of_round(pod.round))


def ask(job: Job, pods: tuple[Pod, ...], formed: bool) -> Plan:
    world = World(round=job.round, size=WORKERS if job.round else 0, since=NOW, formed_at=NOW if formed else None)
    return plan(
        Snapshot(
            NOW,
            JobView("ns", "digits", f"job-{job.uid}", 1, "1", SPEC, Status(world=world, start_time=NOW), NOW),
            tuple(
                WorkerPod(
                    name_of(p), f"pod-{p.uid}", p.worker, object_names.incarnation_of_round(p.round), p.round,
                    PodPhase.RUNNING if p.running else PodPhase.FAILED,
                    ready=p.running, created_at=NOW, exit=None if p.running else Exit(137, "Error", None, NOW),
                )
                for p in pods
            ),
            service_uid="s1",
        )
    )  # fmt: skip


def broken_rule(job: Job, pods: tuple[Pod, ...], wanted: Plan) -> str | None:
    round_ = wanted.status.world.round
    if wanted.publish and any(p.round > job.round for p in pods):
        return None  # the job has changed since: the compare-and-swap is refused, and no action is taken
    if round_ != job.round and not (wanted.publish and round_ == job.round + 1):
        return f"went from round {job.round} to {round_}, publish={wanted.publish}"
    for action in wanted.actions:
        match action:
            case CreatePod():
                meta = action.body["metadata"]
                if action.name != object_names.pod_name(
                    "digits", action.index, object_names.incarnation_of_round(round_)
                ):
                    return f"NAME_FROM_ROUND: {action.name} for round {round_}"
                if meta["labels"][labels.ROUND] != str(round_):
                    return f"PUBLISH_FIRST: a pod of round {meta['labels'][labels.ROUND]} while {round_} is published"
                if [o["uid"] for o in meta["ownerReferences"]] != [f"job-{job.uid}"]:
                    return f"OWNER_CHECK: {action.name} has the owners {meta['ownerReferences']}"
            case DeletePod():
                judged = next((p for p in pods if f"pod-{p.uid}" == action.uid), None)
                if judged is None or name_of(judged) != action.name:
                    return f"UID_PRECONDITION: {action} names no pod that was seen"
                if judged.round >= round_:
                    return f"DELETE_ONLY_OLDER: {action} of round {judged.round}, published is {round_}"
            case _:
                return f"no rule speaks of {action}"
    return None


@pytest.mark.parametrize("formed", [False, True])
def test_planner_in_every_belief_of_an_operator_keeps_the_rules(beliefs: list[Belief], formed: bool) -> None:
    print(f"{len(beliefs)} beliefs")
    assert len(beliefs) > 100
    broken = {belief: wrong for belief in beliefs if (wrong := broken_rule(*belief, ask(*belief, formed))) is not None}
    examples = "\n".join(f"{belief}: {wrong}" for belief, wrong in list(broken.items())[:5])
    assert not broken, f"{len(broken)} of {len(beliefs)} beliefs:\n{examples}"
