"""Runs one pod on one node: makes it, runs it, ends it, removes it.

Each pod has one task. It waits for changes of the pod's object, for its processes and for the clock at once. After each
event it looks at all of them again, so the order of events does not matter. Another task writes the status. Invariants:
when `run` has returned, no process of the pod is left. Only cancellation ends it before the pod's object is gone, and
that writes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from everstep_local.kubelet.addresses import AddressesExhausted
from everstep_local.kubelet.pod_status import (
    ContainerState,
    PodView,
    Running,
    Terminated,
    Waiting,
    pod_status,
)
from everstep_local.kubelet.processes.process import Process
from everstep_local.kubelet.sources import PODS, NotStartable
from everstep_local.kubelet.starter import Host, Starter, own_host, start_error, termination_message
from everstep_local.kubelet.status_reporter import StatusReporter
from everstep_operator.kube.errors import Conflict, KubeError, NotFound
from everstep_operator.kube.wire import Unstructured
from everstep_operator.runtime.clock import cancel, shielded_cleanup, wait_event

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0  # between two attempts to start a pod, or to remove it
DEFAULT_GRACE = 30
FINISHED = ("Succeeded", "Failed")


class PodRun:
    """The run of one pod. `folder` belongs to this pod alone, and stays until the pod is gone."""

    def __init__(self, host: Host, folder: Path, pod: Unstructured) -> None:
        self._host = host
        self._folder = folder
        self._pod = pod
        self._starter = Starter(host, folder)
        self._gone = False
        self._event = asyncio.Event()
        self._processes: dict[str, Process] = {}
        self._started_at: dict[str, datetime] = {}
        self._finished = pod.status.get("phase") in FINISHED
        self._killed = False
        self._off = False
        self._term_at: float | None = None
        self._begun = host.clock.monotonic()
        first = Waiting("PodInitializing" if self._inits else "ContainerCreating")
        self._view = PodView(
            states={str(c["name"]): first for c in self._containers},
            init_states={str(c["name"]): Waiting("PodInitializing") for c in self._inits},
            start_time=host.clock.now(),
        )
        self._reporter = StatusReporter(
            host.client, pod.key, pod.metadata.uid, clock=host.clock, rng=host.rng, on_gone=self.vanish
        )

    # Calls that bring news; none of these waits.

    def update(self, pod: Unstructured) -> None:
        """Take the object's newest state."""
        self._pod = pod
        self._event.set()

    def vanish(self) -> None:
        """The object is gone: it was deleted by force, or while no watch was open."""
        self._gone = True
        self._event.set()

    def power_off(self) -> None:
        """Send SIGKILL to all processes, and report nothing more to the API server. Cancel the task too."""
        self._reporter.mute()
        self._off = True
        self._kill()

    # Questions of callers.

    @property
    def ended(self) -> bool:
        """Whether nothing more will be logged."""
        return self._gone or self._finished

    def log_path(self, container: str | None) -> Path:
        """The log of that container, or of the first one. Raises KeyError."""
        names = [str(c["name"]) for c in (*self._containers, *self._inits)]
        name = container or names[0]
        if name not in names:
            raise KeyError(f"container {name!r} is not in the pod, which has {', '.join(names)}")
        return self._starter.folder_of(name) / "log"

    def pids(self) -> dict[str, int]:
        """The main process of each container that runs."""
        return {name: p.pid for name, p in self._processes.items() if p.pid is not None and p.exit_code is None}

    async def run(self) -> None:
        reporter = asyncio.create_task(self._reporter.run())
        # A second cancellation must not leave this in the middle. It has a bound: the processes are killed.
        async with shielded_cleanup(lambda: self._end(reporter)):
            await self._live()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _end(self, reporter: asyncio.Task[None]) -> None:
        self._kill()
        for process in self._processes.values():
            await process.wait()
        await cancel(reporter)
        self._host.addresses.release(self._pod.metadata.uid)

    # The pod's run.

    @property
    def _containers(self) -> Sequence[Mapping[str, Any]]:
        return self._pod.spec.get("containers") or ()

    @property
    def _inits(self) -> Sequence[Mapping[str, Any]]:
        return self._pod.spec.get("initContainers") or ()

    @property
    def _deleting(self) -> bool:
        return self._pod.metadata.deletion_timestamp is not None

    @property
    def _over(self) -> bool:
        return self._gone or self._deleting

    async def _live(self) -> None:
        if not self._finished:
            if _was_started(self._pod):
                self._lose()
            else:
                await self._start_and_supervise()
            self._finished = True
        while not self._over:
            await self._wait(None)
        if not self._gone:
            await self._reporter.flush()
            await self._remove()

    def _lose(self) -> None:
        """The node went down: as a container runtime does, report dead containers of unknown cause."""
        now = self._host.clock.now()
        lost = Terminated(255, "Unknown", "", now, now)
        self._view = replace(
            self._view,
            states=dict.fromkeys(self._view.states, lost),
            init_states={name: Terminated(0, "Completed", "", now, now) for name in self._view.init_states},
            pod_ip=str(self._pod.status.get("podIP") or ""),
        )
        self._show()

    async def _start_and_supervise(self) -> None:
        for stage in [*([c] for c in self._inits), list(self._containers)]:
            if not await self._start(stage):
                return
            await self._supervise()
            if self._over or self._view.reason or any(_failed(s) for s in self._view.init_states.values()):
                return

    async def _start(self, stage: list[Mapping[str, Any]]) -> bool:
        """Whether the stage's processes were started; False if the pod ended before."""
        while not self._over:
            if self._expired(self._host.clock.monotonic()):
                self._show()
                return False
            try:
                address = self._starter.address(self._pod)
                if self._view.pod_ip != address:
                    self._view = replace(self._view, pod_ip=address)
                    self._show()
                specs = await self._starter.prepare(self._pod, stage)
                if self._over:
                    return False
                self._host.addresses.before_start(own_host(self._pod))
                for name, spec in specs.items():
                    if name not in self._processes:
                        self._processes[name] = Process.start(spec, self._event.set)
                        self._started_at[name] = self._host.clock.now()
                return True
            except (NotStartable, AddressesExhausted, KubeError, OSError) as e:
                reason = e.reason if isinstance(e, NotStartable) else "CreateContainerError"
                waiting = Waiting(reason, str(e))
                self._set({name: waiting for c in stage if (name := str(c["name"])) not in self._processes})
                await self._wait(RETRY_SECONDS)
        return False

    async def _supervise(self) -> None:
        """Wait until every process of the stage has ended."""
        while True:
            self._collect()
            if all(p.exit_code is not None for p in self._processes.values()):
                return
            await self._wait(await self._act())

    async def _act(self) -> float | None:
        """End processes and refresh tokens that are due. Return the seconds until the next check."""
        now = self._host.clock.monotonic()
        ends = [end for end in (self._grace_ends(now), self._deadline()) if end is not None]
        if self._gone or any(now >= end for end in ends):
            self._expired(now)
            if not self._killed:
                self._killed = True
                self._kill()
            return None
        refresh = await self._starter.refresh(now)
        due = [*ends, refresh] if refresh is not None else ends
        return max(0.0, min(due) - self._host.clock.monotonic()) if due else None

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _grace_ends(self, now: float) -> float | None:
        if not self._deleting:
            return None
        if self._term_at is None:
            self._term_at = now
            for process in self._processes.values():
                process.terminate()
        # It is computed each time, because a second delete may have shortened it.
        grace = self._pod.metadata.deletion_grace_period_seconds
        return self._term_at + (DEFAULT_GRACE if grace is None else grace)

    def _deadline(self) -> float | None:
        limit = self._pod.spec.get("activeDeadlineSeconds")
        return None if limit is None else self._begun + float(limit)

    def _expired(self, now: float) -> bool:
        """Whether the pod's deadline has passed. Then the whole pod fails."""
        deadline = self._deadline()
        if deadline is None or now < deadline:
            return False
        message = "Pod was active on the node longer than the specified deadline"
        self._view = replace(self._view, reason="DeadlineExceeded", message=message)
        return True

    def _collect(self) -> None:
        """Take in the reports of the processes."""
        states = {**self._view.init_states, **self._view.states}
        changed: dict[str, ContainerState] = {}
        for name, process in self._processes.items():
            state = states[name]
            if isinstance(state, Terminated):
                continue
            if process.exit_code is not None:
                changed[name] = self._ended(name, process, process.exit_code)
            elif process.pid is not None and not isinstance(state, Running):
                changed[name] = Running(self._started_at[name], process.pid)
        if changed:
            self._set(changed)

    def _ended(self, name: str, process: Process, code: int) -> Terminated:
        started, now = self._started_at[name], self._host.clock.now()
        container = next(c for c in (*self._containers, *self._inits) if c["name"] == name)
        if process.refused is not None:
            return Terminated(128, "StartError", start_error(container, process.refused.errno), started, now)
        message = termination_message(self._starter.folder_of(name), container, code)
        return Terminated(code, "Completed" if code == 0 else "Error", message, started, now)

    def _set(self, states: Mapping[str, ContainerState]) -> None:
        inits = {n: states.get(n, s) for n, s in self._view.init_states.items()}
        mains = {n: states.get(n, s) for n, s in self._view.states.items()}
        if (inits, mains) != (self._view.init_states, self._view.states):
            self._view = replace(self._view, states=mains, init_states=inits)
            self._show()

    def _show(self) -> None:
        view, containers, inits = self._view, self._containers, self._inits
        self._reporter.show(lambda previous, now: pod_status(view, previous, containers, inits, now))

    async def _wait(self, seconds: float | None) -> None:
        """Wait for news, or for that long."""
        await wait_event(self._host.clock, self._event, seconds)
        self._event.clear()

    async def _remove(self) -> None:
        """Remove the object, as a kubelet does at the end."""
        meta = self._pod.metadata
        while not self._gone and not self._off:
            try:
                await self._host.client.delete(PODS, meta.namespace, meta.name, uid=meta.uid, grace_seconds=0)
                return
            except (NotFound, Conflict):
                return  # it is gone, or a successor has the name
            except KubeError as e:
                log.warning("pod not removed yet", extra={"pod": meta.name, "error": str(e)})
                await self._wait(RETRY_SECONDS)


def _failed(state: ContainerState) -> bool:
    return isinstance(state, Terminated) and state.exit_code != 0


def _was_started(pod: Unstructured) -> bool:
    """Whether any container ever ran, by the stored status."""
    statuses = [*(pod.status.get("initContainerStatuses") or ()), *(pod.status.get("containerStatuses") or ())]
    return any({"running", "terminated"} & set(s.get("state") or {}) for s in statuses)
