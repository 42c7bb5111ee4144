"""Pins: durable objects that keep a commit's shards from being deleted, and the deletion that respects them.

There are three kinds of hold: a person's pin, a tag (a name for a commit), and the mark of a commit that retention
keeps beyond the newest ones (`keep`). Each of them alone prevents the deletion, and each is removed separately.

A pin and a deletion may run at the same time, and several of each. How they see each other is in
docs/reference/commit-format.md ("Clean-up"): a pin that was granted holds until it is removed. This needs a store that
lists its own writes. A hold that was granted removes the holds of the same kind that were listed before it was first
written. Two holds cannot each have been listed before the other was written, so at least one that was granted stays.

Clocks matter only for a deletion whose program died: those of two machines may differ by `DEAD - LASTS`, less the time
that one request takes.
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
from everstep.checkpoint.format.complete import read_complete
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
    save_folder,
    tag_in,
    tag_of,
    withdrawal_name,
)
from everstep.checkpoint.format.manifest import VERSION, CommitRecord, Shard, is_compacted
from everstep.checkpoint.format.wire import Fields
from everstep.checkpoint.keep import Kept, finite, metrics_of
from everstep.checkpoint.log.commitlog import CommitLog
from everstep.storage import NotFound, ObjectStore

LASTS: Final = 600.0  # seconds after which a deletion withdraws; the next clean-up goes on with it
DEAD: Final = 3600.0  # seconds after which it has withdrawn, or its program has died
_TRIES: Final = 3
_PAUSE: Final = 0.2  # seconds; a deletion that withdraws does so within a few requests


@dataclass(frozen=True)
class Holds:
    """The pins, marks and tags that hold saves. `objects`: their names, by the save's id and the kind of hold."""

    objects: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def pinned(self) -> frozenset[str]:
        """The ids of the saves that a person pinned."""
        return frozenset(identifier for identifier, what in self.objects if what == PIN)

    @cached_property
    def kept(self) -> frozenset[str]:
        """The ids of the saves that retention marked."""
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
        """The names of the objects by which `what` (a pin, a mark or a tag) holds a save."""
        return self.objects.get((save_id, what), ())

    def all_names(self) -> list[str]:
        """The names of all objects that hold a save, sorted."""
        return sorted(name for names in self.objects.values() for name in names)

    def of_tag(self, tag: str) -> Holds:
        """The holds of this tag alone."""
        return Holds({by: names for by, names in self.objects.items() if tag_in(by[1]) == tag})


def holds(store: ObjectStore) -> Holds:
    """All holds in the store, found by one listing."""
    objects = dict[tuple[str, str], list[str]]()
    for info in store.list(PINS):
        if (key := held_save(info.name)) is not None:
            objects.setdefault(key, []).append(info.name)
    return Holds({by: tuple(names) for by, names in objects.items()})


def held_saves(store: ObjectStore) -> frozenset[str]:
    """The save ids that are pinned, tagged, or marked by retention."""
    return holds(store).saves


def is_held(store: ObjectStore, identifiers: Iterable[str]) -> bool:
    """Whether one of these saves is pinned, tagged, or marked by retention."""
    return any(store.list(holds_folder(i)) for i in identifiers)


def held_commits(store: ObjectStore, holds: Holds) -> list[int]:
    """The numbers of the commits that are held, newest first. A hold that cannot be read is left out."""
    numbers = set()
    for name in holds.all_names():
        try:
            numbers.add(_fields(store, name).integer("n"))
        except (NotFound, FormatError):
            continue
    return sorted(numbers, reverse=True)


