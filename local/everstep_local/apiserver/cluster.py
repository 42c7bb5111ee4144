"""A Kubernetes API in memory, for simulations and for local mode.

`MemoryCluster` is the cluster, `client()` one connection to it; any number of clients see the same objects. A pod goes
to a node through `kinds.BINDINGS`, as a scheduler binds it. Nothing here reads a clock or draws a number that was not
passed in: with a `ManualClock` and a seed, the same calls give the same UIDs, versions and times.

It is held to the real API server by `tests/conformance`; docs/reference/in-memory-cluster.md says where they differ.
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
    """Use it in one event loop. `history` is how many events a resource remembers for its watchers."""

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
        """Of the newest change."""
        return str(self._server.store.version)

    def client(self, *, faults: Faults | None = None) -> MemoryClient:
        """A connection of its own."""
        return MemoryClient(self._server, self._tokens, faults)

    def create_namespace(self, name: str) -> None:
        """As `client().create(NAMESPACES, …)`, for where no loop runs yet."""
        self._server.create(self._server.kinds.of(NAMESPACES), None, {"metadata": {"name": name}})
        self.collect()  # which gives it its service account

    def install(self, definition: Mapping[str, Any]) -> None:
        """Serve the custom resource of a CRD with one version. Raises ValueError for what is not implemented here."""
        self._server.kinds.install(custom_kind(copied(definition)))

    def issue_token(
        self, namespace: str, service_account: str, pod_name: str, pod_uid: str, audience: str, seconds: float
    ) -> str:
        """A token as a kubelet mounts it, good for `seconds`; `pod_name` and `pod_uid` empty: bound to no pod."""
        expires = self._clock.now().timestamp() + seconds
        return self._tokens.issue(Claims(namespace, service_account, pod_name, pod_uid, audience, expires))

    def compact(self) -> str:
        """Forget the history: a watch from before now gets 410. The version from which one can still watch."""
        return str(self._server.store.compact())

    def collect(self) -> None:
        """Do now what garbage collection would do in the next pass of the event loop."""
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
        found = self._server.store.table(POD_TABLE).get((namespace, name))
        return found is not None and found.uid == uid
