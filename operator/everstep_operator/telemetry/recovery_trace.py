"""A recovery as the spans of one trace, made from what the status records of it.

Pure: it knows no library that sends spans (`otlp` does). Invariant: a stage lasts as long as `status.recoveries` says,
to the millisecond, and begins where the stage before ends. Only the replay is not in the status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from everstep_operator.api.status import RecoveryRecord


class Outcome(StrEnum):
    """How a recovery ended."""

    RECOVERED = "recovered"
    LOST_AGAIN = "lost-again"  # another incident began before its first step
    SUSPENDED = "suspended"
    COMPLETE = "complete"  # the job was done before all of its ranks had reported a step
    FAILED = "failed"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class RecoveryTrace:
    """`recovery` contains `stages`, which are in the order of time. `attributes` are those of `recovery`."""

    recovery: Span
    stages: tuple[Span, ...]
    attributes: Mapping[str, str | int]
    outcome: Outcome


@dataclass(slots=True)
class Incident:
    """A loss, and what is known of its recovery."""

    namespace: str
    job: str
    uid: str
    noticed_at: datetime  # to the microsecond if this replica has noticed it; the record has whole seconds
    record: RecoveryRecord
    round: int = 0  # in which the training went on
    sent: bool = False

    @property
    def recovered(self) -> bool:
        """Whether all ranks have taken a step since."""
        return self.record.first_step_ms is not None

    def trace(self, ended_at: datetime, otherwise: Outcome) -> RecoveryTrace:
        """The trace of an incident that is over. `ended_at`: when the first new step was reported, or what came before
        one. `otherwise`: its outcome if the job has not recovered."""
        stages = self._stages(ended_at)
        start = stages[0].start if stages else self.noticed_at
        end = stages[-1].end if self.recovered else max(ended_at, self.noticed_at)
        outcome = Outcome.RECOVERED if self.recovered else otherwise
        return RecoveryTrace(Span("recovery", start, end), stages, self._attributes(outcome), outcome)

    def _stages(self, ended_at: datetime) -> tuple[Span, ...]:
        record, stages = self.record, []
        if record.detect_ms is not None:
            stages.append(Span("detect", self.noticed_at - timedelta(milliseconds=record.detect_ms), self.noticed_at))
        at = self.noticed_at
        lasted = {"form": record.rendezvous_ms, "restore": record.restore_ms, "first-step": record.first_step_ms}
        for name, milliseconds in lasted.items():
            if milliseconds is not None:
                stages.append(Span(name, at, at := at + timedelta(milliseconds=milliseconds)))
        if self.recovered and record.lost_steps and ended_at > at:
            stages.append(Span("replay", at, ended_at))
        return tuple(stages)

    def _attributes(self, outcome: Outcome) -> dict[str, str | int]:
        record = self.record
        known = {
            "k8s.namespace.name": self.namespace,
            "k8s.node.name": record.node,
            "everstep.job.name": self.job,
            "everstep.job.uid": self.uid,
            "everstep.recovery.cause": str(record.cause),
            "everstep.recovery.rung": str(record.rung),
            "everstep.recovery.worker": record.worker,
            "everstep.recovery.round": self.round or None,
            "everstep.recovery.lost_steps": record.lost_steps,
            "everstep.recovery.outcome": str(outcome),
        }
        return {name: value for name, value in known.items() if value is not None}
