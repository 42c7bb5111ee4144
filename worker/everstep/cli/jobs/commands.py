"""The commands about jobs: `everstep list`, `status`, `logs`, `events`, `scale`, `suspend`, `resume`, `rerun`,
`migrate`, `delete`, `kill`.

This module parses, asks a `source.Source`, and prints.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import typer

from everstep.cli.jobs import following, tables
from everstep.cli.jobs.tables import Output
from everstep.cli.printing import safe_line, say, say_error
from everstep.contract import labels
from everstep.jobs import rerun as again
from everstep.jobs.source import (
    WORKER,
    JobError,
    Misconfigured,
    NoCluster,
    NoSuchJob,
    RunEnded,
    Source,
    Unreachable,
    Where,
    cluster,
    local_alive,
    local_ended,
    pick,
    pick_worker,
)
from everstep.jobs.view import View, ended
from everstep.jobs.waiting import POLL_SECONDS, wait_until

app = typer.Typer(add_completion=False)
EXPECTED = (JobError, Unreachable)

WORD_SECONDS = 5.0  # of a wait at a terminal, from one line to the next
WAIT_SECONDS = 600.0  # for workers to leave or to train again
SHOWN_EVENTS = 12

Job = Annotated[str | None, typer.Argument(help="The job's name; without it the only local run.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="A job on a cluster, in this namespace.")]
Context = Annotated[str | None, typer.Option("--context", help="A job on the cluster of this context.")]
Kubeconfig = Annotated[str | None, typer.Option("--kubeconfig", help="A job on the cluster of this file.")]
Out = Annotated[str | None, typer.Option("--out", help="What a local run left in this folder.")]
Format = Annotated[Output, typer.Option("--output", "-o", help="How it is printed.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it has happened.")]


def gather(where: Where, *, over: bool) -> tuple[list[tuple[str, View]], str]:
    """All jobs without workers and events, each with the title of its source, and the title of the cluster that was
    asked. A run that does not answer is named, and left out. `over`: also runs that have ended."""
    runs = [] if where.names_a_cluster else [*local_alive(), *(local_ended(None) if over else [])]
    views: list[tuple[str, View]] = []
    problem: JobError | Unreachable | None = None
    title = ""
    for run in runs:
        try:
            views.append((run.title, run.summary(run.name)))
        except (JobError, Unreachable) as e:
            say_error(f"note: {e}")
            problem = e
    try:
        source = cluster(where)
        title = source.title
        views += [(title, view) for view in source.jobs()]
    except NoCluster:
        if where.names_a_cluster:
            raise
    except (Unreachable, Misconfigured) as e:
        if not views:
            raise
        say_error(f"note: {e}")
    if not views and problem is not None:
        raise problem
    return views, title


@app.command("list")
def list_jobs(
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    every: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    over: Annotated[bool, typer.Option("--ended", help="Also what ended runs left under .everstep.")] = False,
    output: Format = Output.TABLE,
) -> None:
    """The jobs: local runs, and those in the namespace of the cluster's context."""
    where = Where(namespace, context, kubeconfig, every=every)
    views, title = gather(where, over=over)
    if not views and output in (Output.TABLE, Output.WIDE):
        say_error(f"no job{f' in {title}' if title else ''}; start one with `everstep run`, or kubectl apply")
        return
    data = [{"where": title, **view.to_summary_json()} for title, view in views]
    tables.put(output, data, [view.job for _, view in views], lambda wide: tables.jobs(views, wide))


@app.command()
def status(
    job: Job = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Again whenever it changes.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    out: Out = None,
    output: Format = Output.TABLE,
) -> None:
    """One job: its line, its workers and its newest events."""
    source, name = pick(job, Where(namespace, context, kubeconfig, out))
    view = source.view(name)
    _show(view, output)
    while watch and not ended(view.raw_status):
        time.sleep(POLL_SECONDS)
        try:
            new = source.view(name)
        except NoSuchJob:
            say_error(f"{name} has been deleted")
            return
        except RunEnded as e:
            if e.view is None:
                raise
            _show(e.view, output)
            return
        if new != view:
            view = new
            _show(view, output)


def _show(view: View, output: Output) -> None:
    newest = replace(view, events=view.events[-SHOWN_EVENTS:])
    tables.put(output, newest.to_json(), [view.job], lambda _: tables.job(newest))


@app.command()
def events(
    job: Job = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    out: Out = None,
    output: Format = Output.TABLE,
) -> None:
    """All events of a job that are kept, oldest first."""
    source, name = pick(job, Where(namespace, context, kubeconfig, out))
    rows = source.events(name)
    data = [{"at": row.at, "type": row.type, "reason": row.reason, "message": row.message} for row in rows]
    tables.put(output, data, [row.reason for row in rows], lambda _: tables.events(rows))


