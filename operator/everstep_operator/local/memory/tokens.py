"""Service-account tokens, bound to a pod and to an audience, signed with a key that dies with the cluster.

Invariant: a token is good only while it has not expired, for an audience that it names, and while the very pod that it
was issued for exists. What is refused is refused with the server's kind of reason, which never quotes the token.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everstep_operator.kube.client import TokenIdentity, TokenRefused, TokenReview

MAX_TOKEN = 16 * 1024  # characters


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says; times in seconds since 1970."""

    namespace: str
    service_account: str
    pod_name: str
    pod_uid: str
    audience: str
    expires: float


class TokenAuthority:
    """`alive(namespace, pod, uid)` says whether the pod exists with that UID; `now` is the wall clock in seconds."""

    def __init__(self, key: bytes, now: Callable[[], float], alive: Callable[[str, str, str], bool]) -> None:
        self._key, self._now, self._alive = key, now, alive

    def issue(self, claims: Claims) -> str:
        body = json.dumps(
            {
                "namespace": claims.namespace,
                "serviceAccount": claims.service_account,
                "pod": claims.pod_name,
                "podUID": claims.pod_uid,
                "audience": claims.audience,
                "expires": claims.expires,
            },
            sort_keys=True,
        ).encode()
        return f"{_text(body)}.{_text(self._sign(body))}"

    def review(self, token: str, audiences: Sequence[str]) -> TokenReview:
        """Whose token it is, if it is good for one of `audiences`."""
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
        if len(token) > MAX_TOKEN or token.count(".") != 1:
            return None
        try:
            body, signature = (base64.urlsafe_b64decode(part) for part in token.split("."))
        except ValueError:
            return None
        if not hmac.compare_digest(signature, self._sign(body)):
            return None
        # Signed by us, hence of the shape that `issue` gives it.
        raw = json.loads(body)
        return Claims(
            raw["namespace"], raw["serviceAccount"], raw["pod"], raw["podUID"], raw["audience"], raw["expires"]
        )

    def _sign(self, body: bytes) -> bytes:
        return hmac.new(self._key, body, hashlib.sha256).digest()


def _text(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).decode()
