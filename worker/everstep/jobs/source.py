"""Whom the commands ask about jobs, and how the one that is meant is found.

A local run that is alive is meant first; `-n`, `--context` or `--kubeconfig` mean a cluster. Invariant: what is
ambiguous is refused with the names that there are; nothing is ever changed by a guess.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol

from everstep.contract import labels
from everstep.installing import remedy
from everstep.jobs.view import EventRow, View

# Entry points: modules with `alive() -> list[Run]`, `ended(out, runs) -> list[Run]`, `start(job, files, runs) -> Run`.
GROUP = "everstep.sources"
RUNS = ".everstep"  # the folder that has those of local runs

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
POD = re.compile(r"(?P<job>.+)-w(?P<worker>\d+)-\d+")
WORKER = re.compile(r"w?(\d+)")


class JobError(Exception):
    """The command cannot be carried out as it was given, and its text says what to do."""


class NoSuchJob(JobError):
    """The source has no job of that name."""


class RunEnded(JobError):
    """The run that was asked has just ended. `view`: what it was at its end; None if that is not known."""

    def __init__(self, text: str, view: View | None = None) -> None:
        super().__init__(text)
        self.view = view


class Misconfigured(JobError):
    """A kubeconfig is there, and names no cluster that can be asked."""


class Unreachable(Exception):
    """Whoever should answer does not, or refuses."""

    exit_code: ClassVar = 3


class NoCluster(Unreachable):
    """No cluster is named, in a kubeconfig or by the pod that this runs in."""


class Source(Protocol):
    """One cluster's namespace, one run of this machine, or what a run left. Raises `JobError` and `Unreachable`."""

    @property
    def title(self) -> str:
        """`local run digits`, or `namespace ml of context prod`."""

    def jobs(self) -> list[View]:
        """All jobs, without workers and events."""

    def summary(self, job: str) -> View:
        """Without workers and events, which costs less. Raises `NoSuchJob`."""

    def view(self, job: str) -> View: ...

    def events(self, job: str) -> list[EventRow]:
        """All that are kept, oldest first."""

    def objects(self, job: str) -> dict[str, Any]:
        """What else there is of it, as JSON, by name: for a report."""

    def logs(
        self, job: str, pod: str, *, follow: bool, tail: int | None, silence: float | None = None
    ) -> Iterator[str]:
        """Lines of the worker's container, without their ends. One that is followed may be silent for `silence`
        seconds; None: for any time."""

    def scale(self, job: str, replicas: int) -> None: ...

    def suspend(self, job: str, wanted: bool) -> None: ...

    def rerun(self, job: str, url: str | None) -> tuple[Source, int]:
        """Begin a job anew that has ended, with commits at `url` if one is given; whoever has it now, and the value of
        `status.rerun` that the new run will have."""
        ...

    def delete(self, job: str) -> None: ...

    def kill(self, job: str, pod: str, *, delete: bool) -> str:
        """End a worker's processes by SIGKILL, or with `delete` its pod; what was done."""

    def migrate(self, job: str, pod: str) -> None:
        """Ask the operator to give the worker of this pod a place on another node."""

    def disturb(self, job: str, verb: str, **arguments: str) -> str:
        """`kill-node` and `start-node`, with `node`, and `kill-operator`; what was done. A cluster refuses."""


class Run(Source, Protocol):
    """A source with one job: a run of this machine, alive or ended."""

    @property
    def name(self) -> str:
        """By which the commands know it. It is known without asking the run."""

    def uid(self) -> str:
        """The UID of its job, by which the agents in its pods know it; empty if there are none."""


@dataclass(frozen=True, slots=True)
class Where:
    """What a person gave to say where the job is."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None
    out: str | None = None  # the folder of a local run
    every: bool = False  # all namespaces

    @property
    def names_a_cluster(self) -> bool:
        return self.every or any(part is not None for part in (self.namespace, self.context, self.kubeconfig))


def local_alive() -> list[Run]:
    """The runs of this machine that are alive; none without everstep-local."""
    return [source for module in _local() for source in module.alive()]


def local_ended(out: str | None, runs: str = RUNS) -> list[Run]:
    """The run that left this folder, or what all left under `runs`, newest first."""
    return [source for module in _local() for source in module.ended(out, runs)]


def local_start(job: Mapping[str, Any], files: Mapping[str, str], runs: str) -> Run:
    """A new run of this TrainingJob, as soon as it is alive. Its workers run in a folder with these files, by name; the
    run's own folder is made under `runs`. It outlives this process. Raises `JobError`."""
    modules = _local()
    if not modules:
        raise JobError(f"local runs need a package that is missing: {remedy('everstep-local', 'everstep[worker]')}")
    run: Run = modules[0].start(job, files, runs)
    return run


def _local() -> list[Any]:
    """The module of everstep-local, if it and all that it needs are installed."""
    try:
        return [point.load() for point in entry_points(group=GROUP)]
    except ModuleNotFoundError:
        return []


def cluster(where: Where) -> Source:
    """Raises `Unreachable` where no cluster is named anywhere."""
    source: Source = import_module("everstep.jobs.cluster").connect(where)  # it loads the official client
    return source


