"""The in-memory Kubernetes cluster, for simulations and for local mode.

`MemoryCluster` is the cluster, and `client()` makes a connection to it. Any number of clients see the same objects. A
pod is assigned to a node through `kinds.BINDINGS`, as by a scheduler. Clock and random numbers are passed in: with a
`ManualClock` and a seed, the same calls give the same UIDs, versions and times.

`tests/conformance` compares it with the real API server; docs/reference/in-memory-cluster.md says where they differ.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from typing import Any

from everstep_local.apiserver.client import MemoryClient
from everstep_local.apiserver.faults import Faults
from everstep_local.apiserver.garbage_collector import Collector
from everstep_local.apiserver.kinds.builtin import BUILTIN
from everstep_local.apiserver.kinds.custom import custom_kind, training_jobs
from everstep_local.apiserver.kinds.kind import NAMESPACES, Kinds
from everstep_local.apiserver.server import POD_TABLE, Server
from everstep_local.apiserver.storage.merging import copied
from everstep_local.apiserver.storage.store import HISTORY, Store
from everstep_local.apiserver.tokens import Claims, TokenAuthority
from everstep_operator.runtime.clock import Clock


class MemoryCluster:
    """The cluster. Use it in one event loop. `history`: the number of events that a resource remembers for its
    watchers."""

    def __init__(
        self,
        clock: Clock,
        *,
        seed: int = 0,
        history: int = HISTORY,
        namespaces: Iterable[str] = ("default", "kube-system", "kube-node-lease"),
    ) -> None:
        """Makes `namespaces`, each with its service account `default`, and serves TrainingJobs."""
        rng = random.Random(seed)  # noqa: S311 - names and UIDs of a simulation
        self._clock = clock
        self._collector = Collector()
        self._collection: asyncio.Handle | None = None
        self._server = Server(Store(history), Kinds((*BUILTIN, training_jobs())), clock, rng, self._touched)
        self._tokens = TokenAuthority(rng.randbytes(32), lambda: clock.now().timestamp(), self._pod_is)
        for name in namespaces:
            self.create_namespace(name)

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def resource_version(self) -> str:
        """The resource version of the newest change."""
        return str(self._server.store.version)

    def client(self, *, faults: Faults | None = None) -> MemoryClient:
        """A new connection."""
        return MemoryClient(self._server, self._tokens, faults)

    def create_namespace(self, name: str) -> None:
        """Create a namespace, as `client().create(NAMESPACES, …)`, before a loop runs."""
        self._server.create(self._server.kinds.of(NAMESPACES), None, {"metadata": {"name": name}})
        self.collect()  # this creates its service account

    def install(self, definition: Mapping[str, Any]) -> None:
        """Serve the custom resource of a CRD with one version. Raises ValueError for parts of a CRD that are not
        implemented here."""
        self._server.kinds.install(custom_kind(copied(definition)))

    def issue_token(
        self, namespace: str, service_account: str, pod_name: str, pod_uid: str, audience: str, seconds: float
    ) -> str:
        """A token as a kubelet mounts it, valid for `seconds`. With `pod_name` and `pod_uid` empty it is bound to no
        pod."""
        expires = self._clock.now().timestamp() + seconds
        return self._tokens.issue(Claims(namespace, service_account, pod_name, pod_uid, audience, expires))

    def compact(self) -> str:
        """Forget the history: a watch from an earlier version gets 410. Returns the version from which one can still
        watch."""
        return str(self._server.store.compact())

    def collect(self) -> None:
        """Run garbage collection now, and not only in the next pass of the event loop."""
        self._collector.collect(self._server)
        if self._collection is not None:
            self._collection.cancel()
            self._collection = None

    def _touched(self, uid: str) -> None:
        self._collector.touch(uid)
        if self._collection is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return  # before a loop runs there are only namespaces
            self._collection = loop.call_soon(self.collect)

    def _pod_is(self, namespace: str, name: str, uid: str) -> bool:
        stored = self._server.store.table(POD_TABLE).get((namespace, name))
        return stored is not None and stored.uid == uid
