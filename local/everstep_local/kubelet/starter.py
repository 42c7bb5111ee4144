"""Prepares what a pod's processes need (folders, volumes, tokens, commands), and reads their termination message.

Invariant: the preparation may be repeated until it succeeds. A second attempt continues from what the first one left.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everstep_local.kubelet.addresses import Addresses, PodHost
from everstep_local.kubelet.environment import Machine, command
from everstep_local.kubelet.pod_status import MAX_MESSAGE
from everstep_local.kubelet.processes.log import last_text
from everstep_local.kubelet.processes.process import ProcessSpec
from everstep_local.kubelet.sources import NotStartable, PodFacts, Sources
from everstep_local.kubelet.volumes import Token, TokenIssuer, Volumes
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import KubeError
from everstep_operator.kube.wire import Unstructured
from everstep_operator.runtime.clock import Clock
from everstep_operator.runtime.randomness import Random

log = logging.getLogger(__name__)

LOG_BYTES = 64 * 1024 * 1024
TOKEN_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Host:
    """Settings of all kubelets of this machine. `workdir`: the job file's folder, in which containers run. `pass_env`:
    more variables of this process that containers get. `log_bytes`: the bound of each log. `claims`: has a folder for
    each volume claim; without it, pods with claims are refused."""

    client: KubeClient
    issue_token: TokenIssuer
    clock: Clock
    rng: Random
    addresses: Addresses
    workdir: Path | None = None
    pass_env: frozenset[str] = frozenset()
    log_bytes: int = LOG_BYTES
    claims: Path | None = None


class Starter:
    """The starter of one pod, to which `folder` belongs alone."""

    def __init__(self, host: Host, folder: Path) -> None:
        self._host = host
        self._folder = folder
        self._volumes: Volumes | None = None
        self._tokens: tuple[Token, ...] = ()

    def folder_of(self, container: str) -> Path:
        """The folder of a container's log and termination message."""
        return self._folder / "containers" / container

    def address(self, pod: Unstructured) -> str:
        """The pod's IP. Raises AddressesExhausted."""
        return self._host.addresses.address_of(own_host(pod), pod.metadata.uid)

    async def prepare(self, pod: Unstructured, containers: Sequence[Mapping[str, Any]]) -> dict[str, ProcessSpec]:
        """The processes to run, by container name. Raises NotStartable, AddressesExhausted, KubeError and OSError."""
        _require_supported(pod.spec)
        facts = PodFacts(pod, self.address(pod))
        sources = Sources(self._host.client, pod.metadata.namespace)
        if self._volumes is None:
            volumes = Volumes(self._folder / "volumes", self._host.claims, facts, self._host.issue_token)
            self._tokens = await volumes.make(sources, self._host.clock.monotonic())
            self._volumes = volumes
        try:
            return {str(c["name"]): await self._spec(c, facts, sources, self._volumes) for c in containers}
        except (AttributeError, TypeError, ValueError, KeyError) as e:
            # A template may contain any field. A real API server would have refused this one.
            raise NotStartable(f"the pod's spec cannot be carried out, a field has a wrong type: {e}") from e

    async def _spec(
        self, container: Mapping[str, Any], facts: PodFacts, sources: Sources, volumes: Volumes
    ) -> ProcessSpec:
        folder = self.folder_of(str(container["name"]))
        for path in (folder, self._folder / "tmp", self._folder / "work"):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        termination_log = folder / "termination-log"
        termination_log.touch(mode=0o600)
        machine = Machine(
            workdir=self._host.workdir or self._folder / "work",
            tmp=self._folder / "tmp",
            termination_log=termination_log,
            paths=volumes.paths(container),
            addresses=self._host.addresses,
            host=own_host(facts.pod),
            pass_env=self._host.pass_env,
        )
        ready = await command(container, facts, sources, machine)
        return ProcessSpec(
            argv=ready.argv,
            env=ready.env,
            cwd=ready.cwd,
            log=folder / "log",
            log_limit=self._host.log_bytes,
            folder=self._folder,
            # The UID is not enough: an in-memory cluster with the same seed has the same UIDs in another run.
            mark=str(self._folder),
        )

    async def refresh(self, now: float) -> float | None:
        """Replace the tokens that are due. Return when (in seconds of the clock) the next one is due; None if there is
        none."""
        fresh = []
        for token in self._tokens:
            fresh.append(token)
            if now < token.refresh_at:
                continue
            assert self._volumes is not None
            try:
                fresh[-1] = await self._volumes.issue(token, now)
            except (KubeError, OSError) as e:
                # The old token is valid for some more time.
                log.warning("token not refreshed", extra={"path": str(token.path), "error": str(e)})
                fresh[-1] = replace(token, refresh_at=now + TOKEN_RETRY_SECONDS)
        self._tokens = tuple(fresh)
        return min((token.refresh_at for token in self._tokens), default=None)


def own_host(pod: Unstructured) -> PodHost:
    meta, spec = pod.metadata, pod.spec
    return PodHost(meta.namespace, str(spec.get("hostname") or meta.name), str(spec.get("subdomain") or ""))


def _require_supported(spec: Mapping[str, Any]) -> None:
    policy = spec.get("restartPolicy", "Always")
    if policy != "Never":
        raise NotStartable(f"spec.restartPolicy {policy} is not supported in local mode; use Never")
    if any(c.get("restartPolicy") == "Always" for c in spec.get("initContainers") or ()):
        raise NotStartable("an init container with restartPolicy Always is not supported in local mode; remove it")


def start_error(container: Mapping[str, Any], number: int) -> str:
    """The error in the words of a container runtime. `number` is the errno."""
    program = (container.get("command") or [""])[0]
    reason = "executable file not found in $PATH" if number == errno.ENOENT else os.strerror(number)
    return f'failed to start container: exec: "{program}": {reason}'


def termination_message(folder: Path, container: Mapping[str, Any], code: int) -> str:
    """The message that the program wrote. If there is none and the container failed, the end of its log, if it asks for
    that."""
    try:
        with (folder / "termination-log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_MESSAGE))
            text = file.read(MAX_MESSAGE).decode("utf-8", "replace")
    except OSError:
        text = ""
    if not text and code != 0 and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
        text = last_text(folder / "log", lines=80, size=2048)
    return text
