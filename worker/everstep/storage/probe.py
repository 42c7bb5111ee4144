"""Asks a store at start whether it honours a conditional create, before any training depends on it.

Some S3 look-alikes accept `If-None-Match` and ignore it, and some file systems look for a name first and take it then:
two writers would then both believe that they committed. So a fixed name is created twice, and the second create must be
refused whoever came before; then several creators race for new names, and each name must have one winner. The same
requests find a missing bucket and missing write permission.

One race that ends well may be luck: `CREATORS` race at least `LEAST` times and at most `MOST`, for `SECONDS`. That is
done once for a URL; an object says so to later starts. What a store does between two machines cannot be seen from one.
"""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from everstep.storage.base import ObjectStore
from everstep.storage.errors import AlreadyExists, StorageError, StoreUnusable, TerminalError

PROBE_NAME = "probe/conditional-create"
PROBE_DATA = b"everstep: a second conditional create of this object must be refused\n"
RACED_NAME = "probe/raced"
CREATORS: Final = 8
LEAST: Final = 4
MOST: Final = 64
SECONDS: Final = 0.3


def probe(store: ObjectStore) -> None:
    """Raise `StoreUnusable` if the store cannot hold a commit log. Leaves two small objects."""
    for _ in range(2):
        try:
            store.create(PROBE_NAME, PROBE_DATA)
        except AlreadyExists:
            break
        except StoreUnusable:
            raise
        except TerminalError as e:
            raise StoreUnusable(f"{store.url} refuses a small object: {e}") from e
    else:
        raise StoreUnusable(f"{store.url} ignores conditional creates (If-None-Match): {_REMEDY}")
    if store.size(RACED_NAME) is None:
        _check_races(store)
        store.put(RACED_NAME, PROBE_DATA)


def _check_races(store: ObjectStore) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(CREATORS, thread_name_prefix="everstep-probe") as pool:
        for done in range(MOST):
            if done >= LEAST and time.monotonic() - began > SECONDS:
                return
            if (winners := _race(store, pool)) > 1:
                raise StoreUnusable(
                    f"{store.url}: {winners} of {CREATORS} creators that raced for one name were all told that they "
                    f"have it, so a create is not atomic there: {_REMEDY}"
                )


def _race(store: ObjectStore, pool: ThreadPoolExecutor) -> int:
    """How many of the creators that began at once were told that a new object is theirs. Raises what a store raises
    that answers none of them."""
    name = f"probe/race-{secrets.token_hex(8)}"
    together = threading.Barrier(CREATORS)

    def create(number: int) -> bool:
        together.wait(30.0)
        try:
            store.create(name, PROBE_DATA + b"%d\n" % number)
        except AlreadyExists:
            return False
        return True

    outcomes = [pool.submit(create, number) for number in range(CREATORS)]
    errors = [error for outcome in outcomes if (error := outcome.exception()) is not None]
    won = sum(outcome.result() for outcome in outcomes if outcome.exception() is None)
    if won or not errors:
        store.delete(name)
    if (strange := next((e for e in errors if not isinstance(e, StorageError)), None)) is not None:
        raise strange
    if not won and errors:
        raise errors[0]
    return won


_REMEDY: Final = (
    "two writers could both commit. Use a store that honours them, or pass single_committer=True "
    "(EVERSTEP_SINGLE_COMMITTER=1) if you are sure that only one job ever writes to this URL. Then a process of an "
    "earlier round that still runs is not kept out either"
)
