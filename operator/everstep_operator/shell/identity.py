"""Who is behind a bearer token, without asking Kubernetes for every report.

A token's check (TokenReview) costs a request, a worker reports twice a second: answers are kept for a short while under
the token's SHA-256, never under the token. Invariants: the token itself is neither kept nor logged; memory and parallel
checks are bounded; a deleted pod's token is believed for at most `ttl` seconds more.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

MAX_TOKEN = 16 * 1024  # characters; a projected token has about 1,200


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """The pod that a token is bound to."""

    namespace: str
    pod_name: str
    pod_uid: str


Authenticate = Callable[[str], Awaitable[PodIdentity | None]]


@dataclass(frozen=True, slots=True)
class _Answer:
    identity: PodIdentity | None
    until: float  # monotonic seconds


class IdentityCache:
    """Answers `identify(token)` from memory or through `authenticate`, whose errors are passed on and not kept."""

    def __init__(
        self,
        authenticate: Authenticate,
        *,
        monotonic: Callable[[], float],
        ttl: float = 15.0,
        refused_ttl: float = 2.0,
        max_entries: int = 20_000,
        max_parallel: int = 16,
    ) -> None:
        """`ttl` and `refused_ttl` are seconds; a refusal is kept shorter because the next token file may be right."""
        self._authenticate = authenticate
        self._monotonic = monotonic
        self._ttl, self._refused_ttl, self._max_entries = ttl, refused_ttl, max_entries
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._pending: dict[bytes, asyncio.Task[PodIdentity | None]] = {}
        self._slots = asyncio.Semaphore(max_parallel)

    async def identify(self, token: str) -> PodIdentity | None:
        """The pod behind `token`; None for a token that is not valid."""
        if not token or len(token) > MAX_TOKEN:
            return None
        key = hashlib.sha256(token.encode()).digest()
        answer = self._answers.get(key)
        if answer is not None and self._monotonic() < answer.until:
            return answer.identity
        task = self._pending.get(key)
        if task is None:
            # Concurrent reports of one pod share a single check, which outlives whichever of them gives up first.
            task = asyncio.create_task(self._check(key, token))
            self._pending[key] = task
            task.add_done_callback(lambda done: self._settled(key, done))
        return await asyncio.shield(task)

    async def _check(self, key: bytes, token: str) -> PodIdentity | None:
        async with self._slots:
            identity = await self._authenticate(token)
        ttl = self._ttl if identity is not None else self._refused_ttl
        self._answers[key] = _Answer(identity, self._monotonic() + ttl)
        self._answers.move_to_end(key)
        while len(self._answers) > self._max_entries:
            self._answers.popitem(last=False)
        return identity

    def _settled(self, key: bytes, task: asyncio.Task[PodIdentity | None]) -> None:
        del self._pending[key]
        if not task.cancelled():
            task.exception()  # seen, also when every caller has gone

    def forget(self) -> None:
        """Drop every answer, as a new leader does."""
        self._answers.clear()