@app.command()
def logs(
    job: Annotated[str | None, typer.Argument(help="The job, or one of its pods.")] = None,
    worker: Annotated[str | None, typer.Argument(metavar="[WORKER]", help="The worker: 0, or w0.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="That of the worker which failed first.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Those of all workers, one after the other; with -f side by side.")
    ] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="That of the worker with this rank, of a local run.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as long as it is written.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only so many lines from the end.")] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    out: Out = None,
) -> None:
    """What a worker has printed: worker 0's, if none is named."""
    source, name, worker, pod = pick_worker(job, worker, Where(namespace, context, kubeconfig, out))
    if sum((pod is not None or worker is not None, failed, every, rank is not None)) > 1:
        raise JobError("give one of: a worker or a pod, --failed, --all, --rank")
    if pod is not None:
        pods = [pod]
    else:
        view = source.view(name)
        if every and follow and not ended(view.raw_status):
            _follow_all(source, name, view, tail)
            return
        pods = _pods(view, worker, failed=failed, every=every, rank=rank)
    for each in pods:
        if len(pods) > 1:
            say(f"==> {each} <==")
        for line in source.logs(name, each, follow=follow, tail=tail):
            _print_line(line, flush=follow)


def _follow_all(source: Source, job: str, view: View, tail: int | None) -> None:
    for line in following.follow(source, job, view, tail):
        if line.problem:
            say_error(f"note: {line.pod}: {line.text}")
        else:
            _print_line(line.text, f"{line.pod} | ", flush=True)


def _print_line(line: str, before: str = "", *, flush: bool) -> None:
    for part in line.rstrip("\r").split("\r"):  # each state of a progress bar
        print(f"{before}{safe_line(part)}", flush=flush)


def _chosen(view: View, pod: str | None, worker: str | None) -> str:
    """The pod, or that of the worker. Raises `JobError` if there is none."""
    if pod is None:
        return _pods(view, worker)[0]
    if pod not in {row.pod for row in view.workers}:
        raise JobError(
            f"{view.job} has no pod {pod}; it has {', '.join(row.pod for row in view.workers) or 'none yet'}"
        )
    return pod


def _pods(
    view: View, worker: str | None, *, failed: bool = False, every: bool = False, rank: int | None = None
) -> list[str]:
    """The pods that are meant, a worker's newest one each."""
    newest = {row.worker: row.pod for row in view.workers}  # sorted by incarnation
    if failed:
        failure = view.raw_status.get("failure") or {}
        known = [row.pod for row in view.workers if row.state == "Failed"]
        if "pod" in failure or known:
            return [str(failure["pod"])] if "pod" in failure else known[:1]
        raise JobError(f"no worker of {view.job} has failed; name one: {_choice(newest)}")
    if every:
        return [newest[index] for index in sorted(newest)]
    if rank is not None:
        ranks = {row.rank: row.pod for row in view.workers if row.rank is not None}
        if not ranks:
            raise JobError(
                f"the ranks of {view.job} are not known, as on a cluster: `everstep stacks` shows each rank with its "
                f"pod; or name a worker: {_choice(newest)}"
            )
        if rank not in ranks:
            raise JobError(f"{view.job} has no rank {rank}; it has {', '.join(map(str, sorted(ranks)))}")
        return [ranks[rank]]
    index = 0
    if worker is not None:
        number = WORKER.fullmatch(worker)
        if number is None:
            raise JobError(f"{worker!r} is no worker; name one: {_choice(newest)}")
        index = int(number[1])
    elif newest and 0 not in newest:
        index = min(newest)
    if index not in newest:
        raise JobError(f"{view.job} has no worker {index}; it has {_choice(newest)}")
    return [newest[index]]


def _choice(newest: dict[int, str]) -> str:
    return ", ".join(str(index) for index in sorted(newest)) or "none yet"


