"""Pins: durable objects that keep a commit's shards, whoever cleans up; and the deletion that gives way to them.

There are three kinds: a person's pin, a tag (a name for a commit), and the mark of a commit that retention keeps beyond
the newest ones (`keep`). All hold alike, and each goes by itself.

A pin and a deletion may meet. Each first writes its own object, then looks for the other's: the pin one in the folder
`pins/<save id>/`, the deletion `data/<save id>/deleting-<random>.json`. Whatever the interleaving, at least one sees
the other and gives way: a deletion that sees a pin withdraws, a pin that sees a deletion is refused. So a pin that was
granted holds until it is taken back. It rests on a store that lists its own writes.

Several may do either at once, so each has an object of its own, with a random part in its name, and who gives way takes
no other's away. A deletion's object stands until everything is deleted. A deletion that withdraws first writes
`data/<save id>/withdrawn-<the same random part>.json`, which makes its object void: a request that was repeated may
arrive late and bring the object back, and nobody would remove it. A hold that was granted replaces those of the same
kind that were listed before its own was first written: of two at once not both can have come before the other, so one
that was granted always stays.

A deleter may die between its object and the end. So its object says when it was written, and a deleter that is not done
after `LASTS` withdraws: it looks at its clocks before each object that it deletes. Whoever finds an object that is
older than `DEAD` writes its withdrawal, and goes on. Only here clocks decide: those of two machines may differ by what
lies between the two, less the time that one request takes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Final

from everstep.checkpoint.errors import CheckpointError, Damaged, FormatError
from everstep.checkpoint.format import wire
from everstep.checkpoint.format.chunks import check_size
from everstep.checkpoint.format.compaction import is_compacted
from everstep.checkpoint.format.layout import (
    KEPT,
    PIN,
    PINS,
    deletion_name,
    folder_of,
    held_save,
    hold_name,
    holds_folder,
    is_deletion,
    pin_name,
    save_folder,
    tag_in,
    tag_of,
    withdrawal_name,
)
from everstep.checkpoint.format.manifest import VERSION, CommitRecord, Shard
from everstep.checkpoint.format.settled import read_settled
from everstep.checkpoint.format.wire import Fields
from everstep.checkpoint.keep import Kept, metrics_of
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.storage import NotFound, ObjectStore

LASTS: Final = 600.0  # seconds after which a deletion gives way; the next clean-up goes on with it
DEAD: Final = 3600.0  # and after which it has given way, or its program has died
_TRIES: Final = 3
_PAUSE: Final = 0.2  # seconds; a deletion that gives way does so within a few requests


@dataclass(frozen=True)
class Holds:
    """The pins, marks and tags that hold saves. `objects`: names of the objects, by the save's id and what holds it."""

    objects: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def pinned(self) -> frozenset[str]:
        """The ids that somebody pinned."""
        return frozenset(identifier for identifier, what in self.objects if what == PIN)

    @cached_property
    def kept(self) -> frozenset[str]:
        """The ids that retention marked."""
        return frozenset(identifier for identifier, what in self.objects if what == KEPT)

    @cached_property
    def tags(self) -> Mapping[str, tuple[str, ...]]:
        """The tags with their saves, sorted: more than one only while a tag is moved."""
        tagged = sorted((tag, identifier) for identifier, what in self.objects if (tag := tag_in(what)) is not None)
        return {tag: tuple(save for _, save in pairs) for tag, pairs in groupby(tagged, itemgetter(0))}

    @property
    def saves(self) -> frozenset[str]:
        """All ids that are held."""
        return frozenset(identifier for identifier, _ in self.objects)

    def tags_of(self, save_id: str) -> tuple[str, ...]:
        """The tags of a save, sorted."""
        return tuple(sorted(tag for tag, saves in self.tags.items() if save_id in saves))

    def names(self, save_id: str, what: str) -> tuple[str, ...]:
        """The objects that hold a save by this."""
        return self.objects.get((save_id, what), ())

    def all_names(self) -> list[str]:
        """All objects that hold, sorted."""
        return sorted(name for names in self.objects.values() for name in names)

    def of_tag(self, tag: str) -> Holds:
        """Of all that is held, what this tag does."""
        return Holds({by: names for by, names in self.objects.items() if tag_in(by[1]) == tag})


