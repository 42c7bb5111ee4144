"""Errors of the storage package, split by the only question a caller has: may trying again help?

Every backend translates its own exceptions into these at its boundary; nothing above `storage` sees a botocore or
fsspec error.
"""

from __future__ import annotations

from everstep.contract import exit_codes


class StorageError(Exception):
    """Base of every error that a store raises."""


class RetryableError(StorageError):
    """The store did not answer, or asked to come back later. The operation may or may not have happened.

    `retry_after` is how many seconds the store asked to be left alone, if it said so.
    """

    retry_after: float | None = None


class Throttled(RetryableError):
    """The store asks for fewer requests (429, 503 SlowDown). The operation has not happened."""


class TerminalError(StorageError):
    """Trying the same again cannot help."""


class Unsynced(TerminalError):
    """Bytes of an upload may be lost, and the store will not say so again: write the whole object anew."""


class AlreadyExists(TerminalError):
    """A conditional create met an existing object. After a lost response that object may be the caller's own."""


class NotFound(TerminalError):
    """No object has this name."""


class Truncated(TerminalError):
    """The object ends before the bytes that were asked for."""


class InvalidName(TerminalError):
    """The object name leaves the store's prefix or is not one that every backend accepts."""


class StoreUnusable(TerminalError):
    """The store as a whole cannot be used: no permission, no bucket, no such scheme, no conditional create.

    A script that lets it propagate should exit with `exit_code`: starting again cannot help.
    """

    exit_code = exit_codes.STORE_UNUSABLE
