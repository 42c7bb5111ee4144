"""What the client raises. Every text says what to do, and none has the transport's own traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from everstep.jobs.source import JobError, NoSuchJob, Unreachable


class ClientError(Exception):
    """All that the client raises by itself."""


class InvalidRequest(ClientError, ValueError):
    """It cannot be carried out as it was given."""


class JobNotFound(ClientError, LookupError):
    """There is no job of this name."""


class JobFailed(ClientError):
    """The job has ended in another way than it was waited for."""


class WaitTimeout(ClientError, TimeoutError):
    """The time that was given for a wait is over. The job itself goes on."""


class ClusterUnavailable(ClientError, ConnectionError):
    """The cluster does not answer, is not configured, or does not allow it."""


@contextmanager
def translated() -> Iterator[None]:
    """Errors of what is asked about jobs become the client's."""
    try:
        yield
    except NoSuchJob as e:
        raise JobNotFound(str(e)) from None
    except JobError as e:
        raise InvalidRequest(str(e)) from None
    except Unreachable as e:
        raise ClusterUnavailable(str(e)) from None
