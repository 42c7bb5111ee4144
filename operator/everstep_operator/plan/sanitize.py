"""Sanitizes untrusted text and numbers before anything is decided.

Exit messages, kubelet texts, refusals and reports come from containers and webhooks, which are not trusted. Only this
module replaces text that has no UTF-8 form, and bounds numbers to what a status may hold. It also hides secrets:
credentials of a known shape, and the values of the template's secret variables, because a failing program often prints
them. Invariant: a plan made from a sanitized snapshot can be written as a status, and quotes no secret of the spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from everstep.contract import redact
from everstep.contract.messages import MAX_METRIC_NAME, MAX_METRICS
from everstep.contract.redact import HIDDEN
from everstep_operator.api.base import SAFE_INT_MAX
from everstep_operator.plan.snapshot import (
    Exit,
    Fleet,
    InitFailure,
    QueueView,
    ReportedPeak,
    ReportedProgress,
    Snapshot,
    WorkerPod,
    WorkloadView,
)
from everstep_operator.round_view import RoundView

MAX_TEXT = 8192  # the kubelet keeps 4096 bytes of an exit message; anything longer did not come from it
MAX_SECONDS = 1e9
# A shorter value occurs inside ordinary words: hiding it would cost more text than it protects.
MIN_SECRET = 4
# Common values of settings whose names only look secret, such as TOKENIZERS_PARALLELISM.
_SWITCHES = frozenset({"true", "false", "none", "null", "auto", "default"})

Number = TypeVar("Number", int, float)


def sanitized(snapshot: Snapshot) -> Snapshot:
    """The snapshot, with all text and numbers from outside reduced to what may be shown and stored."""
    secrets = _secrets(snapshot.job.spec.template)
    return replace(
        snapshot,
        pods=tuple(_pod(pod, secrets) for pod in snapshot.pods),
        progress=_progress(snapshot.progress, secrets),
        world=None if snapshot.world is None else _round(snapshot.world, secrets),
        create_refused=_shown(snapshot.create_refused, secrets),
        object_refused=_shown(snapshot.object_refused, secrets),
        queue=None if snapshot.queue is None else _queue(snapshot.queue, secrets),
        fleet=None if snapshot.fleet is None else _fleet(snapshot.fleet, secrets),
    )


def _fleet(fleet: Fleet, secrets: tuple[str, ...]) -> Fleet:
    """Whoever watches a node writes what is wrong with it."""
    if not fleet.faults:
        return fleet
    faults = {name: tuple(_shown(text, secrets) or "" for text in texts) for name, texts in fleet.faults.items()}
    return replace(fleet, faults=faults)


def _queue(queue: QueueView, secrets: tuple[str, ...]) -> QueueView:
    """Whoever may write a Workload writes these texts."""

    def shown(each: WorkloadView) -> WorkloadView:
        message, waits = _shown(each.evicted_message, secrets) or "", _shown(each.waits, secrets) or ""
        return replace(each, evicted=_shown(each.evicted, secrets), evicted_message=message, waits=waits)

    return replace(
        queue,
        workloads=tuple(map(shown, queue.workloads)),
        refusal=_shown(queue.refusal, secrets),
        obstacle=_shown(queue.obstacle, secrets),
        unread=_shown(queue.unread, secrets),
    )


def _round(view: RoundView, secrets: tuple[str, ...]) -> RoundView:
    ends = tuple(replace(end, detail=_shown(end.detail, secrets) or "") for end in view.ends)
    return replace(view, closed=_shown(view.closed, secrets), ends=ends)


def encodable(text: str) -> str:
    """The text with every character replaced that has no UTF-8 form. JSON can spell such a character: half of a
    surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def _secrets(template: Mapping[str, Any]) -> tuple[str, ...]:
    """Values of variables with a secret-sounding name, longest first, so that none hides a part of another."""
    spec = template.get("spec") or {}
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    variables = (e for c in containers for e in c.get("env") or ())
    values = {
        str(e["value"]) for e in variables if e.get("value") is not None and redact.secret_name(str(e.get("name")))
    }
    hidden = (v for v in values if len(v) >= MIN_SECRET and v.lower() not in _SWITCHES)
    return tuple(sorted(hidden, key=lambda v: (-len(v), v)))


