"""Keeps a job's rendezvous document in a ConfigMap that the job owns, so that it outlives the operator.

The ConfigMap's resource version is the document's version, so the API server does the compare-and-swap. `publish` gives
a new round its number: it raises `status.world.round` by a compare-and-swap of the job, and gives the number to one
caller only, ever (ADR 0001). This module knows nothing of agents. Invariant: even if the document for a published
number is never written, the next number is larger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everstep.contract import labels
from everstep.contract.fields import MAX_NUMBER
from everstep_operator import object_names
from everstep_operator.errors import RetryableError, TerminalError
from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.errors import AlreadyExists, Conflict, Forbidden, Invalid, KubeError, NotFound, Rejected
from everstep_operator.kube.resources import CONFIGMAPS, Resource
from everstep_operator.kube.wire import ConfigMap, Unstructured, controller_of, controller_uid

KEY = "document"
# The agents' lease. Presence is in the leader's memory, and the next leader must know how long to wait for agents. It
# is an annotation, because a document may fill all the data that a ConfigMap can hold.
LEASE = f"{labels.GROUP}/lease-seconds"
TRIES = 8  # attempts at a publication while the planner writes the status too


class RoundsUnavailable(RetryableError):
    """The API server did not answer, or it is unknown whether it wrote: try again."""


class NameTaken(RoundsUnavailable):
    """The ConfigMap's name belongs to another object."""


class WriteRefused(RoundsUnavailable):
    """The API server refuses the ConfigMap: quota, an admission webhook, missing rights."""


class RoundsRefused(TerminalError):
    """This is refused for this sender for good; the message is sent to it."""


@dataclass(frozen=True, slots=True)
class JobRef:
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document in the API server; version 0 and None: there is none."""

    document: str | None = None
    version: int = 0
    lease: float = 0.0  # seconds


@dataclass(frozen=True, slots=True)
class WriteFailure:
    """Why a job's ConfigMap cannot be written, in sentences for its status. `name_taken`: the object that has its name.
    `refused`: what the API server's reason."""

    name_taken: str | None = None
    refused: str | None = None


def config_map_name(job: str) -> str:
    return f"{job}-rounds"


class RoundDocuments:
    """`require_leading` raises when this replica may not write."""

    def __init__(
        self, client: KubeClient, jobs: Resource[Unstructured], *, require_leading: Callable[[], object]
    ) -> None:
        self._client, self._jobs, self._require_leading = client, jobs, require_leading

    async def load(self, job: JobRef) -> StoredDocument:
        """Read consistently. Raises RoundsUnavailable."""
        try:
            config_map = await self._client.get(CONFIGMAPS, job.namespace, config_map_name(job.name))
        except NotFound:
            return StoredDocument()
        except KubeError as e:
            raise RoundsUnavailable(f"the document cannot be read: {e}") from e
        return self._stored_document(job, config_map)

    async def store(self, job: JobRef, expected: int, document: str, lease: float = 0.0) -> StoredDocument | None:
        """Write if the version is still `expected`; None if another is there.

        Raises RoundsUnavailable, after which it may have been written.
        """
        name = config_map_name(job.name)
        body: dict[str, Any] = {
            "metadata": {
                **object_names.metadata(name, job.name, job.namespace, job.uid),
                "annotations": {LEASE: f"{lease:g}"},
            },
            "data": {KEY: document},
        }
        self._require_leading()
        try:
            if expected == 0:
                written = await self._client.create(CONFIGMAPS, job.namespace, body)
            else:
                body["metadata"]["resourceVersion"] = str(expected)
                written = await self._client.replace(CONFIGMAPS, job.namespace, name, body)
        except (AlreadyExists, Conflict, NotFound):
            return None
        except (Forbidden, Invalid, Rejected) as e:
            raise WriteRefused(f"ConfigMap {name}: {str(e)[:500]}") from e
        except KubeError as e:
            raise RoundsUnavailable(f"the document cannot be written: {e}") from e
        return self._stored_document(job, written)

    async def publish(self, job: JobRef, above: int) -> int:
        """A round number that no other caller has or will get, greater than `above` and than any published number.

        Raises RoundsUnavailable, RoundsRefused when the job is gone.
        """
        for _ in range(TRIES):
            self._require_leading()
            try:
                current = await self._client.get(self._jobs, job.namespace, job.name)
                if current.metadata.uid != job.uid or current.metadata.deletion_timestamp is not None:
                    raise RoundsRefused(f"job {job.name} is gone, or another has its name now")
                number = max(above, published_round(current)) + 1
                if number >= MAX_NUMBER:
                    raise RoundsRefused(f"round {number} cannot be counted")
                self._require_leading()
                await self._client.patch_status(
                    self._jobs,
                    job.namespace,
                    job.name,
                    {"world": {"round": number}},
                    resource_version=current.metadata.resource_version,
                )
            except Conflict:
                continue  # the planner wrote, or another operator published: the next attempt reads the new number
            except NotFound as e:
                raise RoundsRefused(f"job {job.name} is gone") from e
            except KubeError as e:
                raise RoundsUnavailable(f"the round cannot be published: {e}") from e
            return number
        raise RoundsUnavailable("the job's status changes all the time")

    @staticmethod
    def _stored_document(job: JobRef, config_map: ConfigMap) -> StoredDocument:
        meta = config_map.metadata
        if controller_uid(meta) != job.uid:
            raise NameTaken(
                object_names.name_collision("ConfigMap", meta.name, job.namespace, job.name, controller_of(meta))
            )
        if not meta.resource_version.isdigit():
            raise RoundsUnavailable(f"resource version {meta.resource_version!r} is no number: versions have no order")
        return StoredDocument(
            config_map.data.get(KEY, ""), int(meta.resource_version), _seconds(meta.annotations.get(LEASE, ""))
        )


def published_round(job: Unstructured) -> int:
    """`status.world.round`: no round of the job has a greater number."""
    world = job.status.get("world")
    number = world.get("round", 0) if isinstance(world, dict) else 0
    return number if isinstance(number, int) else 0


def _seconds(text: str) -> float:
    return float(text) if text.replace(".", "", 1).isdecimal() else 0.0
