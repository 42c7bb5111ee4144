"""`everstep run`: one local run in this process, the requests of a second terminal, and the report at its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from everstep.cli.jobs import tables
from everstep.cli.printing import SafeConsole, say_error
from everstep.jobs.drawing import draw, text
from everstep.jobs.history import encode, thinned
from everstep.jobs.source import RUNS, JobError, migration
from everstep.jobs.timeline import build
from everstep.jobs.view import View
from everstep_local.run.console import Plain
from everstep_local.run.control import Answer, ControlError, ControlServer, Handler
from everstep_local.run.faults import ALL, Fault, changes_world, due, target
from everstep_local.run.job_file import (
    Overrides,
    Prepared,
    load,
    with_local_checkpoints,
    with_local_claims,
    without_pod_group,
)
from everstep_local.run.local_run import CLAIMS, LocalRun, Options, Outcome, Refused
from everstep_local.run.sources import HISTORY, JOB, STATUS, STEPS_SHOWN, Started, event_rows, kept_log
from everstep_operator.kube.errors import KubeError
from everstep_operator.kube.resources import PODS
from everstep_operator.main import JOBS
from everstep_operator.runtime.clock import cancel
from everstep_operator.telemetry.logs import setup

log = logging.getLogger(__name__)

INTERRUPTED = int(Outcome.INTERRUPTED)
STORY_SECONDS = 0.1  # seconds between checks whether the next fault is due
REFRESH = 0.2  # seconds from one drawing of the table to the next
CELLS = 72
LAST_LINES = 400  # last lines of a worker in which its program's own are searched
FAILURE = 60  # last lines of a worker: torchrun prints 40 lines after the program's
SUMMARY = 3  # last lines of rank 0's program that are shown at the end
# A torchrun that outlives its rendezvous' store prints a C++ backtrace after the program's last lines.
LAUNCHER = re.compile(
    r"$|<omitting python frames>|frame #\d+: |Exception raised from |\[?[WEIF]\d{4} [\d:.]+ |[\d:.]+ everstep-run: "
)


def run(
    job: Path,
    arguments: list[str],
    overrides: Overrides,
    *,
    nodes: int,
    out: Path | None,
    plain: bool,
    story: tuple[Fault, ...] = (),
    page: bool = False,
    started: Started | None = None,
) -> int:
    """Run the job with the faults of `story`; `page`: serve a page about it; `started`: by what a rerun starts it.
    Returns the exit code."""
    loaded = load(job, arguments, overrides)
    # Each run has a folder of its own, so it goes on from another run's commits only with --out or --checkpoint.
    folder = out or Path(RUNS) / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    stored = with_local_checkpoints(without_pod_group(loaded), overrides, folder / "checkpoints")
    prepared = with_local_claims(stored, folder / CLAIMS)
    folder.mkdir(parents=True, exist_ok=True)
    if started is not None:
        started.write(folder)
    (folder / JOB).write_text(json.dumps(prepared.manifest, indent=2, default=str) + "\n", "utf-8")
    console = SafeConsole()
    for note in prepared.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    with (folder / "operator.log").open("w", encoding="utf-8") as file:
        setup("INFO", file)
        options = Options(folder, nodes, overrides.secrets)
        return asyncio.run(_run(prepared, options, console, plain, story, page))


async def _run(
    prepared: Prepared, options: Options, console: Console, plain: bool, story: tuple[Fault, ...], page: bool
) -> int:
    changed = asyncio.Event()
    local = LocalRun(prepared, options, changed.set)
    try:
        async with _page(options.out, console) if page else contextlib.nullcontext():
            return await _play(local, prepared, options, console, plain, story, changed)
    finally:
        local.close()


@contextlib.asynccontextmanager
async def _page(out: Path, console: Console) -> AsyncIterator[None]:
    """Serve a page about this run and the others of this machine, and print its address."""
    from everstep_local.run import page  # noqa: PLC0415  # it loads a template engine, which most runs do not need

    async with page.served(page.LocalJobs(RUNS), page.key_of(out), 0) as address:
        console.print(f"page: {address}", highlight=False, markup=False, soft_wrap=True)
        yield


async def _play(
    local: LocalRun,
    prepared: Prepared,
    options: Options,
    console: Console,
    plain: bool,
    story: tuple[Fault, ...],
    changed: asyncio.Event,
) -> int:
    handlers = Handlers(local)
    async with ControlServer(prepared.name, handlers.by_verb()) as control:  # it may refuse, before anything is started
        if control.name != prepared.name:
            console.print(f"note: another run {prepared.name} is alive: the commands know this one as {control.name}")
        task = asyncio.create_task(local.run())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        shown = asyncio.create_task(_show(local, changed, console, plain or not console.is_terminal))
        waiting = deque(story)
        faults = asyncio.create_task(_play_faults(local, handlers, waiting))
        try:
            outcome = await task
        except asyncio.CancelledError:
            outcome = Outcome.INTERRUPTED
        except Refused as e:
            say_error(f"everstep: the job was refused:\n{e}")
            return 2
        finally:
            await cancel(shown, faults)
        # The report is written before the socket goes, so `status -w` finds it when the run no longer answers.
        for fault in waiting:
            console.print(f"note: --at {fault} never came due", highlight=False, markup=False)
        try:
            _report(local, options.out, console, outcome)
        except Exception as e:
            # The run's outcome counts, even if its report cannot be written.
            log.exception("the report failed")
            say_error(f"everstep: the report could not be written: {e}")
    return int(outcome)


async def _play_faults(local: LocalRun, handlers: Handlers, waiting: deque[Fault]) -> None:
    """Carry out each fault when it is due. Faults that never came due are left in `waiting`."""
    round_before = 0
    while waiting:
        await asyncio.sleep(STORY_SECONDS)
        view = local.view()
        if view is None or (fault := due(tuple(waiting), view, round_before)) is None:
            continue
        pod = target(fault, view)
        try:
            async for _ in handlers.do(fault, pod):
                pass
        except ControlError as e:
            local.did(f"--at {fault}: {e}")
        else:
            round_before = view.round if changes_world(fault, view) else round_before
        waiting.popleft()


async def _show(local: LocalRun, changed: asyncio.Event, console: Console, plain: bool) -> None:
    if plain:
        lines = Plain(console, local.history)
        try:
            while True:
                await changed.wait()
                changed.clear()
                lines.update()
        finally:
            lines.update()
    with Live(console=console, auto_refresh=False, transient=False) as live:

        def refresh() -> None:
            if (view := local.view()) is not None:
                live.update(tables.job(view), refresh=True)

        try:
            while True:
                await changed.wait()
                changed.clear()
                refresh()
                await asyncio.sleep(REFRESH)
        finally:
            refresh()


def _report(local: LocalRun, out: Path, console: Console, outcome: Outcome) -> None:
    """Write the report of the run: its history, its timeline and its last lines."""
    view = local.view()
    timeline = build(local.history)
    local.history.save(out / HISTORY)
    if view is not None:
        (out / STATUS).write_text(json.dumps(view.to_json(), indent=2) + "\n", "utf-8")
    title = f"{local.job.name}: {timeline.outcome} after {timeline.seconds:.1f} s"
    (out / "timeline.svg").write_text(draw(timeline, title), "utf-8")
    console.print(text(timeline, CELLS), highlight=False, markup=False, soft_wrap=True)
    if view is not None and outcome is Outcome.FAILED:
        failure = view.raw_status.get("failure") or {}
        for line in _tail(out, str(failure.get("pod", "")), FAILURE) or failure.get("logLines") or ():
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
        console.print(f"failed: {failure.get('message', view.message)}", highlight=False, markup=False, soft_wrap=True)
    elif view is not None and view.workers:
        last = next((w for w in view.workers if w.rank == 0), view.workers[0])
        for line in last_lines(_tail(out, last.pod, LAST_LINES)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{outcome.name.lower()}; timeline and logs in {out}", highlight=False, soft_wrap=True)


def last_lines(lines: list[str]) -> list[str]:
    """The last lines that a worker's program itself printed."""
    return [line for line in lines if not LAUNCHER.match(line)][-SUMMARY:]


