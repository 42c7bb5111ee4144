"""Rendezvous handlers as torchrun makes them, of one job, over one of the round stores."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from unittest.mock import patch

from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from everstep.contract import env
from everstep.membership.backends.etcd import EtcdStore
from everstep.membership.backends.etcd_http import Gateway
from everstep.membership.store import RoundStore
from support.rendezvous.agents import LIMIT
from support.rendezvous.etcd_server import EtcdCluster
from support.rendezvous.operator_server import OperatorServer

QUICK = {"last_call_timeout": "0.5", "join_timeout": "60", "ttl": "20"}


class Handlers:
    """`make` gives one more agent's handler. `away` takes the store away, for as long as the test lasts."""

    def __init__(self, backend: str, server: EtcdCluster | OperatorServer) -> None:
        self.backend, self._server, self.run_id = backend, server, uuid.uuid4().hex
        self._job = server.create_job(f"job-{self.run_id}") if isinstance(server, OperatorServer) else None
        self._made: list[RendezvousHandler] = []
        self._looks: list[RoundStore] = []
        self._pool = ThreadPoolExecutor(16)
        self._agents = 0

    def make(self, low: int = 1, high: int = 1, *, local_addr: str = "127.0.0.1", **conf: str) -> RendezvousHandler:
        variables, endpoint, more = self._place()
        parameters = RendezvousParameters(
            self.backend, endpoint, self.run_id, low, high, local_addr, **{**QUICK, **more, **conf}
        )
        with patch.dict(os.environ, variables):
            self._made.append(get_rendezvous_handler(parameters))
        return self._made[-1]

    def _place(self) -> tuple[Mapping[str, str], str, Mapping[str, str]]:
        if isinstance(self._server, EtcdCluster):
            return {}, self._server.urls[0], {}
        assert self._job is not None
        pod = self._server.create_pod(self._job, self._agents)
        self._agents += 1
        return {env.WORKER_INDEX: str(pod.index)}, self._server.replicas[0].url, {"token_file": str(pod.token_file)}

    def store(self) -> RoundStore:
        """The job's store, to look into."""
        if isinstance(self._server, EtcdCluster):
            self._looks.append(EtcdStore(Gateway(self._server.urls), self.run_id))
        else:
            assert self._job is not None
            self._looks.append(self._server.store(self._server.create_pod(self._job, 1000 + len(self._looks))))
        return self._looks[-1]

    def away(self) -> None:
        if isinstance(self._server, EtcdCluster):
            self._server.members[0].kill()
        else:
            self._server.end(self._server.replicas[0])

    def forget(self, handler: RendezvousHandler) -> None:
        """The last reference is the caller's."""
        self._made.remove(handler)

    def joining(self, *handlers: RendezvousHandler) -> list[Future[RendezvousInfo]]:
        return [self._pool.submit(handler.next_rendezvous) for handler in handlers]

    def join(self, *handlers: RendezvousHandler) -> list[RendezvousInfo]:
        return [future.result(LIMIT) for future in self.joining(*handlers)]

    def close(self) -> None:
        for handler in self._made:
            handler._leave.detach()  # type: ignore[attr-defined]
            handler._driver.stop()  # type: ignore[attr-defined]
        self._pool.shutdown()
        for store in self._looks:
            store.close()
