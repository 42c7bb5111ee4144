"""Pins: durable objects that keep a commit's shards, whoever cleans up; and the deletion that gives way to them.

There are three kinds: a person's pin, a tag (a name for a commit), and the mark of a commit that retention keeps beyond
the newest ones (`keep`). All hold alike, and each goes by itself.

A pin and a deletion may meet. Each first writes its own object, then looks for the other's: the pin
`pins/<save id>.json`, or one in the folder `pins/<save id>/`; the deletion `data/<save id>/deleting-<random>.json`.
Whatever the interleaving, at least one sees the other and gives way: a deletion that sees a pin withdraws, a pin that
sees a deletion is refused. So a pin that was granted holds until it is taken back, and no clock is in it; it rests on a
store that reads and lists its own writes.

Several may delete a save at once. Each has an object of its own, which stands from before it looks until it has deleted
everything: who withdraws takes no other's away. One that a deleter left when it died refuses pins until the save is
deleted, which the next clean-up that does not keep it does.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from everstep.checkpoint import wire
from everstep.checkpoint.chunks import check_size
from everstep.checkpoint.errors import CheckpointError, Damaged, FormatError
from everstep.checkpoint.keep import Kept, metrics_of
from everstep.checkpoint.layout import (
    PINS,
    deletion_name,
    folder_of,
    held_save,
    holds_folder,
    is_deletion,
    kept_name,
    pin_name,
    pinned_save,
    save_folder,
    tag_name,
)
from everstep.checkpoint.manifest import VERSION, CommitRecord, Shard
from everstep.checkpoint.wire import Fields
from everstep.storage import NotFound, ObjectStore

_TRIES: Final = 3
_PAUSE: Final = 0.2  # seconds; a deletion that gives way does so within a few requests


@dataclass(frozen=True, slots=True)
class Holds:
    """What holds saves: the ids that somebody pinned, those that retention marked, and the tags with their saves."""

    pinned: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # more than one only while a tag is moved

    @property
    def saves(self) -> frozenset[str]:
        """All ids that are held."""
        return self.pinned | self.kept | {save for saves in self.tags.values() for save in saves}

    def tags_of(self, save_id: str) -> tuple[str, ...]:
        """The tags of a save, sorted."""
        return tuple(sorted(tag for tag, saves in self.tags.items() if save_id in saves))


def holds(store: ObjectStore) -> Holds:
    """All that is held, by one listing."""
    pinned, kept, tags = set[str](), set[str](), dict[str, list[str]]()
    for info in store.list(PINS):
        if (identifier := pinned_save(info.name)) is not None:
            pinned.add(identifier)
        elif (found := held_save(info.name)) is not None:
            identifier, tag = found
            if tag is None:
                kept.add(identifier)
            else:
                tags.setdefault(tag, []).append(identifier)
    return Holds(frozenset(pinned), frozenset(kept), {tag: tuple(tags[tag]) for tag in sorted(tags)})


def held(store: ObjectStore) -> frozenset[str]:
    """The save ids that are pinned, tagged, or marked by retention."""
    return holds(store).saves


def held_commits(store: ObjectStore, found: Holds) -> list[int]:
    """The numbers of the commits that are held, newest first. A hold that cannot be read is left out."""
    numbers = set()
    names = [pin_name(i) for i in found.pinned] + [kept_name(i) for i in found.kept]
    names += [tag_name(i, tag) for tag, saves in found.tags.items() for i in saves]
    for name in sorted(names):
        try:
            numbers.add(Fields(wire.decode(store.get(name), name), name).integer("n"))
        except (NotFound, FormatError):
            continue
    return sorted(numbers, reverse=True)


def pin(store: ObjectStore, record: CommitRecord, at: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Keep the shards of a commit until `unpin`. Raises `CheckpointError` if they are gone, or about to be."""
    _hold(store, record, pin_name, _body(record, at), "pinned", sleep)


def unpin(store: ObjectStore, record: CommitRecord) -> None:
    """Let a commit be deleted again when it is old enough: neither a pin nor retention's mark holds it then."""
    for identifier in _saves(record):
        store.delete(pin_name(identifier))
        store.delete(kept_name(identifier))


