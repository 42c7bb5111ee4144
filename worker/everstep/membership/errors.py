"""The errors of a rendezvous. Retryable and final errors are different types."""

from __future__ import annotations

from everstep.contract.document import DocumentInvalid, RendezvousFailed

__all__ = [
    "DocumentInvalid",
    "JoinRefused",
    "JoinTimedOut",
    "ProcessesNeeded",
    "RendezvousClosed",
    "RendezvousFailed",
    "StoreRefused",
    "StoreUnavailable",
]


class StoreUnavailable(RendezvousFailed):
    """The store did not answer, or lost its quorum. The same call may succeed later. A write may have taken effect."""


class StoreRefused(RendezvousFailed):
    """The store refused for good: wrong password, wrong certificate, wrong version."""


class RendezvousClosed(RendezvousFailed):
    """The job is closed, because of `why`: no round follows. `before`: it was closed already when this agent asked for
    its first round."""

    def __init__(self, message: str, why: str = "", *, before: bool = False) -> None:
        super().__init__(message)
        self.why, self.before = why, before


class JoinRefused(RendezvousFailed):
    """The document does not let this agent join, and never will; the message says why."""


class JoinTimedOut(RendezvousFailed):
    """No round with this agent was formed in time; the message says what it waited for."""


class ProcessesNeeded(RendezvousFailed):
    """The job's processes keep their memory from round to round, and this agent waits without any: it is to start them
    before it joins, because the others would wait for them."""
