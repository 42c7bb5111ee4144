"""Errors of the cache. Other errors of this package are those of `everstep.data`."""

from __future__ import annotations

from everstep.data.errors import DataError


class CacheError(DataError):
    """A file cannot be had: the store has not got it, or it is not what the index says. A restart may help."""

    def __init__(self, *words: object) -> None:
        super().__init__(*words)
        self.may_pass()


class CacheFull(CacheError):
    """There is no room for a file: within the cache's limit, or on its disk."""
