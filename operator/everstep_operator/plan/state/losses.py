"""Finds which loss came first, why, and what caused it.

When one training process dies, its peers' collectives fail a moment later and all of their pods end with exit code 1.
The first cause must be found among these failures, because it decides what is charged and what `status.failure`
contains. The sources, best first: the worker library's record in the termination log; torchrun's failure summary in the
last log lines; the kubelet's reason and exit code; the state of the pod and its node.

Invariant: a loss that the program did not cause is never charged to `spec.recovery.maxRestarts`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from everstep.contract import exit_codes, redact, termination
from everstep_operator.api.conditions import Cause
from everstep_operator.plan import sanitize, times
from everstep_operator.plan.snapshot import Exit, InitFailure, Snapshot, WorkerPod
from everstep_operator.plan.state import exit_text, node_loss

MAX_MESSAGE = sanitize.MAX_TEXT
MAX_LINE = 500  # characters of a log line that a status keeps
MAX_ERROR = termination.MAX_BRIEF  # and of an error; of a longer one the beginning, and the end with what to do
MAX_READ = 2000  # of an error, before it is cut
MAX_LOCATION = 80  # and of a file's name with a line's number
SIGKILL, SIGTERM = 9, 15
# The kubelet's reason for a container whose end it did not see, because the node or its runtime restarted.
_END_NOT_SEEN = ("Unknown", "ContainerStatusUnknown")

# The kubelet's reasons for a pod that it ended; `Evicted`, and those that we do not know, are evictions.
_ENDED_BY_KUBELET = {
    "NodeShutdown": Cause.NODE_LOST,
    "Shutdown": Cause.NODE_LOST,
    "Terminated": Cause.NODE_LOST,
    "Preempting": Cause.DISRUPTION_TARGET,
    "Preempted": Cause.DISRUPTION_TARGET,
    "DeadlineExceeded": Cause.DEADLINE_EXCEEDED,
}
# And for a pod whose worker never ran. All others are rejections: `UnexpectedAdmissionError`, `OutOfcpu`,
# `NodeAffinity`, `NodeShutdown`, …
_NOT_RUN_BY_KUBELET = {
    "Preempting": Cause.DISRUPTION_TARGET,
    "Preempted": Cause.DISRUPTION_TARGET,
    "DeadlineExceeded": Cause.DEADLINE_EXCEEDED,
}

# The kubelet's reasons for a container that the runtime could not start.
_NEVER_RAN = ("ContainerCannotRun", "StartError", "CreateContainerError")

# torch.distributed.elastic's summary: "Root Cause (first observed failure):" … "exitcode  : -9 (pid: 77)".
_TORCHRUN_EXIT = re.compile(r"Root Cause[^\0]{0,400}?exitcode\s*:\s*(-?\d{1,3})\b")
# Text in a survivor's log when its peer ended first (gloo, NCCL, TCPStore, c10d rendezvous).
_PEER_LOST = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|Connection refused|remote process exited"
    r"|Rendezvous(?:Connection|Closed|Graceful\w*)\w*Error|DistNetworkError|DistStoreError|NCCL error: unhandled system"
)
# Torch's error, and the error of our own agent when it was cut off from its peers, or had too few of them, for too
# long.
_RENDEZVOUS_TIMEOUT = re.compile(r"RendezvousTimeoutError|was not taken into a round newer than \d+ in time")


class Charge(StrEnum):
    """The counter of `status.restarts` to which a restart is added."""

    USER_CODE = "userCode"
    INFRASTRUCTURE = "infrastructure"
    PREEMPTION = "preemption"


CHARGES: dict[Cause, Charge] = {
    Cause.ERROR: Charge.USER_CODE,
    Cause.OOM_KILLED: Charge.USER_CODE,
    Cause.START_FAILED: Charge.USER_CODE,
    # The template asks for this end, as a program asks for its own.
    Cause.DEADLINE_EXCEEDED: Charge.USER_CODE,
    Cause.STORE_UNUSABLE: Charge.USER_CODE,
    Cause.SIGNALED: Charge.INFRASTRUCTURE,
    Cause.PEER_LOST: Charge.INFRASTRUCTURE,
    Cause.NODE_LOST: Charge.INFRASTRUCTURE,
    Cause.POD_DELETED: Charge.INFRASTRUCTURE,
    Cause.REJECTED: Charge.INFRASTRUCTURE,
    Cause.START_TIMEOUT: Charge.INFRASTRUCTURE,
    Cause.FENCED: Charge.INFRASTRUCTURE,
    Cause.RENDEZVOUS_TIMEOUT: Charge.INFRASTRUCTURE,
    Cause.PEER_MISSING: Charge.INFRASTRUCTURE,
    Cause.EVICTED: Charge.PREEMPTION,
    Cause.DISRUPTION_TARGET: Charge.PREEMPTION,
    Cause.PREEMPTED: Charge.PREEMPTION,
}


@dataclass(frozen=True, slots=True)
class ScriptRefusal:
    """The session refused the script in one of its first steps, or before them. `line`: `train.py:12`, or empty."""

    line: str


@dataclass(frozen=True, slots=True)
class Loss:
    """One worker that is no longer training, and why."""

    index: int
    cause: Cause
    detail: str  # one sentence for a person
    pod: str | None = None
    node: str | None = None
    exit_code: int | None = None  # of the training process where it is known, else of the container
    at: datetime | None = None  # when it happened, if known
    log_lines: tuple[str, ...] = ()
    cannot_start: bool = False  # a restart would fail in the same way: see `decide.start_failures`
    refusal: ScriptRefusal | None = (
        None  # a restart would be refused too, until the script is changed: see `decide.refusals`
    )
    unstarted: bool = False  # its container never began to run, so the loss shows nothing about the program
    came_late: bool = False  # its pod came to a node that was lost already, as the next one may

    @property
    def charge(self) -> Charge:
        return CHARGES[self.cause]

    @property
    def sentence(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"worker {self.index}{where} lost ({self.cause}): {self.detail}"


def losses_among(
    snapshot: Snapshot, current: Mapping[int, WorkerPod], expected: Mapping[int, bool]
) -> tuple[Loss, ...]:
    """Every lost worker, root cause first. `expected` maps the indices of the workers to whether the pod is known to
    have existed. If it is not, a missing pod has simply not been created yet."""
    losses = []
    for index, was_there in expected.items():
        pod = current.get(index)
        if pod is None:
            if was_there:
                losses.append(Loss(index, Cause.POD_DELETED, "its pod is gone"))
            elif (late := _loss_of_create(snapshot, index)) is not None:
                losses.append(late)
        elif (loss := _loss_of(snapshot, pod)) is not None:
            losses.append(replace(loss, unstarted=_is_unstarted(pod, loss)))
    return root_cause_first(losses)


def _is_unstarted(pod: WorkerPod, loss: Loss) -> bool:
    """Whether the worker's container never ran. A container that the runtime could not start has an end all the
    same."""
    return loss.cause is Cause.START_FAILED or not has_started(pod)


def root_cause_first(losses: Iterable[Loss]) -> tuple[Loss, ...]:
    return tuple(sorted(losses, key=_first_cause))


# Causes of losses that cause no other loss, or may follow from one. A worker that was rejected, or did not start, was
# in no round. A worker that is asked to stop makes its peers stop in order; a worker that dies breaks their
# collectives; peers wait without success for a worker that cannot run.
_CONSEQUENCES = (Cause.REJECTED, Cause.START_TIMEOUT, Cause.PREEMPTED, Cause.PEER_LOST, Cause.PEER_MISSING)


def _first_cause(loss: Loss) -> tuple[int, float, int]:
    """Sort key of a loss: survivors' failures come after the failure that caused them, whatever their nodes' clocks
    say."""
    order = _CONSEQUENCES.index(loss.cause) + 1 if loss.cause in _CONSEQUENCES else 0
    return (order, loss.at.timestamp() if loss.at else 0.0, loss.index)


def _loss_of(snapshot: Snapshot, pod: WorkerPod) -> Loss | None:
    """Why this pod no longer trains; None while it may still."""
    if pod.succeeded:
        return None
    if pod.ended_by_itself:
        return _loss_of_exit(pod)
    if not pod.finished and (detail := node_loss.why_lost(snapshot, pod)) is not None:
        node = snapshot.nodes.get(pod.node or "")
        late = node is not None and not has_started(pod) and node_loss.came_late(pod, node)
        at = node.changed_at if node else None
        return Loss(pod.index, Cause.NODE_LOST, detail, pod.name, pod.node, at=at, came_late=late)
    if pod.reason == "Evicted":
        detail = f"evicted by the kubelet{_kubelet_message(pod)}"
        return Loss(pod.index, Cause.EVICTED, detail, pod.name, pod.node, at=pod.deleted_at)
    if pod.disruption is not None:
        detail = f"disrupted: {pod.disruption}"
        return Loss(pod.index, Cause.DISRUPTION_TARGET, detail, pod.name, pod.node, at=pod.deleted_at)
    if pod.deleted_at is not None:
        return Loss(pod.index, Cause.POD_DELETED, "its pod was deleted", pod.name, pod.node, at=pod.deleted_at)
    if pod.ended_by_kubelet:
        return _loss_by_kubelet(pod)
    return _loss_of_exit(pod) if pod.finished else _loss_of_start(snapshot, pod)


def start_due(snapshot: Snapshot, pod: WorkerPod) -> datetime | None:
    """By when the worker's container has to run; None if there is no such time, or it has run."""
    seconds = snapshot.job.spec.recovery.start_timeout_seconds
    if seconds is None or pod.created_at is None or pod.finished or has_started(pod):
        return None
    return times.after(pod.created_at, seconds)


