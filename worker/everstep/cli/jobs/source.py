"""Whom the commands ask about jobs, and how the one that is meant is found.

A local run that is alive is meant first; `-n`, `--context` or `--kubeconfig` mean a cluster. Invariant: what is
ambiguous is refused with the names that there are; nothing is ever changed by a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol

from everstep.cli.jobs.view import EventRow, View

GROUP = "everstep.sources"  # entry points: modules with `alive() -> list[Source]` and `ended(out) -> list[Source]`


_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


class JobError(Exception):
    """The command cannot be carried out as it was given, and its text says what to do."""


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
        ...

    def jobs(self) -> list[View]:
        """All jobs, without workers and events."""
        ...

    def view(self, job: str) -> View: ...

    def events(self, job: str) -> list[EventRow]:
        """All that are kept, oldest first."""
        ...

    def objects(self, job: str) -> dict[str, Any]:
        """What else there is of it, as JSON, by name: for a report."""
        ...

    def logs(self, job: str, pod: str, *, follow: bool, tail: int | None) -> Iterator[str]:
        """Lines of the worker's container, without their ends."""
        ...

    def scale(self, job: str, replicas: int) -> None: ...

    def suspend(self, job: str, wanted: bool) -> None: ...

    def delete(self, job: str) -> None: ...

    def kill(self, job: str, pod: str, *, delete: bool) -> str:
        """End a worker's processes by SIGKILL, or with `delete` its pod; what was done."""
        ...

    def disturb(self, job: str, verb: str, **arguments: str) -> str:
        """`kill-node` and `start-node`, with `node`, and `kill-operator`; what was done. A cluster refuses."""
        ...


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


def local_alive() -> list[Source]:
    """The runs of this machine that are alive; none without everstep-local."""
    return [source for module in _local() for source in module.alive()]


def local_ended(out: str | None) -> list[Source]:
    """What runs left under this folder, newest first."""
    return [source for module in _local() for source in module.ended(out)]


def _local() -> list[Any]:
    """The module of everstep-local, if it and all that it needs are installed."""
    try:
        return [point.load() for point in entry_points(group=GROUP)]
    except ModuleNotFoundError:
        return []


def cluster(where: Where) -> Source:
    """Raises `Unreachable` where no cluster is named anywhere."""
    source: Source = import_module("everstep.cli.jobs.cluster").connect(where)  # it loads the official client
    return source


def pick(job: str | None, where: Where, *, changes: bool = False) -> tuple[Source, str]:
    """The source and the job's name. With `changes`, a run that has ended is not meant. Raises `JobError`, and
    `Unreachable` where the cluster that may have the job does not answer."""
    if job is not None and not _NAME.fullmatch(job):
        # An empty one, of a shell's variable that is not set, would mean all jobs of a namespace to the API server.
        raise JobError(f"{job!r} is no job's name: lower-case letters, digits and dashes")
    if where.names_a_cluster:
        if job is None:
            raise JobError("name the job: a namespace may have many (`everstep list` shows them)")
        return cluster(where), job
    alive = [] if where.out is not None else local_alive()
    meant = [source for source in alive if job is None or name_of(source) == job]
    if len(meant) == 1:
        return meant[0], name_of(meant[0])
    if meant:
        names = ", ".join(sorted(name_of(source) for source in meant))
        raise JobError(f"several local runs are alive: {names}. Name the one that is meant")
    problem: Unreachable | None = None
    if job is not None and where.out is None:
        try:
            source = cluster(where)
            if any(view.job == job for view in source.jobs()):
                over = next((run for run in local_ended(None) if changes and name_of(run) == job), None)
                if over is not None:
                    raise JobError(f"{job} is a local run ({over.title}) and a job in {source.title}: give -n for that")
                return source, job
            others = f"; {source.title} has no such job"
        except Unreachable as e:
            problem, others = e, ""
    else:
        others = ""
    left = [] if changes else local_ended(where.out)
    kept = [source for source in left if job is None or name_of(source) == job]
    if kept:
        return kept[0], name_of(kept[0])
    if problem is not None and not isinstance(problem, NoCluster):
        raise problem
    what = "no local run" if job is None else f"no local run named {job!r}"
    folder = f" in {where.out}" if where.out is not None else ""
    names = f"; alive: {', '.join(sorted(name_of(source) for source in alive))}" if alive else ""
    hint = " For a job on a cluster: its name, with -n or --context where they are not your own" if job is None else ""
    raise JobError(f"{what}{folder}{names}{others}. Start one with `everstep run`.{hint}")


def name_of(source: Source) -> str:
    """The name of a source's only job."""
    return source.jobs()[0].job
