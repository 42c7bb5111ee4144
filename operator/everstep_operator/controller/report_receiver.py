"""Takes progress reports: finds the job and round of each, and whether a pass over the job is needed."""

from __future__ import annotations

from everstep.contract.messages import Report
from everstep_operator.controller.reconcile import Reconciler
from everstep_operator.endpoint.callers import Caller
from everstep_operator.endpoint.report_endpoint import ReportRefused
from everstep_operator.kube.wire import Unstructured
from everstep_operator.rounds.agent_lookup import BACKEND, job_ref, rendezvous_backend
from everstep_operator.rounds.documents import published_round
from everstep_operator.rounds.registry import RoundRegistry
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.queue import WorkQueue
from everstep_operator.worker_pods import Key

# Progress is written every few seconds at most, so a report that changes only figures can wait that long.
_FIGURES_DELAY = 2.0


class ReportReceiver:
    def __init__(self, reconciler: Reconciler, queue: WorkQueue[Key], clock: Clock, rounds: RoundRegistry) -> None:
        self._reconciler, self._queue, self._clock, self._rounds = reconciler, queue, clock, rounds

    def accept(self, caller: Caller, report: Report) -> None:
        """Take a report from a pod of a job that exists; raises ReportRefused from any other."""
        name, job, worker = caller.identity.pod_name, caller.job, caller.worker
        if caller.pod is None:
            raise ReportRefused(f"pod {name} is not known as a worker, or was replaced")
        if job is None or worker is None:
            raise ReportRefused(f"pod {name} belongs to no TrainingJob")
        # A pod whose agent joins rounds has no round of its own; each of its reports names the round.
        if worker.round is not None and report.round != worker.round:
            raise ReportRefused(f"pod {name} is of round {worker.round}, not {report.round}")
        newest = self._newest_round(job) if worker.round is None else worker.round
        if newest is not None and report.round > newest:
            raise ReportRefused(f"round {report.round} has not begun: the newest of {job.metadata.name} is {newest}")
        claimant = caller.identity.pod_uid if newest is None else None
        if self._reconciler.progress_of(job).accept(report, self._clock.now(), claimant):
            self._queue.add(job.key)
        else:
            self._queue.add_after(job.key, _FIGURES_DELAY)

    def _newest_round(self, job: Unstructured) -> int | None:
        """The newest round; no worker can be ahead of it. None: only the agents know their rounds."""
        if rendezvous_backend(job) != BACKEND:
            return None
        view = self._rounds.view(job_ref(job))
        # A leader that has just begun may not have read the document yet. The status has the number before any agent
        # learns of it.
        return view.round if view is not None else published_round(job)
