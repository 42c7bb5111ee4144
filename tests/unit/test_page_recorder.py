"""What a replica keeps of each job for the page's timeline, from its caches alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.contract import labels
from everstep.jobs.history import READY, PodSeen, StatusSeen, StepSeen
from everstep.jobs.timeline import State, build
from everstep_operator.kube.wire import (
    Condition,
    ContainerRunning,
    ContainerState,
    ContainerStatus,
    ObjectMeta,
    OwnerReference,
    Pod,
    PodSpec,
    PodStatus,
    Unstructured,
)
from everstep_operator.page import recorder
from everstep_operator.page.recorder import Recorder
from everstep_operator.runtime.cache import Added, Deleted, Updated

BEGAN = datetime(2026, 11, 30, tzinfo=UTC)


class Informers:
    """The caches of jobs and pods, whose content a test changes."""

    def __init__(self) -> None:
        self.now = BEGAN
        self.known: list[Pod] = []
        self.handlers: dict[str, Callable[[Any], None]] = {}
        pods = SimpleNamespace(
            add_handler=lambda handler: self.handlers.setdefault("pods", handler),
            by_index=lambda _, uid: [p for p in self.known if p.metadata.owner_references[0].uid == uid],
        )
        jobs = SimpleNamespace(add_handler=lambda handler: self.handlers.setdefault("jobs", handler))
        self.recorder = Recorder(SimpleNamespace(jobs=jobs, pods=pods), lambda: self.now)  # type: ignore[arg-type]

    def job(self, uid: str = "u", namespace: str = "ns", **status: Any) -> None:
        ready = [{"type": "Ready", "reason": status.pop("reason", "Running")}]
        meta = ObjectMeta(name=uid, namespace=namespace, uid=uid, creation_timestamp=BEGAN)
        job = Unstructured(metadata=meta, status={"conditions": ready, **status})
        self.handlers["jobs"](Updated(job, job))

    def pod(self, pod: Pod) -> None:
        self.known = [*(p for p in self.known if p.key != pod.key), pod]
        self.handlers["pods"](Added(pod))

    def history(self, uid: str = "u") -> list[Any]:
        return self.recorder.history(uid, BEGAN)


def pod(worker: int, *, seconds: float, ready: float | None = None, namespace: str = "ns", uid: str = "u") -> Pod:
    running = ContainerStatus(name="worker", ready=True, state=ContainerState(running=ContainerRunning()))
    since = None if ready is None else BEGAN + timedelta(seconds=ready)
    condition = Condition(type="Ready", status="True" if ready is not None else "False", last_transition_time=since)
    return Pod(
        metadata=ObjectMeta(
            name=f"j-w{worker}-0", namespace=namespace, uid=f"pod-{worker}",
            labels={labels.WORKER_INDEX: str(worker), labels.INCARNATION: "0", labels.JOB_UID: uid},
            owner_references=(OwnerReference(kind="TrainingJob", uid=uid, controller=True),),
            creation_timestamp=BEGAN + timedelta(seconds=seconds),
        ),
        spec=PodSpec(node_name="n1"),
        status=PodStatus(phase="Running", conditions=(condition,), container_statuses=(running,)),
    )  # fmt: skip


def test_pods_of_before_have_their_own_times_and_train_from_when_they_were_ready() -> None:
    informers = Informers()
    informers.known = [pod(0, seconds=2, ready=9), pod(1, seconds=3)]
    informers.now = BEGAN + timedelta(seconds=60)
    informers.job(world={"round": 1, "size": 2}, progress={"step": 7, "metrics": {"loss": "0.5"}})
    informers.now = BEGAN + timedelta(seconds=70)
    informers.handlers["pods"](Deleted(informers.known[1]))
    history = informers.history()
    assert [(e.at, e.phase) for e in history if isinstance(e, PodSeen)] == [
        (2.0, "Pending"), (3.0, "Pending"), (9.0, READY), (70.0, "Deleted"),
    ]  # fmt: skip
    timeline = build(history)
    assert [(s.begin, s.end, s.state) for s in timeline.lanes[0]] == [(2, 9, State.STARTING), (9, 70, State.TRAINING)]
    assert timeline.lanes[1][0].ended == "Deleted"
    assert (timeline.world, timeline.loss) == (((60.0, 2),), ((60.0, 7, 0.5),))


def test_what_repeats_is_kept_once_and_odd_losses_are_left_out() -> None:
    informers = Informers()
    for loss in ("1.0", "1.0", "nan", "inf", "high", ""):
        informers.job(progress={"step": 3, "metrics": {"loss": loss}})
    for step in (4, 5):
        informers.job(progress={"step": step, "metrics": {"loss": "high" if step == 4 else "nan"}})
    steps = [(e.step, e.loss) for e in informers.history() if isinstance(e, StepSeen)]
    assert steps == [(3, 1.0), (4, None), (5, None)]
    assert len([e for e in informers.history() if isinstance(e, StatusSeen)]) == 1


def test_pod_of_another_namespace_is_in_no_timeline_though_it_names_the_job_as_its_owner() -> None:
    informers = Informers()
    informers.job()
    informers.pod(pod(0, seconds=1, namespace="evil"))
    informers.pod(pod(1, seconds=1, uid="nobodys"))
    assert not [e for e in informers.history() if isinstance(e, PodSeen)]
    informers.pod(pod(0, seconds=1))
    assert [e.pod for e in informers.history() if isinstance(e, PodSeen)] == ["j-w0-0"]


def test_jobs_and_entries_have_a_bound_and_steps_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "JOBS", 3)
    monkeypatch.setattr(recorder, "ENTRIES", 40)
    informers = Informers()
    informers.known = [pod(0, seconds=0, ready=1)]
    for number in range(500):
        informers.now = BEGAN + timedelta(seconds=number)
        informers.job(progress={"step": number})
    history = informers.history()
    assert len(history) <= 40
    assert [e.phase for e in history if isinstance(e, PodSeen)] == ["Pending", READY], "lanes stay"
    assert [e.step for e in history if isinstance(e, StepSeen)][-1] == 499
    for number in range(500):
        informers.job(reason=f"r{number}")
    assert len(informers.history()) <= 40
    for number in range(5):
        informers.job(f"job-{number}")
    assert informers.history() == [], "the job that changed longest ago"
    gone = Unstructured(metadata=ObjectMeta(uid="job-4"))
    informers.handlers["jobs"](Deleted(gone))
    assert informers.history("job-4") == []