def create_due(snapshot: Snapshot) -> datetime | None:
    """By when a worker that cannot be created has to run; None if there is no such time."""
    seconds, since = snapshot.job.spec.recovery.start_timeout_seconds, snapshot.job.status.refused_since
    return None if seconds is None or since is None else times.after(since, seconds)


def has_started(pod: WorkerPod) -> bool:
    """Whether the worker's container has ever begun to run."""
    return pod.ready or pod.started_at is not None or pod.exit is not None


def _loss_of_start(snapshot: Snapshot, pod: WorkerPod) -> Loss | None:
    due = start_due(snapshot, pod)
    if due is None or snapshot.now < due:
        return None
    unplaced = f"it cannot be scheduled: {pod.unschedulable}" if pod.unschedulable is not None else None
    waits = pod.waiting or unplaced or pod.starting or "its kubelet has not begun"
    return Loss(pod.index, Cause.START_TIMEOUT, _not_started(snapshot, waits), pod.name, pod.node, at=due)


def _loss_of_create(snapshot: Snapshot, index: int) -> Loss | None:
    """The loss of a worker that could not be created in time. Only a refusal that this leader has seen counts."""
    due, obstacle = create_due(snapshot), snapshot.create_obstacle
    if due is None or obstacle is None or snapshot.now < due:
        return None
    detail = _not_started(snapshot, f"it cannot be created: {obstacle}")
    return Loss(index, Cause.START_TIMEOUT, detail, at=due, unstarted=True)


