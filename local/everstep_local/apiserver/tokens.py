"""Service-account tokens, bound to a pod and to an audience, and signed with a key that exists as long as the cluster.

Invariant: a token is valid only until it expires, for an audience that it names, and while its own pod exists. A
refusal has the server's kind of reason, which never quotes the token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jwt
import jwt.algorithms
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from everstep_operator.kube.client import TokenIdentity, TokenRefused, TokenReview

ISSUER = "https://kubernetes.default.svc.cluster.local"
_KEY = {"kid": "memory", "use": "sig", "alg": "EdDSA"}


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims of a token. Times are in seconds since 1970."""

    namespace: str
    service_account: str
    pod_name: str
    pod_uid: str
    audience: str
    expires: float


class TokenAuthority:
    """The issuer of tokens. `alive(namespace, pod, uid)` says whether the pod exists with that UID. `now` is the wall
    clock in seconds."""

    def __init__(self, key: bytes, now: Callable[[], float], alive: Callable[[str, str, str], bool]) -> None:
        """`key`: 32 bytes. The algorithm is Ed25519, because it signs the same claims alike, which a simulation
        needs."""
        self._key = Ed25519PrivateKey.from_private_bytes(key)
        self._now, self._alive = now, alive

    def key_set(self) -> dict[str, Any]:
        """The public key in the form of RFC 7517."""
        return {"keys": [{**jwt.algorithms.OKPAlgorithm.to_jwk(self._key.public_key(), as_dict=True), **_KEY}]}

    def issue(self, claims: Claims) -> str:
        """A JWT with the claims of a token that the API server issues to a kubelet."""
        bound = {"pod": {"name": claims.pod_name, "uid": claims.pod_uid}} if claims.pod_uid else {}
        account = {"name": claims.service_account}
        payload = {
            "aud": [claims.audience],
            "exp": claims.expires,
            "iss": ISSUER,
            "kubernetes.io": {"namespace": claims.namespace, **bound, "serviceaccount": account},
            "sub": f"system:serviceaccount:{claims.namespace}:{claims.service_account}",
        }
        return jwt.encode(payload, self._key, algorithm="EdDSA", headers={"kid": _KEY["kid"]})

    def review(self, token: str, audiences: Sequence[str]) -> TokenReview:
        """The token's owner, if it is valid for one of `audiences`."""
        claims = self._read(token)
        if claims is None:
            return TokenRefused("invalid bearer token")
        if claims.expires <= self._now():
            return TokenRefused("invalid bearer token, token has expired")
        if claims.audience not in audiences:
            return TokenRefused(f"token audiences [{claims.audience!r}] is invalid for the target audiences")
        if claims.pod_uid and not self._alive(claims.namespace, claims.pod_name, claims.pod_uid):
            return TokenRefused("invalid bearer token, service account token has been invalidated")
        username = f"system:serviceaccount:{claims.namespace}:{claims.service_account}"
        return TokenIdentity(username, (claims.audience,), claims.pod_name, claims.pod_uid)

    def _read(self, token: str) -> Claims | None:
        try:
            # `review` judges time and audience, by this cluster's clock.
            raw = jwt.decode(
                token, self._key.public_key(), algorithms=["EdDSA"], options={"verify_exp": False, "verify_aud": False}
            )
        except (jwt.PyJWTError, ValueError):
            return None
        # We have signed it, so it has the form that `issue` makes.
        kubernetes = raw["kubernetes.io"]
        pod = kubernetes.get("pod", {"name": "", "uid": ""})
        return Claims(
            kubernetes["namespace"], kubernetes["serviceaccount"]["name"], pod["name"], pod["uid"], raw["aud"][0],
            raw["exp"],
        )  # fmt: skip
