"""`TrainingClient`: jobs on a cluster, or runs of this machine, from Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from everstep.client import manifest, program
from everstep.client.commits import commits
from everstep.client.errors import ClusterUnavailable, InvalidRequest, JobFailed, WaitTimeout, translated
from everstep.client.shapes import STATUSES, Checkpoint, Event, Job, Rows
from everstep.jobs import rerun as again
from everstep.jobs.source import (
    RUNS,
    JobError,
    NoSuchJob,
    RunEnded,
    Source,
    Unreachable,
    Where,
    cluster,
    local_alive,
    local_ended,
    local_start,
    require_name,
)
from everstep.jobs.view import View, ended
from everstep.jobs.waiting import EndedBefore, NotInTime, wait_until
from everstep.version import __version__

IMAGE = f"everstep/worker:{__version__}"  # with torch and everstep
WAIT_SECONDS = 600.0  # for a status, and for the next line of a log
FOLLOW_POLL_SECONDS = 0.5
ENDED_SECONDS = 0.1  # from a run's end until it is asked again
SETTLED_SECONDS = 15.0  # from a log's end until the API tells that its container has ended
STARTED = ("starting", "training", "Succeeded", "Failed")  # states of workers that have a log


class TrainingClient:
    """Jobs of one namespace of a cluster, or with `local` runs of this machine. Nothing is loaded or asked before the
    first call. Every method raises `ClientError`s.

    `namespace`, `context` and `kubeconfig` are those of the commands: absent, the current context's. `local`: True, or
    the folder that has the folders of local runs, instead of `.everstep`."""

    def __init__(
        self,
        *,
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | Path | None = None,
        local: bool | str | Path = False,
    ) -> None:
        if local is not False and (namespace, context, kubeconfig) != (None, None, None):
            raise InvalidRequest("namespace, context and kubeconfig are of a cluster: leave them or local away")
        self._where = Where(namespace, context, None if kubeconfig is None else str(kubeconfig))
        self._runs = None if local is False else RUNS if local is True else str(local)

    def __repr__(self) -> str:
        return f"TrainingClient(local={self._runs!r})" if self._runs is not None else f"TrainingClient({self._where})"

    def train(
        self,
        *,
        script: str | Path | None = None,
        function: Callable[..., Any] | None = None,
        args: Sequence[Any] | Mapping[str, Any] = (),
        files: Iterable[str | Path] = (),
        name: str | None = None,
        image: str = IMAGE,
        workers: int = 1,
        elastic: tuple[int, int] | None = None,
        spares: int = 0,
        env: Mapping[str, Any] | None = None,
        resources: Mapping[str, Any] | None = None,
        checkpoint: str | None = None,
        secret: str | None = None,
    ) -> Job:
        """Create a job that runs a script, or a function's text. It is sent with `files`, 1 MiB together, to a folder
        that the job keeps; all else has to be in `image`.

        `args`: a script's words; of a function a mapping, or a list, of literals. `name`: absent, one of its own is
        made. `elastic`: the fewest and the most workers; `spares`: how many more wait for the place of a lost one.
        `resources` of a worker: cpu, memory, gpu, or names with a slash. `checkpoint`: URL for commits; a local run has
        a folder of its own without it. `secret`: name of the Secret with the store's account."""
        made = program.of(script, function, args, files)
        job, config_map = manifest.build(
            made, local=self._runs is not None, name=name, image=image, workers=workers, elastic=elastic, spares=spares,
            env=env or {}, resources=resources or {}, checkpoint=checkpoint, secret=secret,
        )  # fmt: skip
        with translated():
            if self._runs is not None:
                return self._job(local_start(job, made.files, self._runs).name)
            view = self._cluster.create(job, None if config_map is None else (config_map, made.files))
            return Job.of(view, self._cluster.title)

    def create_job(self, job: Mapping[str, Any]) -> Job:
        """Create a TrainingJob that is given as a whole, as in its YAML file: for all that `train` has no argument
        for."""
        if (
            not isinstance(job, Mapping)
            or not isinstance(job.get("metadata"), Mapping)
            or "name" not in job["metadata"]
        ):
            raise InvalidRequest("job: a TrainingJob is expected, a mapping with spec and metadata.name")
        with translated():
            if self._runs is not None:
                return self._job(local_start(job, {}, self._runs).name)
            return Job.of(self._cluster.create(job, None), self._cluster.title)

    def list_jobs(self) -> Rows[Job]:
        """All jobs, without their workers; of local runs those that are alive, and those that have ended."""
        with translated():
            if self._runs is None:
                return Rows(Job.of(view, self._cluster.title) for view in self._cluster.jobs())
            jobs = []
            for run in [*local_alive(), *local_ended(None, self._runs)]:
                with suppress(RunEnded):  # it is among the others now, or was killed
                    jobs += [Job.of(view, run.title) for view in run.jobs()]
            return Rows(jobs)

    def get_job(self, name: str) -> Job:
        """The job with its workers as it is now. Of several local runs of the name, the one that is alive, or the
        newest."""
        with translated():
            return self._job(name)

    def wait_for_job_status(
        self, name: str, status: str | Iterable[str] = "Complete", timeout: float = WAIT_SECONDS
    ) -> Job:
        """The job as soon as it has this status, or one of these. Raises `JobFailed` if it ends with another one, and
        `WaitTimeout` after `timeout` seconds."""
        wanted = {status} if isinstance(status, str) else set(status)
        unknown = sorted(wanted - set(STATUSES))
        if unknown or not wanted:
            raise InvalidRequest(f"status={', '.join(unknown) or 'nothing'}: a job's are {', '.join(STATUSES)}")
        return self._wait(
            name, lambda view: view.status in wanted, f"job {name}: {' or '.join(sorted(wanted))}", timeout
        )

    def get_job_logs(
        self,
        name: str,
        *,
        worker: int = 0,
        rank: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        timeout: float = WAIT_SECONDS,
    ) -> Iterator[str]:
        """The lines that a worker has printed; its newest pod's. With `follow` also those to come, of the pods that
        replace it too, until the job ends; `timeout`: seconds without a line after which `WaitTimeout` is raised.
        `rank` instead of `worker`: the worker that has it now, where that is known, which is in local runs."""
        with translated():
            _, view = self._seen(name)
        index = worker if rank is None else _worker_of(view, rank)
        if follow:
            return self._followed(name, index, tail, timeout)
        pod = next((row.pod for row in reversed(view.workers) if row.worker == index), None)
        if pod is None:
            there = ", ".join(sorted({str(row.worker) for row in view.workers})) or "none yet"
            raise InvalidRequest(f"job {name} has no worker {index}; it has {there}")
        return self._printed(name, pod, tail)

    def get_job_events(self, name: str) -> Rows[Event]:
        """The job's events that are kept, oldest first."""
        with translated():
            rows = self._source(name).events(name)
        return Rows(Event(row.at, row.type, row.reason, row.message) for row in rows)

    def scale(self, name: str, workers: int) -> Job:
        """Change the number of workers that an elastic job wants, and return at once."""
        if type(workers) is not int or workers < 1:
            raise InvalidRequest(f"workers={workers!r}: the number of pods, at least 1")
        with translated():
            self._source(name).scale(name, workers)
        return self.get_job(name)

    def suspend(self, name: str, timeout: float = WAIT_SECONDS) -> Job:
        """Take all workers away, and return when they have left; with `timeout=0` at once."""
        with translated():
            self._source(name).suspend(name, True)
        if not timeout:
            return self.get_job(name)
        return self._wait(
            name,
            lambda view: view.status == "Suspended" and not self._seen(name)[1].workers,
            f"job {name}: Suspended, without workers",
            timeout,
        )

    def resume(self, name: str, timeout: float = WAIT_SECONDS) -> Job:
        """Let a suspended job go on from its last commit, and return when it trains; with `timeout=0` at once."""
        with translated():
            self._source(name).suspend(name, False)
        if not timeout:
            return self.get_job(name)
        return self._wait(name, lambda view: view.status.startswith("Running"), f"job {name}: Running", timeout)

    def rerun(self, name: str, checkpoint: str | None = None, timeout: float = WAIT_SECONDS) -> Job:
        """Begin a job anew that has failed or is complete, and return when it trains; with `timeout=0` at once. It goes
        on from its newest commit, or with commits at the URL `checkpoint`."""
        with translated():
            source, number = again.rerun(self._source(name), name, checkpoint)
        if not timeout:
            return self._job(name)
        return self._wait(
            name, again.trains_or_has, f"job {name}: Running", timeout, look=lambda: again.look(source, name, number)
        )

    def delete_job(self, name: str) -> None:
        """Delete a job with its workers. What it has committed stays. A local run that has ended is refused: its folder
        is all that there is of it."""
        with translated():
            self._source(name).delete(name)

    def checkpoints(self, name: str) -> Rows[Checkpoint]:
        """The commits of a job that have their data, newest first. The store is read from here, with this process's
        credentials."""
        with translated():
            source, _ = self._seen(name)
            spec = (source.objects(name).get("trainingjob") or {}).get("spec") or {}
        url = (spec.get("checkpoint") or {}).get("url")
        if not url:
            raise InvalidRequest(f"job {name} has no spec.checkpoint.url: it commits nothing that could be listed")
        return commits(url)

    # How jobs are found and waited for.

    @cached_property
    def _cluster(self) -> Any:
        return cluster(self._where)

    def _source(self, name: str) -> Source:
        require_name(name)
        if self._runs is None:
            source: Source = self._cluster
            return source
        for run in [*local_alive(), *local_ended(None, self._runs)]:
            if run.name == name:
                return run
        raise NoSuchJob(f"no local run named {name!r}, alive or below {self._runs}")

    def _seen(self, name: str) -> tuple[Source, View]:
        """The source that has the job now, and what it has of it."""
        while True:
            source = self._source(name)
            try:
                return source, source.view(name)
            except RunEnded:
                time.sleep(ENDED_SECONDS)  # what it left is there now; of one that was killed nothing is

    def _job(self, name: str) -> Job:
        source, view = self._seen(name)
        return Job.of(view, source.title)

    def _summary(self, name: str) -> View:
        require_name(name)
        return self._cluster.summary(name) if self._runs is None else self._seen(name)[1]

    def _wait(
        self,
        name: str,
        done: Callable[[View], bool],
        what: str,
        timeout: float,
        look: Callable[[], View] | None = None,
    ) -> Job:
        with translated():
            try:
                view = wait_until(look or (lambda: self._summary(name)), done, what, timeout)
            except EndedBefore as e:
                raise JobFailed(str(e)) from None
            except NotInTime as e:
                raise WaitTimeout(f"{e}. The job goes on") from None
            source, seen = self._seen(name)
            return Job.of(replace(view, workers=seen.workers), source.title)

    def _printed(self, name: str, pod: str, tail: int | None) -> Iterator[str]:
        with translated():
            yield from self._source(name).logs(name, pod, follow=False, tail=tail)

    def _followed(self, name: str, worker: int, tail: int | None, timeout: float) -> Iterator[str]:
        followed: set[str] = set()
        newest = time.monotonic()  # when the last line came, or a log ended
        with translated():
            while True:
                source, view = self._seen(name)
                rows = [row for row in view.workers if row.worker == worker]
                new = next((row.pod for row in rows if row.state in STARTED and row.pod not in followed), None)
                quiet = time.monotonic() - newest
                if new is not None:
                    followed.add(new)
                    try:
                        for line in source.logs(name, new, follow=True, tail=tail, silence=timeout):
                            yield line
                            newest = time.monotonic()
                    except (JobError, Unreachable):
                        if time.monotonic() - newest >= timeout:
                            raise WaitTimeout(_silent(name, worker, timeout)) from None
                        raise
                    newest, tail = time.monotonic(), None
                    continue
                if ended(view.raw_status):
                    return
                running = bool(rows) and rows[-1].pod in followed and rows[-1].state in ("starting", "training")
                if running and quiet > SETTLED_SECONDS:
                    raise ClusterUnavailable(f"the log of {rows[-1].pod} broke off: follow it again, with tail=")
                if quiet >= timeout:
                    raise WaitTimeout(_silent(name, worker, timeout))
                time.sleep(FOLLOW_POLL_SECONDS)


def _silent(name: str, worker: int, timeout: float) -> str:
    return f"worker {worker} of job {name} printed nothing for {timeout:g} s: the job goes on; timeout= waits longer"


def _worker_of(view: View, rank: int) -> int:
    known = {row.rank: row.worker for row in view.workers if row.rank is not None}
    if rank in known:
        return known[rank]
    ranks = ", ".join(str(each) for each in sorted(known))
    raise InvalidRequest(
        f"job {view.job} has no rank {rank}; it has {ranks}"
        if known
        else "no ranks are known of this job: give worker="
    )
