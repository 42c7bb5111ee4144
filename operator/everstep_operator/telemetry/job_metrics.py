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


Line: TypeAlias = tuple[str, float]  # labels without braces, and the value


def _of_jobs(value: Callable[[JobFigures], float | None]) -> Callable[[ClusterFigures], Iterable[Line]]:
    """Lines with one value a job."""

    def lines(figures: ClusterFigures) -> Iterable[Line]:
        return ((_job(job), number) for job in figures.jobs if (number := value(job)) is not None)

    return lines


def _of_jobs_by(
    label: str, values: Callable[[JobFigures], Mapping[str, float]]
) -> Callable[[ClusterFigures], Iterable[Line]]:
    """Lines with several values a job, told apart by `label`."""

    def lines(figures: ClusterFigures) -> Iterable[Line]:
        return (
            (f'{_job(job)},{label}="{_escaped(word)}"', number)
            for job in figures.jobs
            for word, number in values(job).items()
        )

    return lines


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    kind: str
    description: str
    lines: Callable[[ClusterFigures], Iterable[Line]]


_FAMILIES = (
    _Family("everstep_job_step", "gauge", "Highest completed optimizer step.", _of_jobs(lambda j: j.step)),
    _Family(
        "everstep_job_last_step_timestamp_seconds",
        "gauge",
        "When the last new step was reported, by the operator's clock.",
        _of_jobs(lambda j: j.last_step),
    ),
    _Family(
        "everstep_job_start_timestamp_seconds",
        "gauge",
        "Since when the job wants workers.",
        _of_jobs(lambda j: j.start),
    ),
    _Family(
        "everstep_job_last_commit_step",
        "gauge",
        "Step of the newest commit, 0 before the first one.",
        _of_jobs(lambda j: j.commit_step),
    ),
    _Family(
        "everstep_job_last_commit_timestamp_seconds",
        "gauge",
        "When the newest commit was made, by the worker's clock.",
        _of_jobs(lambda j: j.last_commit),
    ),
    _Family(
        "everstep_job_workers",
        "gauge",
        "Workers in the round that trains, 0 without a quorum.",
        _of_jobs(lambda j: j.workers),
    ),
    _Family(
        "everstep_job_workers_wanted",
        "gauge",
        "Workers that the job should have, 0 while it is suspended.",
        _of_jobs(lambda j: j.workers_wanted),
    ),
    _Family(
        "everstep_job_goodput_ratio",
        "gauge",
        "Productive step time as a share of the time that the job was not suspended.",
        _of_jobs(lambda j: j.goodput),
    ),
    _Family(
        "everstep_job_seconds",
        "counter",
        "Where the job's time went, without the time for which it was suspended.",
        _of_jobs_by("state", lambda j: j.seconds),
    ),
    _Family(
        "everstep_job_recoveries",
        "counter",
        "Recoveries of the job that began, by what was lost first.",
        _of_jobs_by("cause", lambda j: j.recoveries),
    ),
    _Family(
        "everstep_job_last_recovery_seconds",
        "gauge",
        "Duration of each stage of the last recovery that ended.",
        _of_jobs_by("stage", lambda j: j.recovery_seconds),
    ),
    _Family(
        "everstep_job_last_recovery_lost_steps",
        "gauge",
        "Optimizer steps that were taken again after that.",
        _of_jobs(lambda j: j.recovery_lost_steps),
    ),
    _Family(
        "everstep_jobs_without_series",
        "gauge",
        "Unfinished jobs beyond the bound, of which there are no metrics.",
        lambda figures: (("", figures.jobs_without_series),),
    ),
    _Family(
        "everstep_node_losses",
        "counter",
        "Incidents of which the first lost worker ran on this node.",
        lambda figures: ((f'node="{_escaped(node)}"', count) for node, count in figures.node_losses.items()),
    ),
)


def render(figures: ClusterFigures, *, openmetrics: bool) -> str:
    """The lines of all these metrics. The two formats differ in the name by which a counter is described."""
    text: list[str] = []
    for family in _FAMILIES:
        sample = family.name + "_total" if family.kind == "counter" else family.name
        described = family.name if openmetrics else sample
        text.append(f"# HELP {described} {family.description}\n# TYPE {described} {family.kind}\n")
        text += [
            f"{sample}{{{labels}}} {value}\n" if labels else f"{sample} {value}\n"
            for labels, value in family.lines(figures)
        ]
    return "".join(text)


def _job(job: JobFigures) -> str:
    return f'namespace="{_escaped(job.namespace)}",name="{_escaped(job.name)}"'


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