def _not_started(snapshot: Snapshot, waits: str) -> str:
    seconds = snapshot.job.spec.recovery.start_timeout_seconds
    return f"not started in {seconds} s (spec.recovery.startTimeoutSeconds): {waits}"


def _loss_by_kubelet(pod: WorkerPod) -> Loss:
    """Whatever its reason is, the kubelet does not end or reject a pod for what its program did."""
    if pod.exit is not None:
        cause = _ENDED_BY_KUBELET.get(pod.reason or "", Cause.EVICTED)
        detail = f"ended by the kubelet: {pod.reason}{_kubelet_message(pod)}"
        return Loss(pod.index, cause, detail, pod.name, pod.node, pod.exit.code, pod.exit.finished_at)
    cause = _NOT_RUN_BY_KUBELET.get(pod.reason or "", Cause.REJECTED)
    did = "rejected by the kubelet" if cause is Cause.REJECTED else "ended by the kubelet before it ran"
    return Loss(pod.index, cause, f"{did}: {pod.reason}{_kubelet_message(pod)}", pod.name, pod.node)


def _kubelet_message(pod: WorkerPod) -> str:
    """The kubelet's message, which names the resource or device that the node lacked; empty if there is none."""
    return f": {' '.join(pod.message.split()).rstrip('.')}" if pod.message else ""


def _loss_of_exit(pod: WorkerPod) -> Loss:
    exit_ = pod.exit
    if exit_ is None and pod.init_failure is not None:
        return _loss_of_init(pod, pod.init_failure)
    if exit_ is None:
        cause = Cause.NODE_LOST if pod.reason == "NodeLost" else Cause.START_FAILED
        detail = f"failed without running: {pod.reason or 'no reason given'}{_kubelet_message(pod)}"
        return Loss(pod.index, cause, detail, pod.name, pod.node)
    record = _record(exit_.message)
    code = min(max(record.exit_code if record is not None else _process_exit_code(exit_), 0), 255)
    cause = _cause(exit_, code, record)
    lines = record.lines if record is not None else _tail(exit_.message)
    detail = record.text if record is not None and record.text else _describe(exit_, code, lines)
    refusal = record.refusal if record is not None and cause is Cause.ERROR and code == 1 else None
    hopeless = cause in (Cause.ERROR, Cause.START_FAILED) and exit_text.cannot_start(code, detail)
    return Loss(pod.index, cause, detail, pod.name, pod.node, code, exit_.finished_at, lines, hopeless, refusal)


def _loss_of_init(pod: WorkerPod, failed: InitFailure) -> Loss:
    """An init container is the user's own code, and its end is charged like that of the program."""
    lines = _tail(failed.message)
    error = exit_text.error_line(lines) or (lines[-1] if lines else "")
    reason = f" ({failed.reason})" if failed.reason and failed.reason != "Error" else ""
    detail = f"init container {failed.container} ended with exit code {failed.code}{reason}"
    detail += f": {exit_text.with_remedy(error)}" if error else ""
    hopeless = exit_text.cannot_start(failed.code, error)
    code = min(max(failed.code, 0), 255)
    return Loss(pod.index, Cause.START_FAILED, detail, pod.name, pod.node, code, failed.finished_at, lines, hopeless)


