"""Mistakes that an in-memory cluster could have, one at a time.

Each is a context manager that puts one wrong piece in the place of a right one. The suite is worth something only if it
fails under every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from everstep_local.apiserver import deletion, server
from everstep_local.apiserver.garbage_collector import Collector
from everstep_local.apiserver.kinds import custom
from everstep_local.apiserver.kinds.kind import Kind
from everstep_local.apiserver.kinds.schema import Schema
from everstep_local.apiserver.server import Server
from everstep_local.apiserver.storage.feed import Feed, Notification
from everstep_local.apiserver.storage.store import Json, Stored, Table
from everstep_operator.kube.client import EventType

Mutation = Callable[[], AbstractContextManager[Any]]
MUTATIONS: dict[str, Mutation] = {}


def mutation(make: Callable[[], Iterator[None]]) -> Mutation:
    made = contextmanager(make)
    MUTATIONS[make.__name__] = made
    return made


@mutation
def generation_counts_status_writes() -> Iterator[None]:
    def put(self: Server, kind: Kind, new: Json, old: Stored) -> Stored:
        if new.get("status") != old.raw.get("status") and "generation" in new["metadata"]:
            new = {**new, "metadata": {**new["metadata"], "generation": new["metadata"]["generation"] + 1}}
        return right(self, kind, new, old)

    right = Server.put
    with patch.object(Server, "put", put):
        yield


@mutation
def stale_version_is_accepted() -> Iterator[None]:
    def check(kind: Kind, name: str, meta: Json, old: Stored) -> None:
        right(kind, name, {key: value for key, value in meta.items() if key != "resourceVersion"}, old)

    right = Server._check_versions
    with patch.object(Server, "_check_versions", staticmethod(check)):
        yield


@mutation
def uid_precondition_is_ignored() -> Iterator[None]:
    def delete(*args: Any, **options: Any) -> None:
        right(*args, **{**options, "uid": None})

    right = deletion.delete
    with patch("everstep_local.apiserver.client.delete", delete):
        yield


@mutation
def finalizer_is_ignored() -> Iterator[None]:
    with patch.object(deletion, "_finalizers", lambda old, propagation: []):
        yield


@mutation
def bound_pod_goes_at_once() -> Iterator[None]:
    with patch.object(deletion, "_grace", lambda kind, old, asked: 0):
        yield


@mutation
def watch_skips_deletions() -> Iterator[None]:
    def take(self: Feed) -> list[Notification]:
        return [told for told in right(self) if told.type is not EventType.DELETED]

    right = Feed.take
    with patch.object(Feed, "take", take):
        yield


@mutation
def watch_repeats_the_event_it_starts_at() -> Iterator[None]:
    def cursor(self: Table, version: int) -> int:
        return max(0, right(self, version) - 1)

    right = Table.cursor
    with patch.object(Table, "cursor", cursor):
        yield


@mutation
def leaving_a_selector_is_a_change() -> Iterator[None]:
    def told(self: Feed, event: Any) -> Notification | None:
        found = right(self, event)
        if found is not None and found.type is EventType.DELETED and event.type is EventType.MODIFIED:
            return Notification(EventType.MODIFIED, event.new)
        return found

    right = Feed._notification
    with patch.object(Feed, "_notification", told):
        yield


@mutation
def bookmark_runs_ahead() -> Iterator[None]:
    def bookmark(self: Feed) -> int | None:
        position = right(self)
        return None if position is None else position + 1

    right = Feed.bookmark
    with patch.object(Feed, "bookmark", bookmark):
        yield


@mutation
def defaults_are_not_applied() -> Iterator[None]:
    def make(self: Schema, schema: Json, path: str = "") -> None:
        right(self, schema, path)
        self.defaults = {}

    right = Schema.__init__
    with patch.object(Schema, "__init__", make), _fresh_jobs():
        yield


@mutation
def unknown_fields_are_kept() -> Iterator[None]:
    def make(self: Schema, schema: Json, path: str = "") -> None:
        right(self, schema, path)
        self.preserve = True

    right = Schema.__init__
    with patch.object(Schema, "__init__", make), _fresh_jobs():
        yield


@mutation
def rules_are_not_asked() -> Iterator[None]:
    with patch.object(Schema, "broken_rules", lambda *_: iter(())):
        yield


@mutation
def rules_see_no_old_value() -> Iterator[None]:
    def broken(self: Schema, value: Any, old: Any, path: str) -> Any:
        return right(self, value, None, path)

    right = Schema.broken_rules
    with patch.object(Schema, "broken_rules", broken):
        yield


@mutation
def taken_name_is_overwritten() -> Iterator[None]:
    def create(self: Server, kind: Kind, namespace: str | None, body: Any, *rest: Any, **options: Any) -> Stored:
        name = body.get("metadata", {}).get("name")
        old = self.store.table(kind.id).get((namespace or "", name)) if name else None
        if old is not None:
            self.store.remove(kind.id, old)
        return right(self, kind, namespace, body, *rest, **options)

    right = Server.create
    with patch.object(Server, "create", create):
        yield


@mutation
def null_is_kept_by_a_merge_patch() -> Iterator[None]:
    def merged(old: Any, change: Any) -> Any:
        if not isinstance(change, dict):
            return change
        result = dict(old) if isinstance(old, dict) else {}
        return result | {k: merged(result.get(k), v) for k, v in change.items() if v is not None}

    with patch.object(server, "merged", merged):
        yield


@mutation
def nothing_is_collected() -> Iterator[None]:
    with patch.object(Collector, "_dependent", lambda *_: None):
        yield


@mutation
def write_of_the_status_changes_the_spec() -> Iterator[None]:
    def isolated(kind: Kind, given: Json, old: Json, subresource: str | None) -> Json:
        new = right(kind, given, old, subresource)
        return {**new, "spec": given["spec"]} if subresource == "status" and "spec" in given else new

    right = Server._isolated
    with patch.object(Server, "_isolated", staticmethod(isolated)):
        yield


@mutation
def unchanged_write_makes_a_version() -> Iterator[None]:
    def update(self: Server, kind: Kind, namespace: str | None, name: str, change: Any, **options: Any) -> Stored:
        old = self.find(kind, namespace, name)
        new = right(self, kind, namespace, name, change, **options)
        return self.store.put(kind.id, new.raw, new) if new is old else new

    right = Server.update
    with patch.object(Server, "update", update):
        yield


@contextmanager
def _fresh_jobs() -> Iterator[None]:
    """Compile the CRD anew inside, and again after."""
    custom.training_jobs.cache_clear()
    try:
        yield
    finally:
        custom.training_jobs.cache_clear()