def _text(text: str | None, secrets: Iterable[str]) -> str | None:
    if text is None:
        return None
    text = text[:MAX_TEXT]
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return encodable(text)


def _shown(text: str | None, secrets: Iterable[str]) -> str | None:
    """Sanitize text that a status quotes as it is. (`losses` hides secrets in the parts of an exit message that it
    quotes.)"""
    return None if text is None else _hidden(_text(text, secrets) or "")


@lru_cache(maxsize=2048)  # the same text is in each plan until it changes
def _hidden(text: str) -> str:
    return redact.short(text, MAX_TEXT)


def _pod(pod: WorkerPod, secrets: tuple[str, ...]) -> WorkerPod:
    exit_ = pod.exit
    if (
        exit_ is None
        and pod.init_failure is None
        and not any((pod.reason, pod.message, pod.disruption, pod.waiting, pod.unschedulable, pod.starting))
    ):
        return pod  # a healthy pod has no text, and copies of all pods would be a third of a pass
    return replace(
        pod,
        reason=_shown(pod.reason, secrets),
        message=_shown(pod.message, secrets),
        disruption=_shown(pod.disruption, secrets),
        waiting=_shown(pod.waiting, secrets),
        unschedulable=_shown(pod.unschedulable, secrets),
        starting=_shown(pod.starting, secrets),
        init_failure=_init(pod.init_failure, secrets),
        exit=None
        if exit_ is None
        else Exit(exit_.code, _text(exit_.reason, secrets), _text(exit_.message, secrets), exit_.finished_at),
    )


def _init(failed: InitFailure | None, secrets: tuple[str, ...]) -> InitFailure | None:
    if failed is None:
        return None
    name, reason = encodable(failed.container), _text(failed.reason, secrets)
    return replace(failed, container=name, reason=reason, message=_text(failed.message, secrets))


def _progress(seen: ReportedProgress, secrets: tuple[str, ...]) -> ReportedProgress:
    names = sorted(name for name in seen.metrics if 0 < len(encodable(name)) <= MAX_METRIC_NAME)
    return replace(
        seen,
        round=min(max(seen.round, 0), SAFE_INT_MAX),
        step=_bounded(seen.step, SAFE_INT_MAX),
        total_steps=_bounded(seen.total_steps, SAFE_INT_MAX),
        epoch=_bounded(seen.epoch, SAFE_INT_MAX),
        step_seconds=_bounded(seen.step_seconds, MAX_SECONDS),
        metrics={encodable(name): seen.metrics[name] for name in names[:MAX_METRICS]},
        committed_step=_bounded(seen.committed_step, SAFE_INT_MAX),
        checkpoint_error=_shown(seen.checkpoint_error, secrets),
        straggler=_shown(seen.straggler, secrets),
        rehearsed=_shown(seen.rehearsed, secrets),
        memory=_memory(seen.memory),
        checkpoint_damaged=_shown(seen.checkpoint_damaged, secrets),
        productive_seconds=min(seen.productive_seconds, MAX_SECONDS),
        skipped_saves=min(seen.skipped_saves, SAFE_INT_MAX),
        restored_step=_bounded(seen.restored_step, SAFE_INT_MAX),
        resumed_step=_bounded(seen.resumed_step, SAFE_INT_MAX),
        restore_seconds=_bounded(seen.restore_seconds, MAX_SECONDS),
    )


def _memory(peak: ReportedPeak | None) -> ReportedPeak | None:
    if peak is None:
        return None
    host, rank = min(max(peak.host, 0), SAFE_INT_MAX), min(max(peak.rank, 0), SAFE_INT_MAX)
    return ReportedPeak(host, rank, _bounded(peak.device, SAFE_INT_MAX), _bounded(peak.device_rank, SAFE_INT_MAX))


def _bounded(value: Number | None, limit: Number) -> Number | None:
    return None if value is None else max(type(value)(0), min(value, limit))