@dataclass(frozen=True, slots=True)
class _Record:
    """The worker library's record in the termination log (everstep.contract.termination)."""

    exit_code: int
    text: str
    peer_lost: bool
    lines: tuple[str, ...]
    refusal: ScriptRefusal | None


def _record(message: str | None) -> _Record | None:
    """The record of the process that failed first. If there are several records, one that does not blame a peer wins.

    The message is untrusted text: anything odd in it is ignored.
    """
    records = [r for line in (message or "")[:MAX_MESSAGE].splitlines() if (r := _record_of(line)) is not None]
    return min(records, key=lambda r: r.peer_lost, default=None)


def _record_of(line: str) -> _Record | None:
    if not line.startswith('{"everstep"'):
        return None
    try:
        body = json.loads(line)
        error = str(body["error"])[:MAX_READ]
        refusal = _refusal(body)
        return _Record(
            exit_code=int(body["exit_code"]) & 0xFF,
            text=sanitize.encodable(redact.ends(error, MAX_ERROR)),
            # The text of a refusal may contain the words of a lost peer.
            peer_lost=refusal is None and _PEER_LOST.search(error) is not None,
            lines=tuple(_shown(line) for line in redact.lines(str(text) for text in list(body.get("lines", ()))[-20:])),
            refusal=refusal,
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _refusal(body: Mapping[str, object]) -> ScriptRefusal | None:
    """Workers that are older than this field do not write it."""
    if not termination.is_early(body.get("refused_after")):
        return None
    return ScriptRefusal(_shown(" ".join(str(body.get("line", ""))[:MAX_LINE].split()), MAX_LOCATION))


def _process_exit_code(exit_: Exit) -> int:
    """The training process's exit code (128 + n for signal n): torchrun itself always ends with 1."""
    match = _TORCHRUN_EXIT.search((exit_.message or "")[:MAX_MESSAGE])
    if match is None:
        return exit_.code
    code = int(match[1])
    code = 128 - code if code < 0 else code
    return code if code <= 255 else exit_.code


def _cause(exit_: Exit, code: int, record: _Record | None) -> Cause:
    message = (exit_.message or "")[:MAX_MESSAGE]
    if exit_.reason in _END_NOT_SEEN:
        return Cause.NODE_LOST
    if exit_.reason == "OOMKilled":
        return Cause.OOM_KILLED
    if exit_.reason in _NEVER_RAN:
        return Cause.START_FAILED
    if code == exit_codes.FENCED:
        return Cause.FENCED
    if code == exit_codes.PREEMPTED:
        return Cause.PREEMPTED
    if code == exit_codes.STORE_UNUSABLE:
        return Cause.STORE_UNUSABLE
    if code in (128 + SIGKILL, 128 + SIGTERM):
        return Cause.SIGNALED
    if _RENDEZVOUS_TIMEOUT.search(message):
        return Cause.RENDEZVOUS_TIMEOUT
    if record.peer_lost if record is not None else _PEER_LOST.search(message):
        return Cause.PEER_LOST
    return Cause.ERROR


def _describe(exit_: Exit, code: int, lines: tuple[str, ...]) -> str:
    if exit_.reason in _END_NOT_SEEN:
        return "its node or the container runtime restarted"
    if code > 128:
        return f"ended by signal {code - 128}"
    reason = f" ({exit_.reason})" if exit_.reason and exit_.reason != "Error" else ""
    # For a container that never ran, the message is the runtime's, in one sentence.
    error = lines[-1] if exit_.reason in _NEVER_RAN and lines else exit_text.error_line(lines)
    return f"exit code {code}{reason}" + (f": {exit_text.with_remedy(error)}" if error else "")


def _tail(message: str | None, lines: int = 20) -> tuple[str, ...]:
    """The last lines that the program wrote; the launcher's last lines if the program wrote nothing."""
    # Secrets are hidden before the text is cut into lines, because a key has many lines.
    redacted = "\n".join(redact.lines((message or "")[:MAX_MESSAGE].splitlines()))
    text = exit_text.own_lines(redacted) or [line for line in redacted.splitlines() if line.strip()]
    return tuple(_shown(line) for line in text[-lines:])


def _shown(text: str, limit: int = MAX_LINE) -> str:
    """The text as a status may quote it. It is cut again after secrets are hidden, because hiding them may make it
    longer."""
    return sanitize.encodable(redact.short(text, limit))
