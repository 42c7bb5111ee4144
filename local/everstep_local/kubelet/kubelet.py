"""The agent of one simulated node: runs the pods that are bound to it, as processes of this machine.

One watch serves all nodes of a machine, and passes each pod to its kubelet. Each pod gets a task of its own.
Invariants: a pod, by UID, has at most one task. When `run` has returned, nothing of any pod runs.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from everstep_local.kubelet.pod_run import PodRun
from everstep_local.kubelet.starter import Host
from everstep_operator.kube.wire import Unstructured
from everstep_operator.runtime.clock import cancel

log = logging.getLogger(__name__)


class Kubelet:
    """The kubelet of node `name`, with all files below `folder`. `run` it in a task. Pods that it received earlier
    start then."""

    def __init__(self, name: str, host: Host, folder: Path) -> None:
        self.name = name
        self._host = host
        self._folder = folder
        self._known: dict[str, Unstructured] = {}  # by UID: the newest state of each pod bound here
        self._runs: dict[str, tuple[PodRun, asyncio.Task[None]]] = {}
        self._on = False

    def see(self, pod: Unstructured) -> None:
        """Note that a pod bound to this node was created or changed."""
        uid = pod.metadata.uid
        self._known[uid] = pod
        if not self._on:
            return
        if uid in self._runs:
            self._runs[uid][0].update(pod)
        else:
            self._begin(pod)

    def forget(self, uid: str) -> None:
        """Note that the object is gone."""
        self._known.pop(uid, None)
        if uid in self._runs:
            self._runs[uid][0].vanish()

    def find(self, uid: str) -> PodRun | None:
        """The run of the pod on this node."""
        return self._runs[uid][0] if uid in self._runs else None

    async def run(self) -> None:
        """Run pods until cancelled. After that nothing of them runs."""
        self._on = True
        self._remove_unknown_folders()
        try:
            for pod in list(self._known.values()):
                self._begin(pod)
            await asyncio.Event().wait()
        finally:
            self._on = False
            self.power_off()
            await cancel(*(task for _, task in self._runs.values()))

    def power_off(self) -> None:
        """Send SIGKILL to all processes of all pods, without a report to the API server. Cancel `run` too."""
        for run, _ in self._runs.values():
            run.power_off()

    def _begin(self, pod: Unstructured) -> None:
        uid = pod.metadata.uid
        run = PodRun(self._host, self._folder / _short(uid), pod)
        task = asyncio.create_task(run.run(), name=f"pod {pod.metadata.name}")
        self._runs[uid] = (run, task)
        task.add_done_callback(lambda done: self._done(uid, done))

    def _done(self, uid: str, task: asyncio.Task[None]) -> None:
        # By then a restarted kubelet may have begun the pod again.
        if uid in self._runs and self._runs[uid][1] is task:
            del self._runs[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a pod's task failed", exc_info=error, extra={"node": self.name, "uid": uid})

    def _remove_unknown_folders(self) -> None:
        """Remove the folders of pods that were deleted while the node was off."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        wanted = {_short(uid) for uid in self._known}
        for folder in self._folder.iterdir():
            if folder.name not in wanted:
                shutil.rmtree(folder, ignore_errors=True)


def _short(uid: str) -> str:
    """A part of a UID that is enough to distinguish pods, because sockets below the folder need short paths."""
    return uid.replace("-", "")[:16]