def tag(
    store: ObjectStore, record: CommitRecord, name: str, at: str, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Give a commit a name, and keep it until `untag`. The name leaves the commit that had it before.

    Raises `CheckpointError` for a name that cannot be one, and as `pin` does.
    """
    try:
        tag_name(record.save_id, name)
    except ValueError as e:
        raise CheckpointError(str(e)) from e
    _hold(store, record, lambda i: tag_name(i, name), {**_body(record, at), "tag": name}, "tagged", sleep)
    for identifier in set(holds(store).tags.get(name, ())) - set(_saves(record)):
        store.delete(tag_name(identifier, name))


def untag(store: ObjectStore, name: str) -> bool:
    """Take a name away; whether there was one."""
    saves = holds(store).tags.get(name, ())
    for identifier in saves:
        store.delete(tag_name(identifier, name))
    return bool(saves)


def mark_kept(store: ObjectStore, mark: Kept, shards: Iterable[Shard] = ()) -> bool:
    """Write retention's mark of a commit, or take it away if it says no reason; whether that was done. It is not if
    somebody else has begun to delete the commit, or has done so: `shards` are those of one that has no mark yet."""
    name = kept_name(mark.save_id)
    if not mark.why:
        store.delete(name)
        return True
    body: dict[str, wire.Json] = {
        "version": VERSION, "n": mark.n, "step": mark.step, "at": mark.at, "metrics": dict(mark.metrics),
        "why": list(mark.why),
    }  # fmt: skip
    store.put(name, wire.encode(body))
    if not _is_being_deleted(store, mark.save_id) and all(store.size(s.path) == s.bytes for s in shards):
        return True
    store.delete(name)
    return False


def read_kept(store: ObjectStore, identifier: str) -> Kept | None:
    """Retention's mark of a save; None if it is gone, or damaged: it holds the save then, and says nothing."""
    name = kept_name(identifier)
    try:
        fields = Fields(wire.decode(store.get(name), name), name)
        at, n, step = fields.any("at"), fields.integer("n"), fields.integer("step")
        why = tuple(str(text) for text in fields.items("why"))
        return Kept(identifier, n, step, float(at) if isinstance(at, int | float) else 0.0, metrics_of(
            {"metrics": fields.any("metrics")}), why)  # fmt: skip
    except (NotFound, FormatError):
        return None


def _body(record: CommitRecord, at: str) -> dict[str, wire.Json]:
    return {"version": VERSION, "n": record.n, "step": record.step, "at": at}


def _hold(
    store: ObjectStore, record: CommitRecord, name: Callable[[str], str], body: dict[str, wire.Json], what: str,
    sleep: Callable[[float], None],
) -> None:  # fmt: skip
    """Write an object that holds each save of a commit, unless the deletion of one has begun or its shards are gone."""

    def withdraw() -> None:
        for identifier in _saves(record):
            store.delete(name(identifier))

    for attempt in range(_TRIES):
        for identifier in _saves(record):
            store.put(name(identifier), wire.encode(body))
        if not any(_is_being_deleted(store, identifier) for identifier in _saves(record)):
            break
        withdraw()
        if attempt < _TRIES - 1:
            sleep(_PAUSE)
    else:
        raise CheckpointError(
            f"{store.url}: the deletion of step {record.step} (record {record.n}) has begun; take a newer one"
        )
    try:
        for shard in record.shards:
            check_size(store, shard)
    except Damaged as e:
        withdraw()
        raise CheckpointError(f"{store.url}: step {record.step} (record {record.n}) cannot be {what}: {e}") from e


def delete_save(store: ObjectStore, identifier: str, names: Iterable[str]) -> bool:
    """Delete a save's objects, `names`, unless something holds it; whether that was done. Repeating it is harmless."""
    mark = deletion_name(identifier, secrets.token_hex(8))
    store.put(mark, wire.encode({"version": VERSION, "save_id": identifier}))
    if store.size(pin_name(identifier)) is not None or store.list(holds_folder(identifier)):
        store.delete(mark)
        return False
    for name in sorted(names, key=is_deletion):  # those of others, of which most have died, after what they stand for
        store.delete(name)
    store.delete(mark)
    return True


def _is_being_deleted(store: ObjectStore, identifier: str) -> bool:
    return any(is_deletion(info.name) for info in store.list(save_folder(identifier)))


def _saves(record: CommitRecord) -> list[str]:
    """The saves whose objects a commit needs: its own, and any other that its shards lie in."""
    folders = {folder_of(shard.path) for shard in record.shards} | {record.save_id}
    return sorted(folder for folder in folders if folder is not None)
