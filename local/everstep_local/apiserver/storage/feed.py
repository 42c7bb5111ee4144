"""One watcher's view of one table: its events, by namespace and selector.

An object that begins to match a selector is ADDED for its watcher, and one that ceases to match is DELETED, with the
resource version of that change. Invariant: the versions of one feed only grow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from everstep_local.apiserver.storage.selectors import Selector
from everstep_local.apiserver.storage.store import Happened, Stored, Table
from everstep_operator.kube.client import EventType


@dataclass(frozen=True, slots=True)
class Notification:
    """An event as one watcher gets it."""

    type: EventType
    object: Stored


class Feed:
    """A feed. Raises Refusal (410) at once, or later from `take`, if the history does not reach back far enough."""

    def __init__(self, table: Table, namespace: str | None, selector: Selector | None, start: int | None) -> None:
        """`start=None` begins with all existing objects, as a watch from version "0" does."""
        self._table, self._namespace, self._selector = table, namespace, selector
        self._first = [
            Notification(EventType.ADDED, stored) for stored in table.select(namespace) if self._matches(stored)
        ]
        if start is not None:
            self._first = []
        self._began = start if start is not None else table.last
        self._cursor = table.cursor(self._began)

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after every change of the resource, until the returned function is called."""
        ticket = object()
        self._table.wakers[ticket] = wake
        return lambda: self._table.wakers.pop(ticket, None) and None

    def take(self) -> list[Notification]:
        """The events since the last call."""
        first, self._first = self._first, []
        events, self._cursor = self._table.since(self._cursor)
        return first + [notification for event in events if (notification := self._notification(event)) is not None]

    def bookmark(self) -> int | None:
        """The version up to which all events were delivered; None if the resource has not changed since the start."""
        return self._table.last if self._table.last > self._began else None

    def _matches(self, stored: Stored) -> bool:
        return self._selector is None or self._selector(stored.labels)

    def _notification(self, event: Happened) -> Notification | None:
        if self._namespace is not None and event.new.key[0] != self._namespace:
            return None
        was = event.old is not None and self._matches(event.old)
        if event.type is EventType.DELETED:
            return Notification(EventType.DELETED, event.new) if was else None
        match (was, self._matches(event.new)):
            case (True, True):
                return Notification(EventType.MODIFIED, event.new)
            case (False, True):
                return Notification(EventType.ADDED, event.new)
            case (True, False):
                # The last matching state, with the version of the change, as the server's cache does it.
                assert event.old is not None
                meta = {**event.old.meta, "resourceVersion": str(event.version)}
                return Notification(EventType.DELETED, Stored({**event.old.raw, "metadata": meta}, event.version))
            case _:
                return None
