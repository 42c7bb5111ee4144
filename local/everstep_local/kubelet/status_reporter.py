"""Writes a pod's status until it succeeds, without delaying the task that watches the processes.

Invariant: it writes the newest view to the object of this UID by compare-and-swap, so two writers of conditions do not
undo each other's changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeAlias

from everstep_local.kubelet.sources import PODS
from everstep_operator.kube.backoff import Backoff
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import Conflict, KubeError, NotFound
from everstep_operator.runtime.clock import Clock, wait_event
from everstep_operator.runtime.randomness import Random

log = logging.getLogger(__name__)

BACKOFF = Backoff(base=0.05, cap=2.0)
# A pod that has to go does not wait for a status that the server refuses.
FLUSH_SECONDS = 5.0
# The previous status and the time -> the status to merge into it.
View: TypeAlias = Callable[[Mapping[str, Any], datetime], dict[str, Any]]


class ObjectGone(Exception):
    """The object with this UID no longer exists."""


class StatusReporter:
    """The reporter of one pod. `run` it in a task. `on_gone` is called when the object no longer exists."""

    def __init__(
        self,
        client: KubeClient,
        key: tuple[str, str],
        uid: str,
        *,
        clock: Clock,
        rng: Random,
        on_gone: Callable[[], None],
    ) -> None:
        self._client = client
        self._namespace, self._name = key
        self._uid = uid
        self._clock = clock
        self._rng = rng
        self._on_gone = on_gone
        self._muted = False
        self._wanted: View | None = None
        self._changed = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()

    def show(self, view: View) -> None:
        """Write this view, in place of one that is not written yet."""
        self._wanted = view
        self._written.clear()
        self._changed.set()

    def mute(self) -> None:
        """Write nothing from now on, and cancel the present write if possible."""
        self._muted = True

    async def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Return when the newest view is written or the object is gone; after `seconds` in any case."""
        await wait_event(self._clock, self._written, seconds)

    async def run(self) -> None:
        failures = 0
        while True:
            await self._changed.wait()
            self._changed.clear()
            view = self._wanted
            if view is None or self._muted:
                continue
            try:
                await self._write(view)
            except ObjectGone:
                self._written.set()
                self._on_gone()
                return
            except Conflict:
                self._changed.set()
                continue
            except KubeError as error:
                level = logging.WARNING if failures == 0 else logging.DEBUG
                log.log(level, "pod status not written", extra={"pod": self._name, "error": str(error)})
                await self._clock.sleep(max(BACKOFF.delay(failures, self._rng()), error.retry_after or 0.0))
                failures += 1
                self._changed.set()
                continue
            failures = 0
            if self._wanted is view:
                self._wanted = None
                self._written.set()

    async def _write(self, view: View) -> None:
        try:
            pod = await self._client.get(PODS, self._namespace, self._name)
            if pod.metadata.uid != self._uid:
                raise ObjectGone
            status = view(pod.status, self._clock.now())
            if self._muted or all(pod.status.get(field) == value for field, value in status.items()):
                return
            version = pod.metadata.resource_version
            await self._client.patch_status(PODS, self._namespace, self._name, status, resource_version=version)
        except NotFound as e:
            raise ObjectGone from e
