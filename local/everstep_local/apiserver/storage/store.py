"""The store: every version of every object, in one order.

One counter numbers all changes, as etcd's revision does. A stored object never changes: a write replaces it, so
readers, watchers and the history share the old one without copies. Invariant: a table's content at `floor`, with its
history applied, is its present content. Versions before `floor` cannot be read any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec

from everstep_local.apiserver.refusals import Refusal, expired
from everstep_operator.kube.client import EventType
from everstep_operator.kube.wire import KubeObject

T = TypeVar("T", bound=KubeObject)
Json: TypeAlias = dict[str, Any]
TableId: TypeAlias = tuple[str, str]  # (group, plural)
Key: TypeAlias = tuple[str, str]  # (namespace, name); the namespace may be empty

HISTORY = 10_000  # events that a table remembers: an informer that missed more lists again


class Stored:
    """One version of one object. `raw` must never be changed."""

    __slots__ = ("_decoded", "raw", "version")

    def __init__(self, raw: Json, version: int) -> None:
        self.raw = raw
        self.version = version
        self._decoded: KubeObject | None = None

    @property
    def meta(self) -> Json:
        meta: Json = self.raw["metadata"]
        return meta

    @property
    def uid(self) -> str:
        return str(self.meta["uid"])

    @property
    def key(self) -> Key:
        return (self.meta.get("namespace", ""), self.meta["name"])

    @property
    def labels(self) -> dict[str, str]:
        return self.meta.get("labels") or {}

    def decode(self, struct: type[T]) -> T:
        """The object as `struct`. It is decoded once, so all watchers share it. Raises msgspec.ValidationError."""
        if type(self._decoded) is not struct:
            self._decoded = msgspec.convert(self.raw, struct)
        assert isinstance(self._decoded, struct)
        return self._decoded


@dataclass(frozen=True, slots=True)
class Happened:
    """One change. For DELETED `new` is the last state, with the resource version of the deletion."""

    version: int
    type: EventType
    new: Stored
    old: Stored | None


class Table:
    """The objects of one resource and their history."""

    def __init__(self, history: int) -> None:
        self._history = history
        self._spaces: dict[str, dict[str, Stored]] = {}
        self._events: list[Happened] = []
        self._dropped = 0  # events that were dropped from the front of the history
        self.floor = 0
        self.last = 0  # version of the newest event
        self.wakers: dict[object, Callable[[], None]] = {}

    def get(self, key: Key) -> Stored | None:
        space = self._spaces.get(key[0])
        return space.get(key[1]) if space is not None else None

    def select(self, namespace: str | None, at: int | None = None) -> list[Stored]:
        """The objects, sorted as etcd sorts keys. With `at`, as of that version. Raises Refusal (410) if it is
        forgotten."""
        spaces = self._rewound(at) if at is not None and at < self.last else self._spaces
        if namespace is not None:
            space = spaces.get(namespace, {})
            return [space[name] for name in sorted(space)]
        named = [(f"{ns}/{name}", stored) for ns, space in spaces.items() for name, stored in space.items()]
        return [stored for _, stored in sorted(named, key=lambda item: item[0])]

    def at(self, key: Key, version: int) -> Stored | None:
        """The object as of `version`."""
        return self._rewound(version).get(key[0], {}).get(key[1]) if version < self.last else self.get(key)

    def _rewound(self, version: int) -> dict[str, dict[str, Stored]]:
        self.check(version)
        spaces = {namespace: dict(space) for namespace, space in self._spaces.items()}
        for event in reversed(self._events):
            if event.version <= version:
                break
            namespace, name = event.new.key
            if event.old is None:
                spaces[namespace].pop(name)
            else:
                spaces.setdefault(namespace, {})[name] = event.old
        return spaces

    def record(self, event: Happened) -> None:
        """Take in a change and wake the watchers."""
        namespace, name = event.new.key
        if event.type is EventType.DELETED:
            del self._spaces[namespace][name]
        else:
            self._spaces.setdefault(namespace, {})[name] = event.new
        self._events.append(event)
        self.last = event.version
        if len(self._events) >= 2 * self._history:
            self._drop(len(self._events) - self._history)
        for wake in tuple(self.wakers.values()):
            wake()

    def forget(self, version: int) -> None:
        """Compact: drop all events up to `version`."""
        self._drop(bisect_right(self._events, version, key=_version))
        self.floor = max(self.floor, version)

    def _drop(self, count: int) -> None:
        if count:
            self.floor = max(self.floor, self._events[count - 1].version)
            del self._events[:count]
            self._dropped += count

    def check(self, version: int) -> None:
        if version < self.floor:
            raise expired(version, self.floor)

    def cursor(self, version: int) -> int:
        """The cursor of the events after `version`. Raises Refusal (410) if some of them are forgotten."""
        self.check(version)
        return self._dropped + bisect_right(self._events, version, key=_version)

    def since(self, cursor: int) -> tuple[list[Happened], int]:
        """The events from `cursor` on, and the cursor after them. Raises Refusal (410) if the watcher fell behind."""
        if cursor < self._dropped:
            raise Refusal(410, "Expired", f"the watch fell behind the history of {self._history} events")
        events = self._events[cursor - self._dropped :]
        return events, cursor + len(events)


def _version(event: Happened) -> int:
    return event.version


class Store:
    """All tables under one counter, and the indexes that garbage collection needs."""

    def __init__(self, history: int = HISTORY) -> None:
        self._history = history
        # The counter does not begin at 0: "0" and "" mean something else in a request, and a compacted start needs room
        # below it.
        self.version = 1
        self._floor = 0
        self._tables: dict[TableId, Table] = {}
        self._uids: dict[str, tuple[TableId, Key]] = {}
        self._dependents: dict[str, dict[str, None]] = {}  # owner's UID -> UIDs of its dependents, in order

    @property
    def floor(self) -> int:
        """The oldest version that was not compacted away."""
        return self._floor

    def table(self, table: TableId) -> Table:
        existing = self._tables.get(table)
        if existing is None:
            existing = self._tables[table] = Table(self._history)
            existing.floor = self._floor
        return existing

    def tables(self) -> Iterable[tuple[TableId, Table]]:
        return self._tables.items()

    def find(self, uid: str) -> tuple[TableId, Stored] | None:
        """The place of the object with `uid`."""
        location = self._uids.get(uid)
        if location is None:
            return None
        stored = self._tables[location[0]].get(location[1])
        assert stored is not None
        return location[0], stored

    def dependents(self, uid: str) -> tuple[str, ...]:
        """UIDs of the objects that name `uid` as an owner, existing or not."""
        return tuple(self._dependents.get(uid, ()))

    def put(self, table: TableId, raw: Json, old: Stored | None) -> Stored:
        """Store `raw` as the next version, in place of `old`."""
        self.version += 1
        meta = {**raw["metadata"], "resourceVersion": str(self.version)}
        new = Stored({**raw, "metadata": meta}, self.version)
        if old is None or old.meta.get("ownerReferences") is not meta.get("ownerReferences"):
            self._unlink(old)
            for owner in meta.get("ownerReferences") or ():
                self._dependents.setdefault(owner["uid"], {})[new.uid] = None
        self._uids[new.uid] = (table, new.key)
        kind = EventType.ADDED if old is None else EventType.MODIFIED
        self.table(table).record(Happened(self.version, kind, new, old))
        return new

    def remove(self, table: TableId, old: Stored) -> Stored:
        """Delete `old`. Returns its last state."""
        self.version += 1
        raw = {**old.raw, "metadata": {**old.meta, "resourceVersion": str(self.version)}}
        last = Stored(raw, self.version)
        self._unlink(old)
        del self._uids[old.uid]
        self.table(table).record(Happened(self.version, EventType.DELETED, last, old))
        return last

    def _unlink(self, old: Stored | None) -> None:
        for owner in (old.meta.get("ownerReferences") or ()) if old is not None else ():
            assert old is not None
            known = self._dependents.get(owner["uid"], {})
            known.pop(old.uid, None)
            if not known:
                self._dependents.pop(owner["uid"], None)

    def compact(self, version: int | None = None) -> int:
        """Forget the history up to `version` (default: all of it). Returns the version from which one can still
        watch."""
        self._floor = max(self._floor, min(self.version, self.version if version is None else version))
        for table in self._tables.values():
            table.forget(self._floor)
        return self._floor
