"""What can go wrong in a rendezvous. Retryable and final errors are different types."""

from __future__ import annotations

from everstep.contract.document import DocumentInvalid, RendezvousFailed

__all__ = [
    "DocumentInvalid",
    "JoinRefused",
    "JoinTimedOut",
    "RendezvousClosed",
    "RendezvousFailed",
    "StoreRefused",
    "StoreUnavailable",
]


class StoreUnavailable(RendezvousFailed):
    """The store did not answer, or lost its quorum: the same call may succeed later. A write may have happened."""


class StoreRefused(RendezvousFailed):
    """The store answered that it will not do this: wrong password, wrong certificate, wrong version. Final."""


class RendezvousClosed(RendezvousFailed):
    """The job is closed, because of `why`: no round follows. `before`: it was when this agent asked for its first."""

    def __init__(self, message: str, why: str = "", *, before: bool = False) -> None:
        super().__init__(message)
        self.why, self.before = why, before


class JoinRefused(RendezvousFailed):
    """The document says why this agent may not join; repeating it cannot help."""


class JoinTimedOut(RendezvousFailed):
    """No round with this agent in it was formed in time; the text says what was waited for."""
