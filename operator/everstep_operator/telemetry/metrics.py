"""The operator's metrics, each with a bounded set of label values.

A label value outside a metric's set is counted as "other", so no input (an error's text, say) can add a time series.
Metrics of single jobs and nodes are apart (`job_metrics`). The tables of the reference page are made from the families
of both (`make generate`). Each instance has its own registry, so two operators in one process (tests, local mode) do
not share metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client import exposition as plain
from prometheus_client.openmetrics import exposition as openmetrics

from everstep_operator.api.conditions import Cause, ConditionType, FailedReason, ReadyReason, Rung
from everstep_operator.telemetry import job_metrics
from everstep_operator.telemetry.job_metrics import ClusterFigures

OTHER = "other"

STATUSES = tuple(ReadyReason)
CAUSES = tuple(Cause)
RUNGS = tuple(Rung)
OUTCOMES = (ConditionType.COMPLETE, *FailedReason)  # of a job
VERBS = ("get", "list", "create", "patch", "replace", "delete", "review")
LANES = ("change", "create", "event")
RESOURCES = (
    "trainingjobs",
    "trainingjobs/status",
    "pods",
    "services",
    "configmaps",
    "nodes",
    "events",
    "leases",
    "poddisruptionbudgets",
    "networkpolicies",
    "podgroups",
    "persistentvolumeclaims",
    "tokenreviews",
    "subjectaccessreviews",
    "workloads",
    "workloads/status",
    "resourceflavors",
    "workloadpriorityclasses",
    "priorityclasses",
    "jwks",
)
CODES = frozenset(
    {"200", "201", "202", "400", "401", "403", "404", "409", "410", "413", "422", "429", "500", "503", "504"}
)


class Format(StrEnum):
    """A format of the metrics, as the content type of an answer."""

    PLAIN = plain.CONTENT_TYPE_PLAIN_0_0_4
    OPENMETRICS = openmetrics.CONTENT_TYPE_LATEST


class ReportResult(StrEnum):
    """The outcome of a progress report."""

    ACCEPTED = "accepted"
    REDIRECTED = "redirected"
    NO_LEADER = "no-leader"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    MALFORMED = "malformed"
    TOO_LARGE = "too-large"
    TIMED_OUT = "timed-out"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"  # the token could not be checked


@dataclass(frozen=True, slots=True)
class Family:
    """A metric as the reference page shows it. A counter's name is without `_total`. `labels`: the known values."""

    name: str
    kind: str
    meaning: str
    labels: Mapping[str, Collection[str]]


Metric = TypeVar("Metric", Counter, Gauge, Histogram)
_END = b"# EOF\n"
ROUND_CALLS = ("read", "watch", "swap", "announce", "renew", "withdraw", "present")
ROUND_CODES = frozenset({"200", "204", "304", "307", "400", "401", "403", "408", "410", "412", "413", "500", "503"})


