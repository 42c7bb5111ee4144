"""Follows the recoveries of jobs, and hands on a trace of each when it is over.

It reads what passes have written, and changes nothing. It is over with the first new step: when the steps that were
lost are taken again, or, if none were, with the first step of all ranks; or when another incident begins, or the job
ends, is suspended or is deleted. Memory: one incident a job. A replica that takes over knows an open recovery from the
status, and not one whose steps are being taken again: that one has no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from everstep_operator.api.conditions import ConditionType, Rung
from everstep_operator.api.status import RecoveryRecord, Status
from everstep_operator.controller.progress import JobProgress
from everstep_operator.plan.snapshot import JobView
from everstep_operator.telemetry.recovery_trace import Incident, Outcome, RecoveryTrace

_ENDS = {
    ConditionType.SUSPENDED: Outcome.SUSPENDED,
    ConditionType.COMPLETE: Outcome.COMPLETE,
    ConditionType.FAILED: Outcome.FAILED,
}


class Incidents:
    def __init__(self, send: Callable[[RecoveryTrace], None]) -> None:
        """`send` gets each trace once. It must neither block nor raise."""
        self._send = send
        self._newest: dict[str, Incident] = {}  # by the job's UID

    def follow(self, job: JobView, status: Status, reports: JobProgress, now: datetime) -> None:
        """A pass has stored `status`."""
        record = next((record for record in status.recoveries if record.rung != Rung.REGROW), None)
        if record is None:
            return
        incident = self._newest.get(job.uid)
        if _begins(record, incident, status):
            noticed_at = reports.lost_at or record.at
            if incident is not None:
                self._end(incident, noticed_at, Outcome.LOST_AGAIN)
            incident = self._newest[job.uid] = Incident(job.namespace, job.name, job.uid, noticed_at, record)
        if incident is None or incident.sent:
            return
        if _is_of(record, incident) and not incident.recovered:
            incident.record, incident.round = record, reports.round
        new_step_at = reports.new_step_at
        if (outcome := next((outcome for type_, outcome in _ENDS.items() if status.holds(type_)), None)) is not None:
            self._end(incident, now, outcome)
        elif incident.recovered and not incident.record.lost_steps:
            self._end(incident, now, Outcome.RECOVERED)
        elif incident.recovered and new_step_at is not None and new_step_at > incident.noticed_at:
            self._end(incident, new_step_at, Outcome.RECOVERED)

    def gone(self, uid: str, now: datetime) -> None:
        """The job with this UID has been deleted."""
        if (incident := self._newest.pop(uid, None)) is not None:
            self._end(incident, now, Outcome.DELETED)

    def forget_all(self) -> None:
        """Another replica may have led since."""
        self._newest.clear()

    def _end(self, incident: Incident, at: datetime, outcome: Outcome) -> None:
        if not incident.sent:
            incident.sent = True
            self._send(incident.trace(at, outcome))


def _begins(record: RecoveryRecord, incident: Incident | None, status: Status) -> bool:
    """Whether the record is one of an incident that is not followed yet."""
    if record.first_step_ms is not None or (incident is not None and _is_of(record, incident)):
        return False
    # The record of a recovery that was cut short by a suspension stays open.
    suspended = status.condition(ConditionType.SUSPENDED)
    return suspended is None or suspended.last_transition_time <= record.at


def _is_of(record: RecoveryRecord, incident: Incident) -> bool:
    """Whether it is the incident's record. One that was read from the API server has whole seconds."""
    return record.at.replace(microsecond=0) == incident.record.at.replace(microsecond=0)
