"""Finds the jobs whose rounds are kept here, and the callers that are agents of one."""

from __future__ import annotations

from dataclasses import dataclass

from everstep_operator.endpoint.callers import Caller, Callers
from everstep_operator.kube.wire import Unstructured
from everstep_operator.round_view import RoundView
from everstep_operator.rounds.documents import JobRef, RoundsRefused, RoundsUnavailable
from everstep_operator.rounds.presence import Worker
from everstep_operator.rounds.registry import RoundRegistry
from everstep_operator.worker_pods import has_ended, stop_was_requested

BACKEND = "everstep"  # the value of spec.rendezvous, and its default


@dataclass(frozen=True, slots=True)
class Agent:
    """The caller: a pod of a job. `stop_requested`: its processes may end because of that, and not by themselves."""

    job: JobRef
    worker: Worker
    stop_requested: bool = False


def rendezvous_backend(job: Unstructured) -> str:
    """The job's backend, read without the rest of the spec: a spec that this version does not understand must not stop
    the agents."""
    return str((job.spec.get("rendezvous") or {}).get("backend", BACKEND))


def job_ref(job: Unstructured) -> JobRef:
    return JobRef(job.metadata.namespace, job.metadata.name, job.metadata.uid)


def view_of(rounds: RoundRegistry, job: Unstructured, *, is_new: bool) -> RoundView | None:
    """The job's round; None if its rounds are not kept here, or are not known yet. `is_new`: see
    `RoundRegistry.view`."""
    return rounds.view(job_ref(job), is_new=is_new) if rendezvous_backend(job) == BACKEND else None


def answers(rounds: RoundRegistry, job: Unstructured, pod_uid: str) -> bool:
    """Whether an agent of this pod renews its presence here."""
    return rendezvous_backend(job) == BACKEND and rounds.answers(job_ref(job), pod_uid)


async def find_agent(callers: Callers, caller: Caller) -> Agent:
    """The agent that the caller is. Raises RoundsRefused, RoundsUnavailable, and the errors of `Callers.look_up`."""
    caller = await callers.look_up(caller)
    name = caller.identity.pod_name
    assert caller.pod is not None
    if has_ended(caller.pod):
        raise RoundsRefused(f"pod {name} has ended")
    if caller.job_key is None or (worker := caller.worker) is None:
        raise RoundsRefused(f"pod {name} belongs to no TrainingJob")
    if caller.job is None:
        # Retryable: the two caches show different moments, and a job that is gone takes its pods with it.
        raise RoundsUnavailable(f"pod {name}: its TrainingJob {caller.job_key[1]} is not known at the moment")
    backend = rendezvous_backend(caller.job)
    if backend != BACKEND:
        raise RoundsRefused(
            f"job {caller.job.metadata.name} has rendezvous.backend {backend}: its rounds are not kept here"
        )
    stop_requested = stop_was_requested(caller.pod)
    return Agent(job_ref(caller.job), Worker(caller.identity.pod_uid, worker.index, worker.incarnation), stop_requested)