@app.command()
def scale(
    job_and_number: Annotated[list[str], typer.Argument(metavar="[JOB] WORKERS")],
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Change the number of workers of an elastic job."""
    *job, number = job_and_number
    if len(job) > 1 or not number.isdecimal() or int(number) < 1:
        raise JobError("give the job and its number of workers, at least 1: everstep scale JOB WORKERS")
    source, name = pick(job[0] if job else None, Where(namespace, context, kubeconfig), changes=True)
    view = source.summary(name)
    if view.fewest is not None and view.most is not None and not view.fewest <= int(number) <= view.most:
        raise JobError(
            f"{name} can have {view.fewest} to {view.most} workers, not {number}: spec.elastic.minReplicas and "
            "maxReplicas bound it"
        )
    source.scale(name, int(number))
    say(f"{name}: {number} workers wanted ({source.title})")


@app.command()
def suspend(
    job: Job = None,
    wait: Wait = True,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Take all workers away; `resume` goes on from the last commit."""
    source, name = pick(job, Where(namespace, context, kubeconfig), changes=True)
    source.suspend(name, True)
    if wait:
        _wait(source, name, "its workers leave", lambda view: view.status == "Suspended", no_workers=True)
    say(f"{name}: {'suspended' if wait else 'to be suspended'} ({source.title})")


@app.command()
def resume(
    job: Job = None,
    wait: Wait = True,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Let a suspended job go on."""
    source, name = pick(job, Where(namespace, context, kubeconfig), changes=True)
    source.suspend(name, False)
    if wait:
        _wait(source, name, "its workers train", lambda view: view.status.startswith("Running"))
    say(f"{name}: {'trains again' if wait else 'to be resumed'} ({source.title})")


@app.command()
def rerun(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Commit there instead; where there are no commits, from the start."),
    ] = None,
    wait: Wait = True,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    out: Out = None,
) -> None:
    """Begin a job anew that has failed or is complete; it goes on from its newest commit."""
    before, name = pick(job, Where(namespace, context, kubeconfig, out), changes=True, over=True)
    source, number = again.rerun(before, name, checkpoint)
    if wait:
        _wait(source, name, "its workers train", again.trains_or_has, look=lambda: again.look(source, name, number))
    say(f"{name}: {'runs again' if wait else 'to be run again'} ({source.title})")


def _wait(
    source: Source,
    job: str,
    what: str,
    done: Callable[[View], bool],
    *,
    no_workers: bool = False,
    look: Callable[[], View] | None = None,
) -> None:
    """Wait until `done`, with `no_workers` also until they are gone; and print on stderr what for: at a terminal at
    least every `WORD_SECONDS`, else when that changes. `look` gives the job if not the source alone does. Raises
    `JobError` when the job has ended, or after `WAIT_SECONDS`."""
    began = time.monotonic()
    message, printed_at = "", began

    def waiting(view: View) -> None:
        nonlocal message, printed_at
        now = time.monotonic()
        if view.message != message or (now - printed_at > WORD_SECONDS and sys.stderr.isatty()):
            message, printed_at = view.message, now
            say_error(f"{job}: waiting until {what} ({now - began:.0f} s): {view.status}: {message}")

    def whole(view: View) -> bool:
        return done(view) and not (no_workers and source.view(job).workers)

    wait_until(look or (lambda: source.summary(job)), whole, what, WAIT_SECONDS, waiting=waiting)


@app.command()
def migrate(
    job: Annotated[str | None, typer.Argument(help="The job, or one of its pods.")] = None,
    worker: Annotated[str | None, typer.Argument(metavar="[WORKER]", help="The worker: 0, or w0.")] = None,
    wait: Wait = True,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Move a worker to another node without a lost step: another worker starts first, and takes its place."""
    where = Where(namespace, context, kubeconfig)
    source, name, worker, pod = pick_worker(job, worker, where, changes=True)
    if pod is None and worker is None:
        raise JobError("give the job and its worker: everstep migrate JOB WORKER")
    chosen = _chosen(source.view(name), pod, worker)
    source.migrate(name, chosen)
    if wait:
        what = f"another worker has the place of {chosen}"
        _wait(source, name, what, lambda _: _has_moved(source.view(name), chosen))
    say(f"{name}: {chosen} {'moved' if wait else 'to be moved'} ({source.title})")


def _has_moved(view: View, pod: str) -> bool:
    """Whether the pod has left. Raises `JobError` if the operator says that it cannot."""
    if labels.CANNOT_MOVE in view.message:
        raise JobError(f"{view.job}: {view.message}")
    return all(row.pod != pod for row in view.workers)


@app.command()
def delete(
    job: Annotated[str, typer.Argument(help="The job's name.")],
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete a job with its workers. What it has committed stays."""
    source, name = pick(job, Where(namespace, context, kubeconfig), changes=True)
    source.delete(name)
    say(f"{name}: deleted; its commits stay ({source.title})")


@app.command()
def kill(
    job: Annotated[str | None, typer.Argument(help="The job, or one of its pods.")] = None,
    worker: Annotated[str | None, typer.Argument(metavar="[WORKER]", help="The worker: 0, or w0.")] = None,
    graceful: Annotated[bool, typer.Option("--delete", help="Delete the pod as kubectl does, with its grace.")] = False,
    node: Annotated[str | None, typer.Option(help="Of a local run: everything on this node dies.")] = None,
    operator: Annotated[bool, typer.Option("--operator", help="Of a local run: another operator takes over.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Kill a worker, to see that the training goes on: its processes here, its pod by force on a cluster."""
    where = Where(namespace, context, kubeconfig)
    source, name, worker, pod = pick_worker(job, worker, where, changes=True)
    if sum((pod is not None or worker is not None, node is not None, operator)) != 1:
        raise JobError("give one of: a pod, a job and its worker (everstep kill JOB 1), --node NAME, --operator")
    if node is not None:
        say(source.disturb(name, "kill-node", node=node))
    elif operator:
        say(source.disturb(name, "kill-operator"))
    else:
        chosen = _chosen(source.view(name), pod, worker)
        say(f"{source.kill(name, chosen, delete=graceful)} ({source.title})")
