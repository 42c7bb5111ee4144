"""Whether the ranks' folders are one folder: a path on each node's own disk looks the same on all of them.

Without this each rank would write its part where nobody else sees it, and the first save would fail after
`peer_timeout` seconds. Invariant: every rank learns the same answer, so that nobody waits in a
collective for a rank that has gone.
"""

from __future__ import annotations

import socket
import time
from typing import Final

from everstep.checkpoint.format.layout import record_name
from everstep.checkpoint.format.manifest import OpenRecord, encode_record
from everstep.checkpoint.ranks import Ranks
from everstep.storage import NotFound, ObjectStore, RetryableError, StorageError, StoreUnusable

# One client of a network file system may see late what another one wrote. NFS asks the server at the first look-up.
PATIENCE: Final = 10.0
_PAUSE: Final = 0.1


def check_shared(store: ObjectStore, own: OpenRecord, ranks: Ranks) -> None:
    """See on every rank the record `own`, which rank 0 has just created. Collective.

    Only folders and memory are looked at: a bucket is one place by its name. Raises `StoreUnusable` on every rank if
    one does not see it within `PATIENCE` seconds.
    """
    if ranks.world_size == 1:
        return
    blind = -1 if _sees(store, own) else ranks.rank
    found = ranks.maximum(blind)
    if found < 0:
        return
    where = f" (on {socket.gethostname()})" if found == ranks.rank else ""
    raise StoreUnusable(
        f"{store.url}: rank {found}{where} does not see there what rank 0 has written: this place is not shared "
        "between them. All ranks need one folder that every node mounts (NFS and the like), or an object store's URL"
    )


def _sees(store: ObjectStore, own: OpenRecord) -> bool:
    if not store.url.startswith(("file:", "memory:")):
        return True
    wanted, deadline = encode_record(own), time.monotonic() + PATIENCE
    while True:
        try:
            # The bytes, too: a folder of the node's own may hold another log, with a record of this number.
            if store.get(record_name(own.n)) == wanted:
                return True
        except NotFound:
            pass
        except RetryableError:
            return True  # the store is away, which says nothing; the first save will tell
        except StorageError:
            return False  # it may not be read here
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE)
