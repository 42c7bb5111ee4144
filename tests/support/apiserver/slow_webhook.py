"""An admission webhook that takes its time, as those of busy clusters do, before a real API server.

It is a TLS server of its own thread and event loop, so that nothing in the test makes it slower than it is told to be.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import threading
from collections import Counter
from types import TracebackType
from typing import Any

from aiohttp import web

from everstep_operator.kube.client import KubeClient
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.wire import Unstructured

START_SECONDS = 10.0
TIMEOUT_SECONDS = 20  # after which the API server would refuse the object


class SlowWebhook:
    """Allows every create of `resources` in one namespace, `seconds` after it was asked. Use it as an async context
    manager: it registers itself at the API server and takes itself away."""

    def __init__(
        self,
        client: KubeClient,
        control_plane: Any,
        namespace: str,
        seconds: float,
        *,
        kind: str = "Validating",
        resources: tuple[str, ...] = ("pods",),
    ) -> None:
        self._client, self._plane, self._namespace = client, control_plane, namespace
        self.seconds, self._kind, self._resources = seconds, kind, resources
        self.asked: Counter[str] = Counter()  # by resource
        self.pods: list[str] = []  # names, in the order in which they were asked for
        self.waiting = 0  # reviews that are not answered yet
        self.most_waiting = 0
        self._name = f"slow-{kind.lower()}-{namespace}"
        plural = f"{kind.lower()}webhookconfigurations"
        self._configurations: Resource[Unstructured] = Resource(
            "admissionregistration.k8s.io", "v1", plural, f"{kind}WebhookConfiguration", Unstructured, namespaced=False
        )
        self._loop = asyncio.new_event_loop()
        self._listens = threading.Event()
        self._port = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)

    async def __aenter__(self) -> SlowWebhook:
        self._thread.start()
        assert await asyncio.to_thread(self._listens.wait, START_SECONDS), "the webhook does not listen"
        await self._client.create(self._configurations, None, self._body())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.delete(self._configurations, None, self._name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, START_SECONDS)

    def _body(self) -> dict[str, Any]:
        authority = base64.b64encode(self._plane.ca_file.read_bytes()).decode()
        hook = {
            "name": "slow.everstep.dev",
            "clientConfig": {"url": f"https://127.0.0.1:{self._port}/review", "caBundle": authority},
            "rules": [
                {"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["CREATE"], "resources": list(self._resources)}
            ],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self._namespace}},
            "failurePolicy": "Fail",
            "sideEffects": "None",
            "timeoutSeconds": TIMEOUT_SECONDS,
            "admissionReviewVersions": ["v1"],
        }
        return {"metadata": {"name": self._name}, "webhooks": [hook]}

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # The authority of the control plane has signed one certificate for the loopback.
        tls.load_cert_chain(self._plane.folder / "server.crt", self._plane.folder / "server.key")
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/review", self._review)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self._listens.set()

    async def _review(self, request: web.Request) -> web.Response:
        asked = (await request.json())["request"]
        self.asked[asked["resource"]["resource"]] += 1
        if asked["resource"]["resource"] == "pods":
            self.pods.append(asked["name"])
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.waiting -= 1
        answer = {"uid": asked["uid"], "allowed": True}
        return web.json_response({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer})
