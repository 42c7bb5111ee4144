"""Asks a store at start whether it honours a conditional create, before any training depends on it.

Some S3 look-alikes accept `If-None-Match` and ignore it: two writers would then both believe that they committed. A
fixed name is created twice; whoever came before, the second create must be refused. The same two requests find a
missing bucket and missing write permission.
"""

from __future__ import annotations

from everstep.storage.base import ObjectStore
from everstep.storage.errors import AlreadyExists, StoreUnusable, TerminalError

PROBE_NAME = "probe/conditional-create"
PROBE_DATA = b"everstep: a second conditional create of this object must be refused\n"


def probe(store: ObjectStore) -> None:
    """Raise `StoreUnusable` if the store cannot hold a commit log. Leaves one small object, `PROBE_NAME`."""
    for _ in range(2):
        try:
            store.create(PROBE_NAME, PROBE_DATA)
        except AlreadyExists:
            return
        except StoreUnusable:
            raise
        except TerminalError as e:
            raise StoreUnusable(f"{store.url} refuses a small object: {e}") from e
    raise StoreUnusable(
        f"{store.url} ignores conditional creates (If-None-Match): two writers could both commit. Use a store that "
        "honours them, or pass single_committer=True (EVERSTEP_SINGLE_COMMITTER=1) if you are sure that only "
        "one job ever writes to this URL. Then a process of an earlier round that still runs is not kept out either"
    )
