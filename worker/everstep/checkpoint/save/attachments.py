"""Small objects that lie beside the shards of a commit. Nobody needs them to read it.

They are in the folder of the save, and go with it when it is deleted. Invariant: what a store does not take or give
here is logged, and costs nothing else.
"""

from __future__ import annotations

import logging

from everstep.checkpoint.format.layout import attachment_name
from everstep.checkpoint.handle import Committed, SaveHandle
from everstep.storage import ObjectStore, StorageError
from everstep.storage.errors import NotFound

log = logging.getLogger("everstep.checkpoint")


def attach(store: ObjectStore, handle: SaveHandle, name: str, data: bytes) -> None:
    """Put `data` beside a save that is over, if it became a commit."""
    if isinstance(handle.outcome, Committed):
        write(store, handle.save_id, name, data)


def write(store: ObjectStore, save_id: str, name: str, data: bytes) -> None:
    """Put `data` beside the commit of this save."""
    try:
        store.put(attachment_name(save_id, name), data)
    except StorageError as e:
        log.warning("%s was not put beside the commit: %s", attachment_name(save_id, name), e)


def read(store: ObjectStore, save_id: str, name: str) -> bytes | None:
    """None if there is none, or the store does not give it."""
    try:
        return store.get(attachment_name(save_id, name))
    except NotFound:
        return None
    except StorageError as e:
        log.warning("%s was not read: %s", attachment_name(save_id, name), e)
        return None