class Metrics:
    """Every metric of the operator; `render()` gives the text that Prometheus scrapes."""

    def __init__(self, *, process: bool = True) -> None:
        """`process`: include memory, CPU and file descriptors of this process."""
        self._figures: Callable[[], ClusterFigures] = ClusterFigures
        self.registry = CollectorRegistry()
        self.families: list[Family] = []
        if process:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
        buckets = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
        self._reconcile = self._add(
            Histogram, "everstep_reconcile_seconds", "Duration of one pass over one job.", buckets=buckets
        )
        self._reconcile_errors = self._add(
            Counter, "everstep_reconcile_errors", "Passes that ended in an error; they are repeated with back-off."
        )
        self._queue_depth = self._add(Gauge, "everstep_queue_depth", "Jobs that wait for a pass.")
        self._queue_wait = self._add(
            Histogram,
            "everstep_queue_wait_seconds",
            "From the first news of a job to the pass over it.",
            buckets=buckets,
        )
        self._write_wait = self._add(
            Histogram,
            "everstep_write_wait_seconds",
            "For how long a write for a job waited for its turn; change: of a status, or a deletion.",
            {"lane": LANES},
            buckets=buckets,
        )
        self._api = self._add(
            Counter,
            "everstep_api_requests",
            "Requests to the API server, watches excluded; the code error means that no answer came.",
            {"verb": VERBS, "resource": RESOURCES, "code": ("error", *sorted(CODES))},
        )
        self._api_seconds = self._add(
            Histogram, "everstep_api_request_seconds", "Duration of these requests.", {"verb": VERBS}, buckets=buckets
        )
        self._informer_restarts = self._add(
            Counter,
            "everstep_informer_relists",
            "A watch was lost for good, and the list repeated.",
            {"resource": RESOURCES},
        )
        self._jobs = self._add(
            Gauge, "everstep_jobs", "Jobs by the reason of their Ready condition.", {"status": STATUSES}
        )
        self._ended = self._add(
            Counter,
            "everstep_jobs_ended",
            "Jobs that ended while this replica led: Complete, or why they failed.",
            {"outcome": OUTCOMES},
        )
        self._recoveries = self._add(
            Counter,
            "everstep_recoveries",
            "Recoveries that ended, by what was lost and how the training was brought back.",
            {"cause": CAUSES, "rung": RUNGS},
        )
        self._recovery_seconds = self._add(
            Histogram,
            "everstep_recovery_seconds",
            "From the fault, as far as it is known, to the next optimizer step on all members; regrow is not in it.",
            buckets=(0.1, 0.3, 1, 2, 3, 4, 6, 8, 10, 15, 20, 30, 45, 60, 120, 300),
        )
        self._reports = self._add(
            Counter, "everstep_reports", "Progress reports by outcome.", {"result": tuple(ReportResult)}
        )
        self._rounds = self._add(
            Counter,
            "everstep_round_requests",
            "Agents' calls to the round store by answer.",
            {"call": ROUND_CALLS, "code": sorted(ROUND_CODES)},
        )
        self._round_watches = self._add(Gauge, "everstep_round_watches", "Agents that wait for their round to change.")
        self._memory = self._add(
            Gauge,
            "everstep_process_peak_memory_bytes",
            "Greatest peak of memory of a training process of any running job: RAM (host) or accelerator (device).",
            {"kind": ("host", "device")},
        )
        self._leader = self._add(Gauge, "everstep_leader", "1 on the replica that holds the Lease.")
        self._leaderless = self._add(
            Gauge,
            "everstep_leaderless_seconds",
            "For how long this replica has seen no replica lead; 0 while one does.",
        )
        self._certificate_ends = self._add(
            Gauge,
            "everstep_certificate_end_timestamp_seconds",
            "When the certificate of the port that workers reach by TLS ends, since the epoch; 0 without TLS.",
        )
        # What has not happened yet is 0, not absent: the first time then is an increase.
        for status in STATUSES:
            self._jobs.labels(status).set(0)
        for outcome in OUTCOMES:
            self._ended.labels(outcome)
        for cause in CAUSES:
            for rung in RUNGS:
                self._recoveries.labels(cause, rung)
        for result in ReportResult:
            self._reports.labels(result.value)

    def _add(
        self,
        kind: type[Metric],
        name: str,
        meaning: str,
        labels: Mapping[str, Collection[str]] | None = None,
        **options: Any,
    ) -> Metric:
        labels = labels or {}
        self.families.append(Family(name, kind.__name__.lower(), meaning, labels))
        return kind(name, meaning, tuple(labels), registry=self.registry, **options)

    def reconciled(self, seconds: float, *, failed: bool = False) -> None:
        """One pass over one job took `seconds`."""
        self._reconcile.observe(seconds)
        if failed:
            self._reconcile_errors.inc()

    def api_request(self, verb: str, resource: str, code: int | str, seconds: float | None = None) -> None:
        """A request was answered with status `code`, or with "error" when no answer came."""
        code = str(code)
        known = code if code in CODES else "error" if code == "error" else OTHER
        verb = _known_or_other(verb, VERBS)
        self._api.labels(verb, _known_or_other(resource, RESOURCES), known).inc()
        if seconds is not None:
            self._api_seconds.labels(verb).observe(seconds)

    def relisted(self, resource: str) -> None:
        """An informer lost its watch for good and listed everything again."""
        self._informer_restarts.labels(_known_or_other(resource, RESOURCES)).inc()

    def jobs(self, by_status: Mapping[str, int]) -> None:
        """Set the number of jobs in every status. A status that is not named has none."""
        counts = {str(status): 0 for status in STATUSES}
        for status, count in by_status.items():
            key = _known_or_other(status, STATUSES)
            counts[key] = counts.get(key, 0) + count
        for status, count in counts.items():
            self._jobs.labels(status).set(count)

    def ended(self, outcome: str) -> None:
        """A job has ended: Complete, or the reason of its condition Failed."""
        self._ended.labels(_known_or_other(outcome, OUTCOMES)).inc()

    def recovered(self, cause: str, rung: str, seconds: float | None) -> None:
        """All members took their next step `seconds` after the fault was observed. None: training had resumed before,
        and now the world has its full size again."""
        self._recoveries.labels(_known_or_other(cause, CAUSES), _known_or_other(rung, RUNGS)).inc()
        if seconds is not None:
            self._recovery_seconds.observe(max(0.0, seconds))

    def report(self, result: ReportResult) -> None:
        """A worker's report was answered."""
        self._reports.labels(result.value).inc()

    def round_request(self, call: str, code: int) -> None:
        """An agent's call to the round store was answered."""
        known = str(code) if str(code) in ROUND_CODES else OTHER
        self._rounds.labels(_known_or_other(call, ROUND_CALLS), known).inc()

    def round_watches(self, count: int) -> None:
        """How many agents wait for their round to change."""
        self._round_watches.set(count)

    def leader(self, leading: bool) -> None:
        """Whether this replica holds the Lease now."""
        self._leader.set(1 if leading else 0)

    def leaderless(self, seconds: float) -> None:
        """For how long this replica has seen nobody lead."""
        self._leaderless.set(seconds)

    def certificate_ends(self, at: float) -> None:
        """`at`: seconds since the epoch."""
        self._certificate_ends.set(at)

    def peak_memory(self, host: int, device: int) -> None:
        """The greatest peaks of a training process of any job, in bytes."""
        self._memory.labels("host").set(host)
        self._memory.labels("device").set(device)

    def queue_depth(self, keys: int) -> None:
        """How many keys wait for a pass."""
        self._queue_depth.set(keys)

    def queue_wait(self, seconds: float) -> None:
        """A pass over a job began `seconds` after its first news."""
        self._queue_wait.observe(seconds)

    def write_wait(self, lane: str, seconds: float) -> None:
        """A write for a job waited for its turn."""
        self._write_wait.labels(_known_or_other(lane, LANES)).observe(seconds)

    def figures_from(self, source: Callable[[], ClusterFigures]) -> None:
        """From now on, take the figures of jobs and nodes from `source` at each rendering."""
        self._figures = source

    def render(self, format_: Format = Format.PLAIN) -> bytes:
        """All metrics, in Prometheus' text format or in OpenMetrics."""
        figures = self._figures()
        if format_ is Format.PLAIN:
            return plain.generate_latest(self.registry) + job_metrics.render(figures, openmetrics=False).encode()
        ours: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]
        return ours.removesuffix(_END) + job_metrics.render(figures, openmetrics=True).encode() + _END


def _known_or_other(word: str, known: Collection[str]) -> str:
    return str(word) if word in known else OTHER