def pin(
    store: ObjectStore, record: CommitRecord, at: str, sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> None:  # fmt: skip
    """Keep the shards of a commit until `unpin`. Raises `CheckpointError` if they are deleted, or being deleted."""
    all_holds = holds(store)
    older = [name for identifier in saves_of(record) for name in all_holds.names(identifier, PIN)]
    _hold(store, record, PIN, _body(record, at), older, sleep, now)


def unpin(store: ObjectStore, record: CommitRecord) -> None:
    """Remove the pins and retention's marks of a commit, so that it can be deleted when it is old enough."""
    all_holds = holds(store)
    for identifier in saves_of(record):
        _delete(store, (*all_holds.names(identifier, PIN), *all_holds.names(identifier, KEPT)))


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
    """Remove a tag. Returns whether there was one."""
    names = holds(store).of_tag(name).all_names()
    _delete(store, names)
    return bool(names)


def mark_kept(
    store: ObjectStore, mark: Kept, shards: Iterable[Shard] = (), now: Callable[[], float] = time.time
) -> bool:
    """Write retention's mark of a commit, or remove it if it has no reason. Returns whether that was done: a mark is
    not written if another process has begun to delete the commit, or has deleted it. `shards`: those of a commit that
    has no mark yet."""
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
    # The order matters: a deletion that has ended before the first check has left no shards, or a compacted record.
    parts = tuple(shards)
    whole = not _is_being_deleted(store, mark.save_id, now()) and all(store.size(p.path) == p.bytes for p in parts)
    if whole and (parts or older or not _is_compacted(store, mark.n)):
        _delete(store, older)
        return True
    store.delete(own)
    return False


def read_kept(store: ObjectStore, identifier: str, names: Iterable[str]) -> Kept | None:
    """Retention's mark of a save. `names` are its objects: there is more than one if the program died while it replaced
    one by another, and then the reasons of all count. None if all are gone or damaged. A damaged one still keeps the
    save."""
    mark: Kept | None = None
    for name in names:
        try:
            fields = _fields(store, name)
            at, n, step = fields.any("at"), fields.integer("n"), fields.integer("step")
            why = {str(text) for text in fields.items("why")} | set(mark.why if mark else ())
            metrics = metrics_of({"metrics": fields.any("metrics")})
            mark = Kept(identifier, n, step, finite(at) or 0.0, metrics, tuple(sorted(why)))
        except (NotFound, FormatError):
            continue
    return mark


def _body(record: CommitRecord, at: str) -> dict[str, wire.Json]:
    return {"version": VERSION, "n": record.n, "step": record.step, "at": at}


def _hold(
    store: ObjectStore, record: CommitRecord, what: str, body: dict[str, wire.Json], older: Iterable[str],
    sleep: Callable[[float], None], now: Callable[[], float],
) -> None:  # fmt: skip
    """Write an object that holds each save of a commit, and then remove those in `older`, which were listed before.
    Raises `CheckpointError` if the deletion of one of the saves has begun, or if shards are gone."""
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
            f"{store.url}: the deletion of step {record.step} (record {record.n}) has begun; choose a newer commit. "
            f"If the program that deletes it has died, try again {DEAD / 60:.0f} minutes later: it can be kept then if "
            "all its shards are left"
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
    may: Callable[[], bool] = lambda: True,
) -> bool:  # fmt: skip
    """Delete the objects `names` of a save, then call `last`. Returns whether the save was deleted: it is not if a pin,
    a tag or a mark holds it, if that takes longer than `LASTS`, or if `may`, which is asked before each object, says
    no. A pin that is written meanwhile is refused. The call may be repeated."""
    mark = deletion_name(identifier, _random())
    at, started = now(), clock()
    body = wire.encode({"version": VERSION, "save_id": identifier, "at": int(at)})

    def is_late() -> bool:  # only the first clock goes on while a machine sleeps
        return now() - at > LASTS or clock() - started > LASTS

    store.put(mark, body)
    gives_way = is_held(store, [identifier])
    for name in sorted(names, key=is_deletion):  # objects of other deletions last
        if gives_way := gives_way or is_late() or not may():
            break
        store.delete(name)
    if gives_way or is_late() or not may():
        # The save stays, perhaps for good. A repeated `put` may still write the mark again: this object makes it void.
        store.put(withdrawal_name(mark), body)
        store.delete(mark)
        return False
    last()
    store.delete(mark)
    return True


def _is_compacted(store: ObjectStore, n: int) -> bool:
    """Whether the record of a commit is compacted: a commit without shards is deleted in this way."""
    record = CommitLog(store).read(n)
    return isinstance(record, CommitRecord) and is_compacted(record)


def _is_being_deleted(store: ObjectStore, identifier: str, now: float) -> bool:
    names = {info.name for info in store.list(save_folder(identifier))}
    begun = [name for name in names if is_deletion(name) and withdrawal_name(name) not in names]
    return any(not _is_over(store, identifier, name, now) for name in sorted(begun))


def _is_over(store: ObjectStore, identifier: str, mark: str, now: float) -> bool:
    """Whether the deletion of this object is over. If its program has died, its withdrawal is written."""
    try:
        at = _fields(store, mark).integer("at")
    except NotFound:
        return True  # it ended after the listing; the caller then checks which shards are left
    except FormatError:  # damaged: it ends `DEAD` seconds from now, which is later than it would have
        store.put(mark, wire.encode({"version": VERSION, "save_id": identifier, "at": int(now)}))
        return False
    if now - at <= DEAD:
        return False
    store.put(withdrawal_name(mark), wire.encode({"version": VERSION, "save_id": identifier, "at": at}))
    return True


def _fields(store: ObjectStore, name: str) -> Fields:
    return Fields(read_complete(store, name, lambda data: wire.decode(data, name)), name)


def _delete(store: ObjectStore, names: Iterable[str]) -> None:
    for name in names:
        store.delete(name)


def _random() -> str:
    return secrets.token_hex(8)


def saves_of(record: CommitRecord) -> list[str]:
    """The saves whose objects a commit needs: its own, and any other that its shards lie in."""
    folders = {folder_of(shard.path) for shard in record.shards} | {record.save_id}
    return sorted(folder for folder in folders if folder is not None)