def holds(store: ObjectStore) -> Holds:
    """All that is held, by one listing."""
    objects = dict[tuple[str, str], list[str]]()
    for info in store.list(PINS):
        if (found := held_save(info.name)) is not None:
            objects.setdefault(found, []).append(info.name)
    return Holds({by: tuple(names) for by, names in objects.items()})


def held(store: ObjectStore) -> frozenset[str]:
    """The save ids that are pinned, tagged, or marked by retention."""
    return holds(store).saves


def is_held(store: ObjectStore, identifiers: Iterable[str]) -> bool:
    """Whether one of these saves is."""
    return any(store.size(pin_name(i)) is not None or store.list(holds_folder(i)) for i in identifiers)


def held_commits(store: ObjectStore, found: Holds) -> list[int]:
    """The numbers of the commits that are held, newest first. A hold that cannot be read is left out."""
    numbers = set()
    for name in found.all_names():
        try:
            numbers.add(_fields(store, name).integer("n"))
        except (NotFound, FormatError):
            continue
    return sorted(numbers, reverse=True)


def pin(
    store: ObjectStore, record: CommitRecord, at: str, sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> None:  # fmt: skip
    """Keep the shards of a commit until `unpin`. Raises `CheckpointError` if they are gone, or about to be."""
    found = holds(store)
    older = [name for identifier in saves_of(record) for name in found.names(identifier, PIN)]
    _hold(store, record, PIN, _body(record, at), older, sleep, now)


def unpin(store: ObjectStore, record: CommitRecord) -> None:
    """Let a commit be deleted again when it is old enough: neither a pin nor retention's mark holds it then."""
    found = holds(store)
    for identifier in saves_of(record):
        _delete(store, (*found.names(identifier, PIN), *found.names(identifier, KEPT)))


def tag(
    store: ObjectStore, record: CommitRecord, name: str, at: str, sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> None:  # fmt: skip
    """Give a commit a name, and keep it until `untag`. The name leaves the commit that had it before.

    Raises `CheckpointError` for a name that cannot be one, and as `pin` does.
    """
    try:
        what = tag_of(name)
    except ValueError as e:
        raise CheckpointError(str(e)) from e
    older = holds(store).of_tag(name).all_names()
    _hold(store, record, what, {**_body(record, at), "tag": name}, older, sleep, now)


def untag(store: ObjectStore, name: str) -> bool:
    """Take a name away; whether there was one."""
    found = holds(store).of_tag(name).all_names()
    _delete(store, found)
    return bool(found)


def mark_kept(
    store: ObjectStore, mark: Kept, shards: Iterable[Shard] = (), now: Callable[[], float] = time.time
) -> bool:
    """Write retention's mark of a commit, or take it away if it says no reason; whether that was done. It is not if
    somebody else has begun to delete the commit, or has done so: `shards` are those of one that has no mark yet."""
    folder = holds_folder(mark.save_id)
    older = [info.name for info in store.list(folder) if held_save(info.name) == (mark.save_id, KEPT)]
    if not mark.why:
        _delete(store, older)
        return True
    body: dict[str, wire.Json] = {
        "version": VERSION, "n": mark.n, "step": mark.step, "at": mark.at, "metrics": dict(mark.metrics),
        "why": list(mark.why),
    }  # fmt: skip
    own = hold_name(mark.save_id, KEPT, _random())
    store.put(own, wire.encode(body))
    # In this order: a deletion that has ended before the first look has left no shards, or a compacted record.
    parts = tuple(shards)
    whole = not _is_being_deleted(store, mark.save_id, now()) and all(store.size(p.path) == p.bytes for p in parts)
    if whole and (parts or older or not _is_compacted(store, mark.n)):
        _delete(store, older)
        return True
    store.delete(own)
    return False


def read_kept(store: ObjectStore, identifier: str, names: Iterable[str]) -> Kept | None:
    """Retention's mark of a save, of which `names` are the objects: more than one if replacing it was cut off, and then
    what any says counts. None if it is gone, or damaged: it holds the save then, and says nothing."""
    mark: Kept | None = None
    for name in names:
        try:
            fields = _fields(store, name)
            at, n, step = fields.any("at"), fields.integer("n"), fields.integer("step")
            why = {str(text) for text in fields.items("why")} | set(mark.why if mark else ())
            mark = Kept(identifier, n, step, float(at) if isinstance(at, int | float) else 0.0, metrics_of(
                {"metrics": fields.any("metrics")}), tuple(sorted(why)))  # fmt: skip
        except (NotFound, FormatError):
            continue
    return mark


def _body(record: CommitRecord, at: str) -> dict[str, wire.Json]:
    return {"version": VERSION, "n": record.n, "step": record.step, "at": at}


def _hold(
    store: ObjectStore, record: CommitRecord, what: str, body: dict[str, wire.Json], older: Iterable[str],
    sleep: Callable[[float], None], now: Callable[[], float],
) -> None:  # fmt: skip
    """Write an object that holds each save of a commit, unless the deletion of one has begun or its shards are gone.
    It replaces those in `older`, which were listed before."""
    own = [hold_name(identifier, what, _random()) for identifier in saves_of(record)]
    for attempt in range(_TRIES):
        for name in own:
            store.put(name, wire.encode(body))
        if not any(_is_being_deleted(store, identifier, now()) for identifier in saves_of(record)):
            break
        _delete(store, own)
        if attempt < _TRIES - 1:
            sleep(_PAUSE)
    else:
        raise CheckpointError(
            f"{store.url}: the deletion of step {record.step} (record {record.n}) has begun; take a newer one. If the "
            f"program that deletes has died, try again {DEAD / 60:.0f} minutes later: what is whole can be held then"
        )
    try:
        for shard in record.shards:
            check_size(store, shard)
        if not record.shards and _is_compacted(store, record.n):
            raise Damaged("it was deleted, and its record is compacted")
    except Damaged as e:
        _delete(store, own)
        done = "pinned" if what == PIN else "tagged"
        raise CheckpointError(f"{store.url}: step {record.step} (record {record.n}) cannot be {done}: {e}") from e
    _delete(store, older)


def delete_save(
    store: ObjectStore, identifier: str, names: Iterable[str], last: Callable[[], object] = lambda: None,
    now: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic,
) -> bool:  # fmt: skip
    """Delete a save's objects, `names`, unless something holds it, and then do `last`; whether that was done. What
    would hold the save meanwhile is refused. It is not done either if it takes longer than `LASTS`. Repeating it is
    harmless."""
    mark = deletion_name(identifier, _random())
    at, started = now(), clock()
    body = wire.encode({"version": VERSION, "save_id": identifier, "at": int(at)})

    def is_late() -> bool:  # a machine that slept has only the first clock's word for it
        return now() - at > LASTS or clock() - started > LASTS

    store.put(mark, body)
    gives_way = is_held(store, [identifier])
    for name in sorted(names, key=is_deletion):  # those of others, of which most have died, after what they stand for
        if gives_way := gives_way or is_late():
            break
        store.delete(name)
    if gives_way or is_late():
        # The save stays, perhaps for good. A repeated `put` may still bring the mark back: this object says it is void.
        store.put(withdrawal_name(mark), body)
        store.delete(mark)
        return False
    last()
    store.delete(mark)
    return True


def _is_compacted(store: ObjectStore, n: int) -> bool:
    """Of a commit without shards, which is deleted by compacting its record."""
    record = CommitLog(store).read(n)
    return isinstance(record, CommitRecord) and is_compacted(record)


def _is_being_deleted(store: ObjectStore, identifier: str, now: float) -> bool:
    names = {info.name for info in store.list(save_folder(identifier))}
    begun = [name for name in names if is_deletion(name) and withdrawal_name(name) not in names]
    return any(not _is_over(store, identifier, name, now) for name in sorted(begun))


def _is_over(store: ObjectStore, identifier: str, mark: str, now: float) -> bool:
    """Whether nobody deletes by this object any more. One whose program has died is made void."""
    try:
        at = _fields(store, mark).integer("at")
    except NotFound:
        return True  # since it was listed; what it has deleted is looked at next
    except FormatError:
        return False  # of an earlier release, which does not say when
    if now - at <= DEAD:
        return False
    store.put(withdrawal_name(mark), wire.encode({"version": VERSION, "save_id": identifier, "at": at}))
    return True


def _fields(store: ObjectStore, name: str) -> Fields:
    return Fields(read_settled(store, name, lambda data: wire.decode(data, name)), name)


def _delete(store: ObjectStore, names: Iterable[str]) -> None:
    for name in names:
        store.delete(name)


def _random() -> str:
    return secrets.token_hex(8)


def saves_of(record: CommitRecord) -> list[str]:
    """The saves whose objects a commit needs: its own, and any other that its shards lie in."""
    folders = {folder_of(shard.path) for shard in record.shards} | {record.save_id}
    return sorted(folder for folder in folders if folder is not None)
