"""A cluster's tokens for tests: signed, forged, expired, for others; and a TokenReview stand-in that counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from everstep_operator.endpoint.token_claims import PodIdentity
from everstep_operator.endpoint.token_reviews import IdentityCache, IdentityLimits
from everstep_operator.endpoint.token_signatures import SigningKeys
from everstep_operator.kube.errors import Forbidden

AUDIENCE = "everstep.dev/operator"
POD = PodIdentity("team-a", "digits-w0-0", "uid-1")
HOUR = 3600.0


def pod(number: int, namespace: str = "team-b") -> PodIdentity:
    return PodIdentity(namespace, f"w{number}", f"uid-{namespace}-{number}")


class Authority:
    """Signs as the cluster; `key_id` is that of its key, "" for none."""

    def __init__(self, key_id: str = "k1") -> None:
        self.key_id = key_id
        self._key = ec.generate_private_key(ec.SECP256R1())

    def jwk(self) -> dict[str, Any]:
        public: dict[str, Any] = jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        named = {"kid": self.key_id} if self.key_id else {}
        return {**public, **named, "use": "sig", "alg": "ES256"}

    def token(self, who: PodIdentity = POD, **claims: Any) -> str:
        """`claims` replace the right ones; None takes one away."""
        payload = {
            "aud": [AUDIENCE],
            "exp": time.time() + HOUR,
            "iss": "https://kubernetes.default.svc.cluster.local",
            "kubernetes.io": {
                "namespace": who.namespace,
                "pod": {"name": who.pod_name, "uid": who.pod_uid},
                "serviceaccount": {"name": "default", "uid": "account"},
            },
            "sub": f"system:serviceaccount:{who.namespace}:default",
            **claims,
        }
        kept = {name: value for name, value in payload.items() if value is not None}
        return jwt.encode(kept, self._key, algorithm="ES256", headers={"kid": self.key_id} if self.key_id else {})


class Reviewer:
    """`valid` are those that a TokenReview confirms. `gate`: reviews wait for it. `now`: the monotonic clock."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.valid: dict[str, PodIdentity] = {}
        self.checked: list[str] = []
        self.gate: asyncio.Event | None = None
        self.broken: Exception | None = None
        self.parallel = self.most_parallel = 0
        self.now = 1000.0
        self.keys: list[dict[str, Any]] | None = [authority.jwk()]
        self.key_reads = 0

    def issue(self, who: PodIdentity = POD) -> str:
        """A token that is good."""
        token = self.authority.token(who)
        self.valid[token] = who
        return token

    async def review(self, token: str) -> PodIdentity | None:
        self.checked.append(token)
        self.parallel += 1
        self.most_parallel = max(self.parallel, self.most_parallel)
        try:
            await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.parallel -= 1
        if self.broken is not None:
            raise self.broken
        return self.valid.get(token)

    async def read_keys(self) -> dict[str, Any]:
        self.key_reads += 1
        await asyncio.sleep(0)
        if self.keys is None:
            raise Forbidden("not for this account", status=403)
        return {"keys": self.keys}

    def signing_keys(self, monotonic: Callable[[], float]) -> SigningKeys:
        return SigningKeys(self.read_keys, monotonic=monotonic)

    def cache(
        self,
        limits: IdentityLimits | None = None,
        *,
        exists: Callable[[PodIdentity], bool] = lambda _: False,
        monotonic: Callable[[], float] | None = None,
    ) -> IdentityCache:
        monotonic = monotonic or (lambda: self.now)
        return IdentityCache(
            self.review,
            audience=AUDIENCE,
            keys=self.signing_keys(monotonic),
            monotonic=monotonic,
            exists=exists,
            limits=limits,
        )

    async def cache_with_keys(
        self, limits: IdentityLimits | None = None, exists: Callable[[PodIdentity], bool] = lambda _: False
    ) -> IdentityCache:
        """One that has read the cluster's keys, and nothing else yet."""
        cache = self.cache(limits, exists=exists)
        await cache.identify(self.authority.token(pod(0, "first")))
        await cache._keys.ready()
        self.now += 100
        self.checked.clear()
        return cache
