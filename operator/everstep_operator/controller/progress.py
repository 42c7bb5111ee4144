"""Combines the reports of one job's workers into the few facts that a plan needs.

The facts are kept in memory only. An operator that restarts begins empty. Every process that starts reports
within a second, and rank 0 with its next step. Correctness does not depend on these facts; people read
them. Invariant: reports of an earlier round never change the facts of a later one, except the commit from which it
begins.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from everstep.contract.messages import Phase, Report
from everstep_operator.api.base import SAFE_INT_MAX
from everstep_operator.api.status import Status
from everstep_operator.controller.job_seconds import JobSeconds, State
from everstep_operator.plan.snapshot import ReportedPeak, ReportedProgress

MAX_RANKS = 65_536
# If only one pod has reported a round, then after this time another pod that still reports an older one is believed.
DOUBTED = timedelta(seconds=30)


class JobProgress:
    """Combines reports. `now` is the operator's clock; the workers' clocks are never compared with it."""

    def __init__(self, status: Status, now: datetime) -> None:
        """Start from what the status remembers, so that a restart neither recounts steps nor forgets goodput."""
        self._step = status.progress.step
        self._skipped = status.checkpoint.skipped_saves
        stored, active = status.state_seconds, status.active_seconds(now)
        # An older operator kept no seconds: nobody knows what the job did under it.
        known = {State.UNKNOWN: active} if stored is None else {state: float(getattr(stored, state)) for state in State}
        self.seconds = JobSeconds(known, active, now)
        self._last: Report | None = None
        self._stepped_at = status.progress.stepped_at
        self._updated_at: datetime | None = None
        self._committed_step: int | None = None
        self._committed_at: datetime | None = None
        self._error: str | None = None
        self._damaged: str | None = None
        self._step_seconds: float | None = None
        self._lost_at: datetime | None = None
        # If the agents form the rounds, the first report names the present one, if it can (stock torchrun's cannot).
        self._open_round(status.world.round if status.roster is None else 0, None)

    def _open_round(self, round_: int, published_at: datetime | None) -> None:
        self._round, self._step_before = round_, self._step
        self._seen_to_begin = published_at is not None  # if not, an operator before this one may have seen it
        self._claimed_by: set[str] = set()
        self._claimed_at: datetime | None = None
        self._started: set[int] = set()
        self._restored: set[int] = set()
        self._stepped: set[int] = set()
        self._world_size = 0
        self._started_at: datetime | None = None
        self._restored_at: datetime | None = None
        self._restored_step: int | None = None
        self._round_step: int | None = None  # the last one of rank 0
        self._resumed_step: int | None = None
        self._restore_seconds: float | None = None
        self._trained_at: datetime | None = None
        self._straggler: str | None = None
        self._straggler_rank: int | None = None
        self._rehearsed: str | None = None
        self._first_step_at: datetime | None = None
        self._new_step_at: datetime | None = None
        self._peak: ReportedPeak | None = None

    def published(self, round_: int, now: datetime) -> None:
        """This operator has just published `round_`."""
        if round_ > self._round:
            self._open_round(round_, now)

    def lost(self, at: datetime) -> None:
        """A loss was noticed, in a job whose agents form the rounds; the recovery began then."""
        self._lost_at = at

    def accept(self, report: Report, now: datetime, claimant: str | None = None) -> bool:
        """Take one report; whether it changed a fact on which a plan should act at once.

        `claimant`: the reporting pod, if nothing but its report shows that its round exists.
        """
        if report.rank >= MAX_RANKS:
            return False
        if report.round < self._round and not self._is_doubted(claimant, now):
            return self._late(report, now)
        if report.round != self._round:
            # Formed by the agents, or published by a leader whose status write has not reached this cache yet.
            followed = self._updated_at is not None
            self._open_round(report.round, None)
            if followed:
                self.seconds.new_round()
            self._seen_to_begin = followed
        if claimant is not None and len(self._claimed_by) < MAX_RANKS:
            self._claimed_at = self._claimed_at or now
            self._claimed_by.add(claimant)
        self._updated_at = now
        self._world_size = max(1, report.world_size)
        healed = self._committed(report)
        self._remembers(report)
        match report.phase:
            case Phase.START:
                return self._start(report, now)
            case Phase.RESTORE:
                return self._restore(report, now)
            case Phase.TRAIN | Phase.DONE:
                return self._train(report, now) or healed
            case Phase.SAVE:
                return healed
            case Phase.SAVE_SKIPPED:
                self._skipped += 1
                return healed
            case Phase.SAVE_FAILED:
                changed = self._error is None
                self._error = report.checkpoint_error or "the worker gave no reason"
                return changed

    def _is_doubted(self, claimant: str | None, now: datetime) -> bool:
        """Whether the newest round may be a false claim: a pod with an absurd number must not silence all others."""
        if claimant is None or self._claimed_at is None or claimant in self._claimed_by:
            return False
        return len(self._claimed_by) == 1 and now - self._claimed_at >= DOUBTED

    def _late(self, report: Report, now: datetime) -> bool:
        """Take a commit from a report of an older round. A worker that stops commits its last step after the round that
        stops it was published, and for a suspended job people want to see that commit. Once processes of the newer
        round have reported, their reports count instead."""
        has_reported = self._started or self._restored or self._stepped
        if has_reported or report.committed_step is None or report.committed_step <= (self._committed_step or 0):
            return False
        self._committed(report)
        if report.committed_step > (self._step or 0):
            self._step, self._stepped_at = report.committed_step, now
        return True

    def _start(self, report: Report, now: datetime) -> bool:
        self._seen_to_begin = True
        self.seconds.started()
        self._started.add(report.rank)
        if self._started_at is None and len(self._started) >= self._world_size:
            self._started_at = now
        return False

    def _restore(self, report: Report, now: datetime) -> bool:
        self._restored.add(report.rank)
        self._restored_step = report.restored_step
        self._restore_seconds = max(self._restore_seconds or 0.0, report.restore_seconds or 0.0)
        if self._restored_at is None and len(self._restored) >= self._world_size:
            self._restored_at = now
            self.seconds.restored(now, self._restore_seconds)
        if report.checkpoint_error is None or self._damaged is not None:
            return False
        self._damaged = report.checkpoint_error  # the newest commit was skipped
        return True

    def _train(self, report: Report, now: datetime) -> bool:
        first = self._trained_at is None
        self._trained_at = self._trained_at or now
        if report.step and report.rank not in self._stepped and self._seen_to_begin:
            # Late reports come from ranks that have gone on meanwhile, so the round began at the lowest step.
            before = SAFE_INT_MAX if self._resumed_step is None else self._resumed_step
            self._resumed_step = min(report.step - 1, before)
        self._stepped.add(report.rank)
        complete = self._first_step_at is None and len(self._stepped) >= self._world_size
        if complete:
            self._first_step_at = now
            # A script without a checkpointer never restores: its training begins when its processes do.
            self._restored_at = self._restored_at or self._started_at or self._trained_at
        slow = False
        if report.rank == 0:
            self._progress(report, now)
            slow, self._straggler = report.straggler != self._straggler, report.straggler
            self._straggler_rank = report.straggler_rank
            self._rehearsed = report.rehearsed
        return first or complete or slow or report.phase is Phase.DONE

    def _progress(self, report: Report, now: datetime) -> None:
        # A job that goes on from the checkpoints of another one has not taken their steps.
        before = (self._restored_step or 0) if self._step is None else self._step
        if report.step is not None:
            since = self._round_step if self._round_step is not None else self._restored_step
            since = report.step - 1 if since is None else since
            self._round_step = report.step
            self.seconds.trained(now, max(0, report.step - since), max(0, report.step - max(since, before)))
        if report.step is not None and report.step > before:
            self._step, self._stepped_at = report.step, now
            self._new_step_at = self._new_step_at or now
        self._last = report
        self._step_seconds = report.step_seconds or self._step_seconds

    def _remembers(self, report: Report) -> None:
        """Keep the greatest of the ranks' peaks; of one process it never falls."""
        if report.peak_memory is None:
            return
        peak = self._peak or ReportedPeak(report.peak_memory, report.rank)
        if report.peak_memory > peak.host:
            peak = replace(peak, host=report.peak_memory, rank=report.rank)
        if report.peak_device_memory is not None and report.peak_device_memory > (peak.device or -1):
            peak = replace(peak, device=report.peak_device_memory, device_rank=report.rank)
        self._peak = peak

    def _committed(self, report: Report) -> bool:
        """Take the newest commit from a report; any report may have it. Whether it ends a time without a good one."""
        if report.committed_step is None or report.committed_step == self._committed_step:
            return False
        healed = self._error is not None or self._damaged is not None
        self._error = self._damaged = None
        self._committed_step = report.committed_step
        if report.committed_at is not None:
            self._committed_at = datetime.fromtimestamp(min(report.committed_at, 4e9), UTC)
        return healed

    @property
    def round(self) -> int:
        """The round of the newest reports."""
        return self._round

    @property
    def lost_at(self) -> datetime | None:
        """When this operator noticed the last loss; None if it has noticed none."""
        return self._lost_at

    @property
    def new_step_at(self) -> datetime | None:
        """When the first step was reported in this round that had not been taken before."""
        return self._new_step_at

    @property
    def peak_memory(self) -> ReportedPeak | None:
        """The greatest peak that a rank of the present round has reported."""
        return self._peak

    def snapshot(self) -> ReportedProgress:
        last = self._last
        return ReportedProgress(
            round=self._round,
            step=self._step,
            total_steps=last.total_steps if last is not None else None,
            epoch=last.epoch if last is not None else None,
            step_seconds=self._step_seconds,
            metrics=dict(last.metrics) if last is not None else {},
            stepped_at=self._stepped_at,
            updated_at=self._updated_at,
            committed_step=self._committed_step,
            committed_at=self._committed_at,
            skipped_saves=self._skipped,
            checkpoint_error=self._error,
            checkpoint_damaged=self._damaged,
            straggler=self._straggler,
            straggler_rank=self._straggler_rank,
            rehearsed=self._rehearsed,
            memory=self._peak,
            productive_seconds=self.seconds.productive,
            lost_at=self._lost_at,
            started_at=self._started_at,
            restored_at=self._restored_at,
            restored_step=self._restored_step,
            step_before=self._step_before,
            resumed_step=self._resumed_step,
            restore_seconds=self._restore_seconds,
            trained_at=self._trained_at,
            first_step_at=self._first_step_at,
        )
