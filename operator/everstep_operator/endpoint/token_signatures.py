"""Checks a token's signature by the API server's public keys, so that a forged token costs no request.

A good signature is not enough: a TokenReview follows, because only that shows that the pod was deleted (or what
`signed_tokens` looks at, where there is none). A token with an unknown key is neither accepted nor refused here, and
possibly outdated keys refuse no token: the API server may sign with a key that this replica has not read yet, even
under the id of an older one. So if a signature is bad and the keys are older than `RETRY`, the token
waits until they are read again, and is judged by the new ones. Invariants: the keys are read at most once in `RETRY`
seconds, whatever tokens arrive; no key is used with another algorithm than its own; a token costs at most `MAX_OF_ID`
checks of a signature each time it is judged.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from everstep_operator.endpoint.token_claims import Claims
from everstep_operator.errors import RetryableError
from everstep_operator.kube.errors import Forbidden, KubeError

if TYPE_CHECKING:
    import jwt

log = logging.getLogger("everstep.signatures")

MAX_KEYS = 64
MAX_OF_ID = 4  # keys of one id that are tried: the id is optional (RFC 7517), and a set may use one twice
FRESH = 300.0  # seconds after which the keys are read again
RETRY = 10.0  # seconds between readings that are caused by an unknown key, a bad signature or a failure
# No symmetric algorithms, because a public set has no such keys; a fixed list, because PyJWT may add algorithms.
ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"})


class KeysUnknown(RetryableError):
    """No key is at hand by which a signature could be judged."""


class Proof(Enum):
    SIGNED = "signed"
    FORGED = "forged"
    UNKNOWN = "unknown"  # the key is not available


@dataclass(frozen=True, slots=True)
class _Named:
    """The keys of one id. Not `complete`: the set has too many keys with this id, or one that cannot be used."""

    keys: tuple[jwt.PyJWK, ...] = ()
    complete: bool = True


class SigningKeys:
    """`read` gives the API server's key set (RFC 7517) and may raise KubeError."""

    def __init__(self, read: Callable[[], Awaitable[Mapping[str, Any]]], *, monotonic: Callable[[], float]) -> None:
        self._read, self._monotonic = read, monotonic
        self._keys: dict[str, _Named] = {}
        self._keys_at = self._read_at = float("-inf")  # when the reading began that gave the keys, and the last one
        self._reading: asyncio.Task[None] | None = None
        self._failure: str | None = None

    async def prove(self, token: str, claims: Claims) -> Proof:
        """Check the token by the keys with the id that it names. Begins to read the keys again if they are old, or do
        not verify the token; waits for that reading if it may turn a bad signature into a good one."""
        if self._verifies(token, claims.key_id):
            self._refresh(FRESH)
            return Proof.SIGNED
        self._refresh(RETRY)
        if self._refuses(claims.key_id) and self._are_old():
            await self.ready()
            if self._verifies(token, claims.key_id):
                return Proof.SIGNED
        # If the reading failed, the old keys refuse no token: the review decides.
        return Proof.FORGED if self._refuses(claims.key_id) and not self._are_old() else Proof.UNKNOWN

    async def verify(self, token: str, claims: Claims) -> bool:
        """Whether the cluster has signed the token. Raises KeysUnknown if that cannot be judged at the moment."""
        proof = await self.prove(token, claims)
        if proof is Proof.UNKNOWN:  # the keys are read for the first time, or again for this token
            await self.ready()
            proof = await self.prove(token, claims)
        if proof is Proof.UNKNOWN and (self._are_old() or not self._is_complete(claims.key_id)):
            raise KeysUnknown(self._failure or "the API server's signing keys were not read since this token arrived")
        return proof is Proof.SIGNED

    async def ready(self) -> None:
        """Return when a reading in progress has ended."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def _verifies(self, token: str, key_id: str) -> bool:
        try:
            signed, _, text = token.encode("ascii").rpartition(b".")
            signature = base64.urlsafe_b64decode(text + b"==")
        except ValueError:
            return False
        return any(_is_good(key, signed, signature) for key in self._keys.get(key_id, _NONE).keys)

    def _refuses(self, key_id: str) -> bool:
        """Whether every key that may have this id was tried."""
        named = self._keys.get(key_id, _NONE)
        return bool(named.keys) and named.complete

    def _is_complete(self, key_id: str) -> bool:
        return self._keys.get(key_id, _NONE).complete

    def _are_old(self) -> bool:
        return self._monotonic() - self._keys_at >= RETRY

    def _refresh(self, after: float) -> None:
        now = self._monotonic()
        if self._reading is None and now - self._read_at >= after:
            self._read_at = now
            self._reading = asyncio.create_task(self._read_keys())
            self._reading.add_done_callback(lambda _: setattr(self, "_reading", None))

    async def _read_keys(self) -> None:
        began = self._monotonic()
        try:
            keys = _usable(await self._read())
            failure = None if any(named.keys for named in keys.values()) else "it has no key that can be used"
        except KubeError as e:
            keys, failure = {}, f"{type(e).__name__}: {e}"
            if isinstance(e, Forbidden):
                failure += "; allow GET /openid/v1/jwks, as ClusterRole system:service-account-issuer-discovery does"
        if failure is not None and failure != self._failure:
            log.warning(
                "the API server's signing keys cannot be read: forged tokens cost a TokenReview each, a few at a time",
                extra={"reason": failure},
            )
        self._failure = failure
        if failure is None:  # otherwise the old keys stay
            self._keys, self._keys_at = keys, began


_NONE = _Named()


def _is_good(key: jwt.PyJWK, signed: bytes, signature: bytes) -> bool:
    try:
        return bool(key.Algorithm.verify(signed, key.key, signature))
    except ValueError:  # the signature does not have this algorithm's form
        return False


def _usable(key_set: Mapping[str, Any]) -> dict[str, _Named]:
    """The keys of the set that sign tokens, by their id; "" for a key without an id."""
    keys: dict[str, _Named] = {}
    rows = key_set.get("keys")
    for number, row in enumerate(rows if isinstance(rows, list) else []):
        if not isinstance(row, dict) or row.get("use", "sig") != "sig":
            continue
        key_id = row.get("kid", "")
        key_id = key_id if isinstance(key_id, str) else ""
        named = keys.get(key_id, _NONE)
        key = _key(row) if number < MAX_KEYS and len(named.keys) < MAX_OF_ID else None
        # A key that cannot be used here may still have signed a token, so no token with its id is called forged.
        keys[key_id] = _Named(named.keys, False) if key is None else _Named((*named.keys, key), named.complete)
    return keys


def _key(row: dict[str, Any]) -> jwt.PyJWK | None:
    """Parse a key. None: it is of a kind that this release does not know, or that belongs in no public set."""
    library = import_module("jwt")  # 9 MiB with cryptography: only an operator whose workers call has a use for it
    try:
        key: jwt.PyJWK = library.PyJWK(row)
    except (library.PyJWTError, TypeError, ValueError):
        return None
    return key if key.algorithm_name in ALGORITHMS else None
