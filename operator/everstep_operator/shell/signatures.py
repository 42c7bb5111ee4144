"""Whether the cluster has signed a token, by the API server's public keys: a forged one then costs no request.

A good signature lets nobody in: the TokenReview that follows knows what a signature cannot, that the pod is deleted.
Keys that are not at hand decide nothing, and those that may be old refuse nothing: an API server that signs with a key
which this replica has not read yet is right. Invariants: the keys are read at most once in `retry` seconds, whatever is
sent; no key is used with another algorithm than its own.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import Any

import jwt

from everstep_operator.kube.errors import Forbidden, KubeError
from everstep_operator.shell.claims import Claims

log = logging.getLogger("everstep.signatures")

MAX_KEYS = 64
FRESH = 300.0  # seconds after which the keys are read again
RETRY = 10.0  # seconds from one reading to the next that an unknown key or a failure asks for
# Symmetric keys are in no public set; the list keeps out what PyJWT may learn one day.
ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"})


class Proof(Enum):
    SIGNED = "signed"
    FORGED = "forged"
    UNKNOWN = "unknown"  # the key is not at hand


class SigningKeys:
    """`read` gives the API server's key set (RFC 7517) and may raise KubeError."""

    def __init__(self, read: Callable[[], Awaitable[Mapping[str, Any]]], *, monotonic: Callable[[], float]) -> None:
        self._read, self._monotonic = read, monotonic
        self._keys: dict[str, jwt.PyJWK] = {}
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._failure: str | None = None

    def prove(self, token: str, claims: Claims) -> Proof:
        """By the key that the token names. Begins to read the keys again where they are old, or lack that one."""
        key = self._keys.get(claims.key_id)
        self._refresh(FRESH if key is not None else RETRY)
        if key is None:
            return Proof.UNKNOWN
        signed, _, signature = token.encode().rpartition(b".")
        try:
            good = key.Algorithm.verify(signed, key.key, base64.urlsafe_b64decode(signature + b"=="))
        except ValueError:  # no base64
            good = False
        return Proof.SIGNED if good else Proof.FORGED

    async def ready(self) -> None:
        """Return when a reading that is under way has ended."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def _refresh(self, after: float) -> None:
        now = self._monotonic()
        if self._reading is None and now - self._read_at >= after:
            self._read_at = now
            self._reading = asyncio.create_task(self._take())
            self._reading.add_done_callback(lambda _: setattr(self, "_reading", None))

    async def _take(self) -> None:
        try:
            found = _usable(await self._read())
            failure = None if found else "it has no key that can be used"
        except KubeError as e:
            found, failure = {}, f"{type(e).__name__}: {e}"
            if isinstance(e, Forbidden):
                failure += "; allow GET /openid/v1/jwks, as ClusterRole system:service-account-issuer-discovery does"
        if failure is not None and failure != self._failure:
            log.warning(
                "the API server's signing keys cannot be read: forged tokens cost a TokenReview each, a few at a time",
                extra={"reason": failure},
            )
        self._failure = failure
        if found:  # else the old ones are as right as before
            self._keys = found


def _usable(found: Mapping[str, Any]) -> dict[str, jwt.PyJWK]:
    """The keys of the set that sign tokens, by their id."""
    keys: dict[str, jwt.PyJWK] = {}
    rows = found.get("keys")
    for row in (rows if isinstance(rows, list) else [])[:MAX_KEYS]:
        if not isinstance(row, dict) or row.get("use", "sig") != "sig":
            continue
        try:
            key = jwt.PyJWK(row)
        except (jwt.PyJWTError, TypeError, ValueError):
            continue  # of a kind that this release does not know: its tokens are reviewed
        if key.algorithm_name in ALGORITHMS:
            keys[str(row.get("kid", ""))] = key
    return keys
