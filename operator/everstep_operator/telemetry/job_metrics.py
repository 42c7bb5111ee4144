"""The metrics that have labels of a job or of a node.

They are written from one snapshot at each scrape, so nothing is left of a job that is gone. The lines are made here,
not by prometheus_client: for a thousand jobs its writers need longer than the event loop may stand still
(`tests/unit/test_telemetry_job_metrics.py` has the bound). The caller bounds the number of jobs and nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class JobFigures:
    """The figures of one job that is not finished. Times are seconds since 1970. None: there is no such figure."""

    namespace: str
    name: str
    workers: int = 0
    workers_wanted: int = 0
    spares: int | None = None  # that wait; None: the job has none
    start: float | None = None
    step: int | None = None
    last_step: float | None = None
    commit_step: int | None = None
    last_commit: float | None = None
    goodput: float | None = None  # 0 to 1
    seconds: Mapping[str, float] = field(default_factory=dict)  # by what the job did
    recoveries: Mapping[str, int] = field(default_factory=dict)  # by cause
    recovery_seconds: Mapping[str, float] = field(default_factory=dict)  # of the last recovery, by stage
    recovery_lost_steps: int | None = None


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """What the leader knows of jobs and nodes. Of a replica that does not lead it is empty."""

    jobs: Sequence[JobFigures] = ()
    jobs_without_series: int = 0
    node_losses: Mapping[str, int] = field(default_factory=dict)
    node_exclusions: Mapping[str, int] = field(default_factory=dict)


Line: TypeAlias = tuple[str, float]  # labels without braces, and the value
_OF_A_JOB = ("namespace", "name")


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a metric, and the names of their labels."""

    labels: tuple[str, ...]
    of: Callable[[ClusterFigures], Iterable[Line]]


def _of_jobs(value: Callable[[JobFigures], float | None]) -> Lines:
    """Lines with one value a job."""

    def lines(figures: ClusterFigures) -> Iterable[Line]:
        return ((_job(job), number) for job in figures.jobs if (number := value(job)) is not None)

    return Lines(_OF_A_JOB, lines)


def _of_jobs_by(label: str, values: Callable[[JobFigures], Mapping[str, float]]) -> Lines:
    """Lines with several values a job, told apart by `label`."""

    def lines(figures: ClusterFigures) -> Iterable[Line]:
        return (
            (f'{_job(job)},{label}="{_escaped(word)}"', number)
            for job in figures.jobs
            for word, number in values(job).items()
        )

    return Lines((*_OF_A_JOB, label), lines)


@dataclass(frozen=True, slots=True)
class Family:
    """A metric. A counter's name is without `_total`."""

    name: str
    kind: str
    meaning: str
    lines: Lines


FAMILIES = (
    Family("everstep_job_step", "gauge", "Highest completed optimizer step.", _of_jobs(lambda j: j.step)),
    Family(
        "everstep_job_last_step_timestamp_seconds",
        "gauge",
        "When the last new step was reported, by the operator's clock (status.progress.steppedAt). Steps that are "
        "taken again after a loss are not new.",
        _of_jobs(lambda j: j.last_step),
    ),
    Family(
        "everstep_job_start_timestamp_seconds",
        "gauge",
        "Since when the job wants workers (status.startTime); none while it is suspended.",
        _of_jobs(lambda j: j.start),
    ),
    Family(
        "everstep_job_last_commit_step",
        "gauge",
        "Step of the newest commit; 0 if spec.checkpoint is set and there is none yet.",
        _of_jobs(lambda j: j.commit_step),
    ),
    Family(
        "everstep_job_last_commit_timestamp_seconds",
        "gauge",
        "When the newest commit was made, by the worker's clock.",
        _of_jobs(lambda j: j.last_commit),
    ),
    Family(
        "everstep_job_workers",
        "gauge",
        "Workers in the round that trains; 0 without a quorum.",
        _of_jobs(lambda j: j.workers),
    ),
    Family(
        "everstep_job_workers_wanted",
        "gauge",
        "Workers that the job should have, without spares; 0 while it is suspended.",
        _of_jobs(lambda j: j.workers_wanted),
    ),
    Family(
        "everstep_job_spares",
        "gauge",
        "Spares that wait to take the place of a lost worker, of a job with spec.elastic.spares.",
        _of_jobs(lambda j: j.spares),
    ),
    Family(
        "everstep_job_goodput_ratio",
        "gauge",
        "The time of new steps as a share of the time that the job was not suspended, 0 to 1.",
        _of_jobs(lambda j: j.goodput),
    ),
    Family(
        "everstep_job_seconds",
        "counter",
        "Where the time went for which the job was not suspended.",
        _of_jobs_by("state", lambda j: j.seconds),
    ),
    Family(
        "everstep_job_recoveries",
        "counter",
        "Recoveries that began, by what was lost first: a job that fails again and again before its next step counts, "
        "too. A new leader begins with the ten that the status has.",
        _of_jobs_by("cause", lambda j: j.recoveries),
    ),
    Family(
        "everstep_job_last_recovery_seconds",
        "gauge",
        "Duration of each stage of the last recovery that ended (status.recoveries): detect, rendezvous, restore, "
        "first-step.",
        _of_jobs_by("stage", lambda j: j.recovery_seconds),
    ),
    Family(
        "everstep_job_last_recovery_lost_steps",
        "gauge",
        "Optimizer steps that were taken again after it.",
        _of_jobs(lambda j: j.recovery_lost_steps),
    ),
    Family(
        "everstep_jobs_without_series",
        "gauge",
        "Unfinished jobs beyond the 1,000 that have series.",
        Lines((), lambda figures: (("", figures.jobs_without_series),)),
    ),
    Family(
        "everstep_node_losses",
        "counter",
        "Incidents of which the first lost worker ran on this node, since this replica leads; 0 for the other nodes "
        "that run workers. A node that is deleted has none.",
        Lines(
            ("node",),
            lambda figures: ((f'node="{_escaped(node)}"', count) for node, count in figures.node_losses.items()),
        ),
    ),
    Family(
        "everstep_node_excluding_jobs",
        "gauge",
        "Unfinished jobs whose new pods avoid this node (status.excludedNodes); 0 for the other nodes that run "
        "workers.",
        Lines(
            ("node",),
            lambda figures: ((f'node="{_escaped(node)}"', count) for node, count in figures.node_exclusions.items()),
        ),
    ),
)


def render(figures: ClusterFigures, *, openmetrics: bool) -> str:
    """The lines of all these metrics. The two formats differ in the name by which a counter is described."""
    text: list[str] = []
    for family in FAMILIES:
        sample = family.name + "_total" if family.kind == "counter" else family.name
        described = family.name if openmetrics else sample
        text.append(f"# HELP {described} {family.meaning}\n# TYPE {described} {family.kind}\n")
        text += [
            f"{sample}{{{labels}}} {value}\n" if labels else f"{sample} {value}\n"
            for labels, value in family.lines.of(figures)
        ]
    return "".join(text)


def _job(job: JobFigures) -> str:
    return f'namespace="{_escaped(job.namespace)}",name="{_escaped(job.name)}"'


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
