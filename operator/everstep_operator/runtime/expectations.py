"""Remembers writes of this process that its cache does not show yet.

A cache lags behind the process's own writes. A decision taken in between would create the same pod twice, or count a
deleted pod as alive. So the owner of a key waits until its expectations are fulfilled. Creations are expected by name,
which is known before the request is sent: the event may come before the response. Deletions are expected by UID,
because a name may be taken again. Invariant: an expectation ends by its event, by `cancel_*` if the write failed, or by
expiry. It must expire, because events of one object may be merged and one of them lost. After kueue's
`util/expectations` and the UID tracking expectations of the controllers in Kubernetes itself.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

EXPIRY = 30.0  # seconds: far above a healthy watch's lag, and short enough that a lost event is no outage


@dataclass(frozen=True, slots=True)
class Pending:
    """The events still expected for a key, and until when (monotonic seconds)."""

    creations: frozenset[str] = frozenset()
    deletions: frozenset[str] = frozenset()
    expires: float = 0.0

    @property
    def reason(self) -> str:
        """The text for a log line or a requeue."""
        parts = [f"creation of {name}" for name in sorted(self.creations)]
        parts += [f"deletion of uid {uid}" for uid in sorted(self.deletions)]
        return "waiting to observe " + ", ".join(parts)


class Expectations(Generic[K]):
    """Expectations by key. `now` is in monotonic seconds."""

    def __init__(self, expiry: float = EXPIRY) -> None:
        self._expiry = expiry
        self._pending: dict[K, Pending] = {}

    def expect(self, key: K, *, creations: Iterable[str] = (), deletions: Iterable[str] = (), now: float) -> None:
        """Expect these events. Call it *before* the writes are sent, because events may come before responses."""
        pending = self._live(key, now) or Pending()
        self._store(
            key,
            Pending(pending.creations | set(creations), pending.deletions | set(deletions), now + self._expiry),
        )

    def observe_created(self, key: K, name: str) -> None:
        """An event showed the object; also for `cancel` after a create that certainly did not happen."""
        pending = self._pending.get(key, Pending())
        self._store(key, Pending(pending.creations - {name}, pending.deletions, pending.expires))

    def observe_deleted(self, key: K, uid: str) -> None:
        """An event showed the deletion (or a `deletionTimestamp`, if that is what the key waits for)."""
        pending = self._pending.get(key, Pending())
        self._store(key, Pending(pending.creations, pending.deletions - {uid}, pending.expires))

    def cancel_creation(self, key: K, name: str) -> None:
        """The create failed and no event will come."""
        self.observe_created(key, name)

    def cancel_deletion(self, key: K, uid: str) -> None:
        """The delete failed, or the object was gone already."""
        self.observe_deleted(key, uid)

    def pending(self, key: K, now: float) -> Pending | None:
        """The events that `key` still waits for; None if it may decide. `expires` says when to come back at the
        latest."""
        return self._live(key, now)

    def forget(self, key: K) -> None:
        """`key` is gone."""
        self._pending.pop(key, None)

    def expire(self, now: float) -> None:
        """Drop expired expectations, also those of keys that are not used any more."""
        self._pending = {key: pending for key, pending in self._pending.items() if now < pending.expires}

    def __len__(self) -> int:
        return len(self._pending)

    def _live(self, key: K, now: float) -> Pending | None:
        pending = self._pending.get(key)
        if pending is not None and now >= pending.expires:
            del self._pending[key]
            return None
        return pending

    def _store(self, key: K, pending: Pending) -> None:
        if pending.creations or pending.deletions:
            self._pending[key] = pending
        else:
            self._pending.pop(key, None)
