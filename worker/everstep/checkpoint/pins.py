"""Pins: durable objects that keep a commit's shards, whoever cleans up; and the deletion that gives way to them.

A pin and a deletion may meet. Each first writes its own object, then looks for the other's: the pin
`pins/<save id>.json`, the deletion `data/<save id>/deleting.json`. Whatever the interleaving, at least one sees the
other and gives way: a deletion that sees a pin withdraws, a pin that sees a deletion is refused. So a pin that was
granted holds until it is taken back, and no clock is in it; it rests on a store that reads its own writes, as the log
does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from everstep.checkpoint import wire
from everstep.checkpoint.chunks import check_size
from everstep.checkpoint.errors import CheckpointError, Damaged, FormatError
from everstep.checkpoint.layout import PINS, deletion_name, folder_of, pin_name, pinned_save
from everstep.checkpoint.manifest import VERSION, CommitRecord
from everstep.checkpoint.wire import Fields
from everstep.storage import NotFound, ObjectStore

_TRIES: Final = 3
_PAUSE: Final = 0.2  # seconds; a deletion that gives way does so within a few requests


def pinned(store: ObjectStore) -> frozenset[str]:
    """The save ids that are pinned."""
    found = (pinned_save(info.name) for info in store.list(PINS))
    return frozenset(identifier for identifier in found if identifier is not None)


def pinned_commits(store: ObjectStore) -> list[int]:
    """The numbers of the commits that are pinned, newest first. A pin that cannot be read is left out."""
    numbers = set()
    for identifier in pinned(store):
        try:
            name = pin_name(identifier)
            numbers.add(Fields(wire.decode(store.get(name), name), name).integer("n"))
        except (NotFound, FormatError):
            continue
    return sorted(numbers, reverse=True)


def pin(store: ObjectStore, record: CommitRecord, at: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Keep the shards of a commit until `unpin`. Raises `CheckpointError` if they are gone, or about to be."""
    body: dict[str, wire.Json] = {"version": VERSION, "n": record.n, "step": record.step, "at": at}
    for attempt in range(_TRIES):
        for identifier in _saves(record):
            store.put(pin_name(identifier), wire.encode(body))
        if all(store.size(deletion_name(identifier)) is None for identifier in _saves(record)):
            break
        unpin(store, record)
        if attempt < _TRIES - 1:
            sleep(_PAUSE)
    else:
        raise CheckpointError(
            f"{store.url}: the deletion of step {record.step} (record {record.n}) has begun; pin a newer one"
        )
    try:
        for shard in record.shards:
            check_size(store, shard)
    except Damaged as e:
        unpin(store, record)
        raise CheckpointError(f"{store.url}: step {record.step} (record {record.n}) cannot be pinned: {e}") from e


def unpin(store: ObjectStore, record: CommitRecord) -> None:
    """Let a commit be deleted again when it is old enough."""
    for identifier in _saves(record):
        store.delete(pin_name(identifier))


def delete_save(store: ObjectStore, identifier: str, names: Iterable[str]) -> bool:
    """Delete a save's objects, `names`, unless it is pinned; whether that was done. Repeating it is harmless."""
    mark = deletion_name(identifier)
    store.put(mark, wire.encode({"version": VERSION, "save_id": identifier}))
    if store.size(pin_name(identifier)) is not None:
        store.delete(mark)
        return False
    for name in names:
        if name != mark:
            store.delete(name)
    store.delete(mark)
    return True


def _saves(record: CommitRecord) -> list[str]:
    """The saves whose objects a commit needs: its own, and any other that its shards lie in."""
    folders = {folder_of(shard.path) for shard in record.shards} | {record.save_id}
    return sorted(folder for folder in folders if folder is not None)
