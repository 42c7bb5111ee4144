"""The informer's memory: the objects that exist, by name and by index, and what changed.

This module is pure. Invariant: taking in events, or replacing the content by a list, yields exactly the differences
between what readers saw before and what they see now, in order. An event that is not newer than the cache's position is
stale and changes nothing. (Resource versions of one resource are ordered. If a server's versions are opaque, no event
counts as stale.) An object that is deleted and created again under its name is two changes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from everstep_operator.kube.client import Bookmark, Changed, EventType, ListResult, WatchEvent
from everstep_operator.kube.wire import KubeObject

T = TypeVar("T", bound=KubeObject)
Key: TypeAlias = tuple[str, str]
Indexer: TypeAlias = Callable[[T], Iterable[str]]


@dataclass(frozen=True, slots=True)
class Added(Generic[T]):
    object: T


@dataclass(frozen=True, slots=True)
class Updated(Generic[T]):
    old: T
    object: T


@dataclass(frozen=True, slots=True)
class Deleted(Generic[T]):
    """`object` is the last state that was seen. If a list showed the deletion, it may be older than the object's true
    last state."""

    object: T


Delta: TypeAlias = Added[T] | Updated[T] | Deleted[T]


def is_not_newer(version: str, than: str) -> bool:
    """Whether resource version `version` is known to be at most `than`; False if either is opaque."""
    # Versions can be compared as integers: Kubernetes guarantees it since 1.35 (KEP-5504), and etcd's always could.
    return version.isdigit() and than.isdigit() and int(version) <= int(than)


class Cache(Generic[T]):
    """Objects of one resource. Lists are sorted by (namespace, name)."""

    def __init__(self, indexers: Mapping[str, Indexer[T]] | None = None) -> None:
        self._objects: dict[Key, T] = {}
        self._indexers = dict(indexers or {})
        self._indexes: dict[str, dict[str, set[Key]]] = {name: {} for name in self._indexers}
        self._position = ""

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def position(self) -> str:
        """The resource version up to which all changes are known; empty before the first list."""
        return self._position

    def get(self, namespace: str, name: str) -> T | None:
        return self._objects.get((namespace, name))

    def list(self, namespace: str | None = None) -> tuple[T, ...]:
        """All objects, or those of one namespace."""
        return tuple(self._objects[key] for key in sorted(self._objects) if namespace is None or key[0] == namespace)

    def by_index(self, index: str, value: str) -> tuple[T, ...]:
        """The objects for which indexer `index` yields `value`."""
        return tuple(self._objects[key] for key in sorted(self._indexes[index].get(value, ())))

    def is_older_list(self, listed: ListResult[T]) -> bool:
        """Whether the list comes from a server that is behind this cache. Such a list must not be used."""
        return listed.resource_version != self._position and is_not_newer(listed.resource_version, self._position)

    def replace(self, listed: ListResult[T]) -> tuple[Delta[T], ...]:
        """Make the content equal to a list. Objects that it lacks were deleted while no watch was open."""
        current = {item.key: item for item in listed.items}
        deltas: list[Delta[T]] = []
        for key in sorted(self._objects.keys() - current.keys()):
            deltas += self._remove(key)
        for key in sorted(current):
            deltas += self._put(current[key])
        self._position = listed.resource_version
        return tuple(deltas)

    def apply(self, event: WatchEvent[T]) -> tuple[Delta[T], ...]:
        """Take in one event of a watch and move the position to it."""
        if is_not_newer(event.resource_version, self._position):
            return ()
        self._position = event.resource_version
        match event:
            case Bookmark():
                return ()
            case Changed(EventType.DELETED, obj):
                current = self._objects.get(obj.key)
                if current is None or current.metadata.uid != obj.metadata.uid:
                    return ()
                # The event's object is the last state, and not ours: only it has the exit codes of a pod that has just
                # ended.
                self._drop(obj.key)
                return (Deleted(obj),)
            case Changed(_, obj):
                return tuple(self._put(obj))

    def _put(self, obj: T) -> Iterable[Delta[T]]:
        old = self._objects.get(obj.key)
        if old is None:
            self._store(obj)
            return [Added(obj)]
        if old.metadata.uid != obj.metadata.uid:
            deleted = self._remove(obj.key)
            self._store(obj)
            return [*deleted, Added(obj)]
        if old.metadata.resource_version == obj.metadata.resource_version:
            return []
        self._drop(obj.key)
        self._store(obj)
        return [Updated(old, obj)]

    def _remove(self, key: Key) -> Iterable[Delta[T]]:
        old = self._objects[key]
        self._drop(key)
        return [Deleted(old)]

    def _store(self, obj: T) -> None:
        self._objects[obj.key] = obj
        for name, indexer in self._indexers.items():
            for value in indexer(obj):
                self._indexes[name].setdefault(value, set()).add(obj.key)

    def _drop(self, key: Key) -> None:
        obj = self._objects.pop(key)
        for name, indexer in self._indexers.items():
            for value in indexer(obj):
                keys = self._indexes[name].get(value)
                if keys is not None:
                    keys.discard(key)
                    if not keys:
                        del self._indexes[name][value]
