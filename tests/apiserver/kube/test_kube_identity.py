"""Who a worker is, by the real API server's tokens and keys: what is made up costs it no request."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.contract.labels import TOKEN_AUDIENCE
from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.endpoint.token_reviews import IdentityCache, TokenRefusal, authenticator
from everstep_operator.endpoint.token_signatures import SigningKeys
from everstep_operator.kube.credentials import KubeConfig
from everstep_operator.kube.resources import PODS
from everstep_operator.kube.transport import HttpKubeClient
from support.apiserver.waiting import eventually
from support.conformity.bodies import pod

pytestmark = pytest.mark.apiserver


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_pod_is_known_by_its_token_until_it_is_deleted_and_forgeries_are_not_reviewed(
    namespace: str, control_plane: Any
) -> None:
    asked: list[str] = []
    source = KubeConfig(str(control_plane.kubeconfig))
    clock = Clock()
    async with HttpKubeClient(source, on_answer=lambda verb, what, code, seconds: asked.append(what)) as client:
        made = await client.create(PODS, namespace, pod("w0"))
        flags = ("--bound-object-kind", "Pod", "--bound-object-name", "w0", "--bound-object-uid", made.metadata.uid)
        create = ("create", "token", "default", "-n", namespace)
        token = control_plane.kubectl(*create, "--audience", TOKEN_AUDIENCE, *flags).stdout.strip()
        other = control_plane.kubectl(*create).stdout.strip()
        keys = SigningKeys(client.signing_keys, monotonic=clock)
        cache = IdentityCache(authenticator(client), audience=TOKEN_AUDIENCE, keys=keys, monotonic=clock)
        known = PodIdentity(namespace, "w0", made.metadata.uid)
        assert await cache.identify(token) == known
        await keys.ready()
        assert asked.count("tokenreviews") == 1

        head, body, signature = token.split(".")
        forged = [f"{head}.{body}.{signature[:i]}{'AB'[signature[i] == 'A']}{signature[i + 1 :]}" for i in range(9)]
        for text in (*forged, f"{head}.{body}.", other, "no.such.token"):
            assert isinstance(await cache.identify(text), TokenRefusal)
        assert asked.count("tokenreviews") == 1
        assert asked.count("jwks") == 1

        await client.delete(PODS, namespace, "w0", grace_seconds=0)

        async def refused() -> bool:
            clock.now += 16
            return isinstance(await cache.identify(token), TokenRefusal)

        await eventually("the token died with its pod", refused)