def require_name(job: str) -> None:
    """Raises `JobError`."""
    if not isinstance(job, str) or not _NAME.fullmatch(job):
        # An empty one, of a shell's variable that is not set, would mean all jobs of a namespace to the API server.
        raise JobError(f"{job!r} is no job's name: lower-case letters, digits and dashes")


def pick(job: str | None, where: Where, *, changes: bool = False, over: bool = False) -> tuple[Source, str]:
    """The source and the job's name. With `changes`, a run that has ended is meant only if `over`. Raises `JobError`,
    and `Unreachable` where the cluster that may have the job does not answer."""
    if job is not None:
        require_name(job)
    if where.names_a_cluster:
        if job is None:
            raise JobError("name the job: a namespace may have many (`everstep list` shows them)")
        return cluster(where), job
    alive = [] if where.out is not None else local_alive()
    meant = [run for run in alive if job is None or run.name == job]
    if len(meant) == 1:
        return meant[0], meant[0].name
    if meant:
        names = ", ".join(sorted(run.name for run in meant))
        raise JobError(f"several local runs are alive: {names}. Name the one that is meant")
    problem: Unreachable | Misconfigured | None = None
    others = ""
    if job is not None and where.out is None:
        try:
            source = cluster(where)
            if has(source, job):
                other = next((run for run in local_ended(None) if run.name == job), None) if changes else None
                if other is not None:
                    raise JobError(
                        f"{job} is a local run ({other.title}) and a job in {source.title}: give -n for that"
                    )
                return source, job
            others = f"; {source.title} has no such job"
        except NoCluster as e:
            others = f"; {e}"
        except (Unreachable, Misconfigured) as e:
            problem = e
    left = [] if changes and not over else local_ended(where.out)
    kept = next((run for run in left if job is None or run.name == job), None)
    if kept is not None:
        return kept, kept.name
    if problem is not None:
        raise problem
    what = "no local run" if job is None else f"no local run named {job!r}"
    folder = f" in {where.out}" if where.out is not None else ""
    names = f"; alive: {', '.join(sorted(run.name for run in alive))}" if alive else ""
    hint = " For a job on a cluster: its name, with -n or --context where they are not your own" if job is None else ""
    raise JobError(f"{what}{folder}{names}{others}. Start one with `everstep run`.{hint}")


def pick_worker(
    word: str | None, worker: str | None, where: Where, *, changes: bool = False
) -> tuple[Source, str, str | None, str | None]:
    """The source, the job's name, and the worker or the pod that is meant. A single word is a job, a worker of the only
    local run, or a pod. A name that is a job's is read as that. Raises as `pick`."""
    alive = [] if where.names_a_cluster or where.out is not None else local_alive()
    if word is None or worker is not None or any(run.name == word for run in alive):
        return *pick(word, where, changes=changes), worker, None
    if WORKER.fullmatch(word) and not where.names_a_cluster:
        return *pick(None, where, changes=changes), word, None
    parts = POD.fullmatch(word)
    if parts is None:
        return *pick(word, where, changes=changes), None, None
    job = parts["job"]
    run = _run_with(word, job, parts["worker"], alive, "kill" if changes else "logs")
    if run is not None:
        return run, run.name, None, word
    try:
        source, name = pick(job, where, changes=changes)
    except JobError as e:
        try:
            return *pick(word, where, changes=changes), None, None
        except JobError:
            raise e from None
    return (source, word, None, None) if has(source, word) else (source, name, None, word)


def _run_with(pod: str, job: str, worker: str, alive: list[Run], command: str) -> Run | None:
    """The run among these that has the pod. A second run of a job has another name than the job, and the same pods."""
    named = [run for run in alive if re.fullmatch(rf"{re.escape(job)}(-\d+)?", run.name)]
    if [run.name for run in named] == [job]:
        return named[0]
    having = sorted((run for run in named if _may_have(run, pod)), key=lambda run: run.name)
    if len(having) > 1:
        names = ", ".join(run.name for run in having)
        raise JobError(
            f"pod {pod} is one of several local runs: {names}. Name the run and its worker: "
            f"everstep {command} {having[0].name} {worker}"
        )
    return having[0] if having else next((run for run in named if run.name == job), None)


def _may_have(run: Run, pod: str) -> bool:
    try:
        return any(row.pod == pod for row in run.view(run.name).workers)
    except RunEnded:
        return False
    except (JobError, Unreachable):  # it does not answer
        return True


def migration(annotations: Mapping[str, str], pods: Collection[str], pod: str) -> dict[str, Any]:
    """The merge patch of a job by which `pod` is moved, beside those of its present `pods` that are to be moved."""
    asked = [name for name in annotations.get(labels.MIGRATE, "").split(",") if name in pods and name != pod]
    return {"metadata": {"annotations": {labels.MIGRATE: ",".join([*asked, pod])}}}


def has(source: Source, job: str) -> bool:
    """Whether the source has a job of this name."""
    try:
        source.summary(job)
    except NoSuchJob:
        return False
    return True
