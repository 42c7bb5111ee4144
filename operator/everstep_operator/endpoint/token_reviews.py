"""Finds the pod to which a bearer token belongs, with few requests to Kubernetes.

The check of a token (TokenReview) costs a request, and a worker reports twice a second. So answers are kept for a short
time under the token's SHA-256, never under the token. A token that cannot be a worker's, by its claims or by its
signature, is refused without a review (`token_claims`, `token_signatures`). Other tokens wait for their review in one
of four lanes, so that a token delays no other one that is known better. Invariants: the token itself is neither kept
nor logged; memory, parallel reviews and waiting tokens are bounded, also for each pod; a refused token evicts no
accepted one; a deleted pod's token is accepted for at most `ttl` seconds more.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

from everstep.contract import labels
from everstep_operator.endpoint.tenant_limits import Shares, Tenant
from everstep_operator.endpoint.token_claims import ClaimsRefused, PodIdentity, read_claims
from everstep_operator.endpoint.token_signatures import Proof, SigningKeys
from everstep_operator.errors import RetryableError
from everstep_operator.kube.client import KubeClient, TokenIdentity

log = logging.getLogger("everstep.token_reviews")

Authenticate = Callable[[str], Awaitable[PodIdentity | None]]

NOT_VALID = "the token is not valid for this operator, it has expired, or its pod is gone"
MAX_OF_POD = 4  # accepted tokens of one pod: the kubelet renews a token before it expires


@dataclass(frozen=True, slots=True)
class TokenRefusal:
    """The token identifies no pod; `reason` is sent to the sender."""

    reason: str


class TooManyChecks(RetryableError):
    """Too many tokens wait for their check: this one would not be checked in time."""


class ReviewLane(Enum):
    """The lanes of reviews, by what is known of a token before its review."""

    KNOWN = "it was valid a moment ago"
    SIGNED = "the cluster has signed it"
    CLAIMED = "it claims to be a pod that exists"
    STRANGER = "neither a signature nor a known pod"


@dataclass(frozen=True, slots=True)
class IdentityLimits:
    """`parallel` and `waiting`: the number of checks in each lane. Times are in seconds."""

    ttl: float = 15.0
    refresh: float = 10.0  # age at which an answer is checked again; it stays valid meanwhile, so no worker waits
    refused_ttl: float = 2.0  # shorter, because the next token file may be right
    accepted: int = 20_000
    refused: int = 4_096
    parallel: dict[ReviewLane, int] = field(
        default_factory=lambda: {
            ReviewLane.KNOWN: 8,
            ReviewLane.SIGNED: 8,
            ReviewLane.CLAIMED: 4,
            ReviewLane.STRANGER: 2,
        }
    )
    waiting: dict[ReviewLane, int] = field(
        default_factory=lambda: {
            ReviewLane.KNOWN: 20_000,
            ReviewLane.SIGNED: 4_096,
            ReviewLane.CLAIMED: 1_024,
            ReviewLane.STRANGER: 64,
        }
    )


@dataclass(frozen=True, slots=True)
class _Good:
    identity: PodIdentity
    at: float  # monotonic seconds


class IdentityCache:
    """Answers `identify(token)` from memory or by `authenticate`, whose errors are passed on and not kept."""

    def __init__(
        self,
        authenticate: Authenticate,
        *,
        audience: str,
        keys: SigningKeys,
        monotonic: Callable[[], float],
        exists: Callable[[PodIdentity], bool] = lambda _: False,
        limits: IdentityLimits | None = None,
    ) -> None:
        """`exists`: whether that pod is known; it must not block."""
        self._authenticate, self._audience, self._keys = authenticate, audience, keys
        self._monotonic, self._exists = monotonic, exists
        self._limits = limits or IdentityLimits()
        self._good: OrderedDict[bytes, _Good] = OrderedDict()
        self._tokens_of: dict[str, list[bytes]] = {}
        self._refused: OrderedDict[bytes, float] = OrderedDict()  # the end of each refusal's validity
        self._pending: dict[bytes, asyncio.Task[PodIdentity | None]] = {}
        self._slots = {lane: asyncio.Semaphore(self._limits.parallel[lane]) for lane in ReviewLane}
        self._queued = {lane: Shares(self._limits.waiting[lane]) for lane in ReviewLane}

    async def identify(self, token: str) -> PodIdentity | TokenRefusal:
        """The pod behind `token`. Raises TooManyChecks, and the errors of `authenticate`."""
        key = hashlib.sha256(token.encode(errors="replace")).digest()
        now = self._monotonic()
        good = self._good.get(key)
        if good is not None and now < good.at + self._limits.ttl:
            if now >= good.at + self._limits.refresh and key not in self._pending:
                self._begin(key, token, good.identity, ReviewLane.KNOWN)
            return good.identity
        if now < self._refused.get(key, now):
            return TokenRefusal(NOT_VALID)
        task = self._pending.get(key)
        if task is None:
            try:
                claims = read_claims(token, self._audience)
            except ClaimsRefused as e:
                return TokenRefusal(str(e))
            match await self._keys.prove(token, claims):
                case Proof.FORGED:
                    return TokenRefusal("the cluster has not signed this token")
                case Proof.SIGNED:
                    lane = ReviewLane.SIGNED
                case Proof.UNKNOWN:
                    lane = ReviewLane.CLAIMED if self._exists(claims.pod) else ReviewLane.STRANGER
            lane = ReviewLane.KNOWN if good is not None else lane
            # Another report of this pod may have begun the check while this one waited for the keys.
            task = self._pending.get(key) or self._begin(key, token, claims.pod, lane)
            if task is None:
                raise TooManyChecks(f"too many tokens wait for their check; of this one is known: {lane.value}")
        # Concurrent reports of one pod share a single check, which goes on if one of them gives up.
        return await asyncio.shield(task) or TokenRefusal(NOT_VALID)

    def forget(self) -> None:
        """Drop every answer, as a new leader does."""
        self._good.clear()
        self._tokens_of.clear()
        self._refused.clear()

    @property
    def checks(self) -> int:
        """How many checks are in progress or wait."""
        return len(self._pending)

    def _begin(
        self, key: bytes, token: str, claimed: PodIdentity, lane: ReviewLane
    ) -> asyncio.Task[PodIdentity | None] | None:
        """Begin a check. None: the lane is full, or the pod or its namespace has used up its share of it."""
        # The tenant has no job: an unchecked token may name only its own pod.
        tenant = Tenant(claimed.namespace, claimed.pod_uid, claimed.pod_uid)
        shares = self._queued[lane]
        if not shares.reserve(tenant):
            return None
        task = asyncio.create_task(self._check(key, token, claimed, lane))
        self._pending[key] = task

        def ended(done: asyncio.Task[PodIdentity | None]) -> None:
            shares.release(tenant)
            del self._pending[key]
            if not done.cancelled():
                done.exception()  # retrieved even if no caller is left, so that asyncio does not warn

        task.add_done_callback(ended)
        return task

    async def _check(self, key: bytes, token: str, claimed: PodIdentity, lane: ReviewLane) -> PodIdentity | None:
        async with self._slots[lane]:
            identity = await self._authenticate(token)
        if identity == claimed:
            self._accept(key, identity)
            return identity
        self._drop(key)
        self._refused[key] = self._monotonic() + self._limits.refused_ttl
        self._refused.move_to_end(key)
        while len(self._refused) > self._limits.refused:
            self._refused.popitem(last=False)
        return None

    def _accept(self, key: bytes, identity: PodIdentity) -> None:
        self._refused.pop(key, None)
        self._good[key] = _Good(identity, self._monotonic())
        self._good.move_to_end(key)
        own = self._tokens_of.setdefault(identity.pod_uid, [])
        if key not in own:
            own.append(key)
        if len(own) > MAX_OF_POD:
            self._drop(own[0])
        while len(self._good) > self._limits.accepted:
            self._drop(next(iter(self._good)))

    def _drop(self, key: bytes) -> None:
        good = self._good.pop(key, None)
        if good is None:
            return
        own = self._tokens_of[good.identity.pod_uid]
        own.remove(key)
        if not own:
            del self._tokens_of[good.identity.pod_uid]


def authenticator(client: KubeClient) -> Authenticate:
    """The pod of a bearer token by TokenReview, which refuses the token of a deleted pod."""

    async def authenticate(token: str) -> PodIdentity | None:
        review = await client.review_token(token, (labels.TOKEN_AUDIENCE,))
        if not isinstance(review, TokenIdentity) or not review.pod_uid:
            return None
        # An API server that does not know audiences checks for its own audience, and names none.
        if labels.TOKEN_AUDIENCE not in review.audiences:
            log.warning(
                "the API server confirmed a token for other audiences: it is refused",
                extra={"namespace": review.namespace, "pod": review.pod_name, "audiences": review.audiences[:8]},
            )
            return None
        return PodIdentity(review.namespace, review.pod_name, review.pod_uid)

    return authenticate