def _tail(out: Path, pod: str, count: int) -> list[str]:
    """The last lines of a worker's log, without their times; none if there is no such log."""
    try:
        return list(kept_log(out, pod, count))
    except JobError:
        return []


class Handlers:
    """The requests of a second terminal. Each is answered with one line, `logs` with many."""

    def __init__(self, local: LocalRun) -> None:
        self._local = local

    def by_verb(self) -> dict[str, Handler]:
        changing: dict[str, Handler] = {
            "delete-job": self.delete_job,
            "kill": self.kill,
            "delete": self.delete,
            "kill-node": self.kill_node,
            "start-node": self.start_node,
            "kill-operator": self.kill_operator,
            "scale": self.scale,
            "suspend": self.suspend,
            "migrate": self.migrate,
        }
        refusing = {verb: self._unless_ended(handler) for verb, handler in changing.items()}
        reading: dict[str, Handler] = {
            "status": self.status,
            "events": self.events,
            "history": self.history,
            "logs": self.logs,
        }
        return {**reading, **refusing}

    def _unless_ended(self, handler: Handler) -> Handler:
        async def refuse_or_do(request: dict[str, Any]) -> AsyncIterator[Answer]:
            if self._local.ended:
                what = "has been deleted" if self._local.deleted else "has ended"
                raise ControlError(f"the job of this run {what}: its processes end, and nothing of it can be changed")
            async for answer in handler(request):
                yield answer

        return refuse_or_do

    def do(self, fault: Fault, pod: str | None) -> AsyncIterator[Answer]:
        """Carry out one fault. `pod`: the pod that it affects, if any."""
        match fault.action:
            case "kill" if fault.argument == ALL:
                return self.kill_all()
            case "kill" | "delete" as verb:
                return self.by_verb()[verb]({"pod": pod})
            case "kill-node":
                return self.kill_node({"node": fault.argument})
            case "scale":
                return self.scale({"replicas": int(fault.argument)})
            case "suspend" | "resume" as verb:
                return self.suspend({"wanted": verb == "suspend"})
            case _:
                return self.kill_operator({})

    def _did(self, what: str, worker: int | None = None) -> Answer:
        self._local.did(what, worker)
        notice = self._local.notice()
        return {"done": f"{what}; note: {notice}" if notice else what}

    def _pod(self, request: dict[str, Any]) -> str:
        names = self._local.pod_names()
        if request.get("pod") not in names:
            raise ControlError(f"no pod {request.get('pod')!r}; there are {', '.join(names) or 'none'}")
        return str(request["pod"])

    async def status(self, _: dict[str, Any]) -> AsyncIterator[Answer]:
        view = self._local.view()
        out = str(self._local.options.out.resolve())
        yield {"view": (view or View.unknown(self._local.job.name)).to_json(), "out": out, "uid": self._local.uid}

    async def events(self, _: dict[str, Any]) -> AsyncIterator[Answer]:
        view = self._local.view()
        rows = event_rows(self._local.history, view.began) if view is not None else []
        yield {"events": [asdict(row) for row in rows]}

    async def history(self, _: dict[str, Any]) -> AsyncIterator[Answer]:
        yield {"entries": [encode(entry) for entry in thinned(self._local.history, STEPS_SHOWN)]}

    async def delete_job(self, _: dict[str, Any]) -> AsyncIterator[Answer]:
        await _kube(self._local.delete_job())
        yield self._did(f"delete {self._local.job.name}")

    async def kill(self, request: dict[str, Any]) -> AsyncIterator[Answer]:
        pod = self._pod(request)
        pids = self._pids(pod)
        if not pids:
            raise ControlError(f"pod {pod} has no running process")
        _kill(pids)
        yield self._did(f"kill {pod}", self._local.worker_of(pod))

    async def kill_all(self) -> AsyncIterator[Answer]:
        """Kill the processes of all pods before the operator learns of the first one."""
        pids = {pod: self._pids(pod) for pod in self._local.pod_names()}
        _kill(chain(*pids.values()))
        for pod in filter(pids.get, pids):
            yield self._did(f"kill {pod}", self._local.worker_of(pod))

    def _pids(self, pod: str) -> list[int]:
        try:
            return list(self._local.nodes.pids(self._local.job.namespace, pod).values())
        except KeyError:  # it has not started, or has ended
            return []

    async def delete(self, request: dict[str, Any]) -> AsyncIterator[Answer]:
        pod = self._pod(request)
        worker = self._local.worker_of(pod)
        await _kube(self._local.client.delete(PODS, self._local.job.namespace, pod))
        yield self._did(f"delete {pod}", worker)

    async def migrate(self, request: dict[str, Any]) -> AsyncIterator[Answer]:
        pod, job = self._pod(request), self._local.job
        stored = await self._local.client.get(JOBS, job.namespace, job.name)
        patch = migration(stored.metadata.annotations, self._local.pod_names(), pod)
        await _kube(self._local.client.merge_patch(JOBS, job.namespace, job.name, patch))
        yield self._did(f"migrate {pod}", self._local.worker_of(pod))

    async def kill_node(self, request: dict[str, Any]) -> AsyncIterator[Answer]:
        node = str(request.get("node"))
        try:
            self._local.nodes.kill(node)
        except KeyError:
            raise ControlError(no_node(node, self._local.options.nodes)) from None
        yield self._did(f"kill {node}")

    async def start_node(self, request: dict[str, Any]) -> AsyncIterator[Answer]:
        node = str(request.get("node"))
        try:
            self._local.nodes.start(node)
        except KeyError:
            raise ControlError(no_node(node, self._local.options.nodes)) from None
        yield self._did(f"start {node}")

    async def kill_operator(self, _: dict[str, Any]) -> AsyncIterator[Answer]:
        await self._local.restart_operator()
        yield self._did("kill operator")

    async def scale(self, request: dict[str, Any]) -> AsyncIterator[Answer]:
        replicas = request.get("replicas")
        await self._patch({"replicas": replicas})
        yield self._did(f"scale to {replicas}")

    async def suspend(self, request: dict[str, Any]) -> AsyncIterator[Answer]:
        wanted = request.get("wanted") is True
        await self._patch({"suspend": wanted})
        yield self._did("suspend" if wanted else "resume")

    async def logs(self, request: dict[str, Any]) -> AsyncIterator[Answer]:
        pod, tail = str(request.get("pod")), request.get("tail")
        if pod in self._local.pod_names():
            namespace, follow = self._local.job.namespace, request.get("follow") is True
            try:
                async for line in self._local.nodes.logs(namespace, pod, tail=tail, follow_=follow):
                    yield {"line": line.text}
            except KeyError:
                raise ControlError(f"pod {pod} has not started yet") from None
            return
        try:  # it is gone, and its log is kept
            for text in kept_log(self._local.options.out, pod, tail):
                yield {"line": text}
        except JobError as e:
            raise ControlError(str(e)) from e

    async def _patch(self, spec: dict[str, Any]) -> None:
        job = self._local.job
        await _kube(self._local.client.merge_patch(JOBS, job.namespace, job.name, {"spec": spec}))


def no_node(node: str, count: int) -> str:
    if count == 1:
        return f"no node {node!r}; this run has one, node-1: begin it with --nodes 2 or more to lose one of several"
    return f"no node {node!r}; they are node-1 to node-{count}"


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _kube(request: Any) -> None:
    """Carry out a request. A refusal of the cluster becomes the error that the person reads."""
    try:
        await request
    except KubeError as e:
        causes = [c.message.removeprefix('Invalid value: "object": ') for c in e.causes]
        raise ControlError("; ".join(causes) or e.message) from e
