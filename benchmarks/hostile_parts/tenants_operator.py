"""The operator over an in-memory cluster, with jobs of two tenants; a token's review takes as long as over a network.

Prints one line of JSON, its address and tokens of each kind, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from everstep.contract import labels
from everstep_local.apiserver.client import MemoryClient
from everstep_local.apiserver.cluster import MemoryCluster
from everstep_operator.kube.client import TokenReview
from everstep_operator.kube.clients import Clients
from everstep_operator.kube.resources import PODS
from everstep_operator.main import JOBS, Operator
from everstep_operator.runtime.clock import SystemClock
from everstep_operator.runtime.garbage_collection import freeze_startup_objects
from everstep_operator.settings import OperatorSettings
from everstep_operator.telemetry.metrics import Metrics
from support.rendezvous.operator_parts import TEMPLATE, lenient_crd, pod_body, start

REVIEW_SECONDS = 0.005
TENANTS = {"victim": 4, "hostile": 8}  # namespaces, and the pods of a job in each
MADE_UP = 2000  # tokens


class Client:
    """One whose reviews take time."""

    def __init__(self, inner: MemoryClient) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def review_token(self, token: str, audiences: Any) -> TokenReview:
        await asyncio.sleep(REVIEW_SECONDS)
        return await self._inner.review_token(token, audiences)


def forged(uids: list[str]) -> list[str]:
    """Tokens of pods that exist, as the cluster would make them, signed with another key."""
    key = Ed25519PrivateKey.generate()

    def one(number: int) -> str:
        bound = {"namespace": "victim", "pod": {"name": f"w{number % len(uids)}", "uid": uids[number % len(uids)]}}
        claims = {
            "aud": [labels.TOKEN_AUDIENCE],
            "exp": time.time() + 3600,
            "jti": str(number),
            "kubernetes.io": bound,
            "sub": "system:serviceaccount:victim:default",
        }
        return jwt.encode(claims, key, algorithm="EdDSA", headers={"kid": "memory"})

    return [one(i) for i in range(MADE_UP)]


async def serve() -> None:
    cluster = MemoryCluster(SystemClock(), namespaces=("default", *TENANTS))
    cluster.install(lenient_crd())
    client: Any = cluster.client()
    tokens: dict[str, list[str]] = {"expired": []}
    uids: list[str] = []
    for namespace, count in TENANTS.items():
        spec = {"replicas": count, "template": TEMPLATE, "suspend": True}
        job = await client.create(JOBS, namespace, {"metadata": {"name": "digits"}, "spec": spec})
        tokens[namespace] = []
        for index in range(count):
            name = f"w{index}"
            pod = await client.create(PODS, namespace, pod_body(job, name, index))
            uid = pod.metadata.uid
            uids += [uid] if namespace == "victim" else []
            given = (namespace, "default", name, uid, labels.TOKEN_AUDIENCE)
            tokens[namespace].append(cluster.issue_token(*given, 3600))
            tokens["expired"] += [cluster.issue_token(*given, -3600.0 - i) for i in range(MADE_UP // 12)]
    tokens["forged"] = forged(uids)
    settings = OperatorSettings.from_env(
        {"EVERSTEP_PORT": "0", "EVERSTEP_HOST": "127.0.0.1", "EVERSTEP_POD_NAME": "operator"}
    )
    operator = Operator(
        Clients.sharing(Client(cluster.client())),
        settings,
        Metrics(),
        SystemClock(),
        synced=lambda: None,  # type: ignore[arg-type]
    )
    async with operator.server, asyncio.TaskGroup() as group:
        await start(operator, group)
        while not operator.elector.is_leader():  # noqa: ASYNC110  # it has no event for others
            await asyncio.sleep(0.05)
        freeze_startup_objects()  # as the program does
        print(json.dumps({"port": operator.server.port, "tokens": tokens}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for task in group._tasks:
            task.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    asyncio.run(serve())
