"""`KubeClient` over an in-memory cluster: one client, its own view, its own faults.

Invariant: what a caller can see of it, results, errors and their order, is what the HTTP transport over a real API
server shows; `tests/conformance` holds both to it. Without faults a call does not wait, so a caller that loops without
awaiting anything else starves its loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from everstep_operator.kube.client import (
    PAGE,
    Bookmark,
    Changed,
    ListResult,
    Propagation,
    TokenReview,
    WatchEvent,
)
from everstep_operator.kube.errors import ServerError
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.wire import KubeObject
from everstep_operator.local.applying import apply_object
from everstep_operator.local.deleting import delete
from everstep_operator.local.refusals import Refusal, bad_request
from everstep_operator.local.selectors import parse
from everstep_operator.local.server import Server
from everstep_operator.local.store import Stored
from everstep_operator.local.tokens import TokenAuthority
from everstep_operator.local.watching import Feed
from everstep_operator.runtime.clock import cancel

T = TypeVar("T", bound=KubeObject)
A = TypeVar("A")

BOOKMARK_LEAD = 2.0  # seconds before the end of a watch at which the server sends its last bookmark
BOOKMARK_EVERY = 60.0


class MemoryClient:
    """Implements `kube.client.KubeClient`; made by `MemoryCluster.client`."""

    def __init__(self, server: Server, tokens: TokenAuthority, manager: str) -> None:
        self._server, self._tokens, self._manager = server, tokens, manager

    async def get(self, resource: Resource[T], namespace: str | None, name: str) -> T:
        where = Where("get", resource, namespace, name)

        def read() -> Stored:
            return self._server.find(self._server.kinds.of(resource), namespace, name)

        return self._decoded(resource, self._answer(where, read), where)

    async def list(
        self,
        resource: Resource[T],
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        limit: int = PAGE,
        resource_version: str | None = None,
    ) -> ListResult[T]:
        where = Where("list", resource, namespace, None)
        store = self._server.store

        def read() -> list[Stored]:
            kind = self._server.kinds.of(resource)
            asked = _version(resource_version)
            if asked > store.version:
                raise Refusal(504, "Timeout", f"Too large resource version: {asked}, current: {store.version}")
            selector = parse(label_selector) if label_selector else None
            found = store.table(kind.id).select(namespace)
            return found if selector is None else [one for one in found if selector(one.labels)]

        items = tuple(self._decoded(resource, one, where) for one in self._answer(where, read))
        return ListResult(items, str(store.version))

    async def watch(
        self,
        resource: Resource[T],
        namespace: str | None = None,
        *,
        resource_version: str,
        label_selector: str | None = None,
        timeout_seconds: int = 60,
    ) -> AsyncGenerator[WatchEvent[T], None]:
        where = Where("watch", resource, namespace, None)
        table = self._server.store.table(self._answer(where, lambda: self._server.kinds.of(resource)).id)

        def open_feed() -> Feed:
            selector = parse(label_selector) if label_selector else None
            return Feed(table, namespace, selector, _version(resource_version) or None)

        feed = self._answer(where, open_feed)
        wake, due = asyncio.Event(), _Due()
        table.wakers[due] = wake.set
        timer = asyncio.ensure_future(self._time(due, wake, timeout_seconds))
        try:
            while True:
                wake.clear()
                for told in self._answer(where, feed.take):
                    yield Changed(told.type, self._decoded(resource, told.object, where))
                if due.bookmark:
                    due.bookmark = False
                    if (position := feed.bookmark()) is not None:
                        yield Bookmark(str(position))
                        continue
                if due.end:
                    return
                await wake.wait()
        finally:
            del table.wakers[due]
            await cancel(timer)

    async def _time(self, due: _Due, wake: asyncio.Event, seconds: float) -> None:
        """Say when a bookmark is due, and when the stream ends."""
        left = float(seconds)
        while left > BOOKMARK_LEAD:
            pause = min(BOOKMARK_EVERY, left - BOOKMARK_LEAD)
            await self._server.clock.sleep(pause)
            left -= pause
            due.bookmark = True
            wake.set()
        await self._server.clock.sleep(left)
        due.end = True
        wake.set()

    async def create(self, resource: Resource[T], namespace: str | None, body: Mapping[str, Any]) -> T:
        where = Where("create", resource, namespace, None)
        where.name = body.get("metadata", {}).get("name")
        return self._decoded(
            resource,
            self._answer(
                where, lambda: self._server.create(self._server.kinds.of(resource), namespace, body, self._manager)
            ),
            where,
        )

    async def apply(
        self,
        resource: Resource[T],
        namespace: str | None,
        name: str,
        body: Mapping[str, Any],
        *,
        field_manager: str,
        force: bool = False,
        subresource: str | None = None,
    ) -> T:
        where = Where("apply", resource, namespace, name, subresource)

        def write() -> Stored:
            return apply_object(
                self._server,
                self._server.kinds.of(resource),
                namespace,
                name,
                body,
                manager=field_manager,
                force=force,
                subresource=subresource,
            )

        return self._decoded(resource, self._answer(where, write), where)

    async def merge_patch(
        self,
        resource: Resource[T],
        namespace: str | None,
        name: str,
        body: Mapping[str, Any],
        *,
        subresource: str | None = None,
        resource_version: str | None = None,
        field_manager: str | None = None,
    ) -> T:
        where = Where("patch", resource, namespace, name, subresource)
        if resource_version is not None:
            body = {**body, "metadata": {**body.get("metadata", {}), "resourceVersion": resource_version}}

        def write() -> Stored:
            return self._server.merge_patch(
                self._server.kinds.of(resource),
                namespace,
                name,
                body,
                subresource=subresource,
                manager=field_manager or self._manager,
            )

        return self._decoded(resource, self._answer(where, write), where)

    async def patch_status(
        self,
        resource: Resource[T],
        namespace: str | None,
        name: str,
        status: Mapping[str, Any],
        *,
        resource_version: str | None = None,
        field_manager: str | None = None,
    ) -> T:
        return await self.merge_patch(
            resource,
            namespace,
            name,
            {"status": status},
            subresource="status",
            resource_version=resource_version,
            field_manager=field_manager,
        )

    async def replace(self, resource: Resource[T], namespace: str | None, name: str, body: Mapping[str, Any]) -> T:
        where = Where("replace", resource, namespace, name)

        def write() -> Stored:
            return self._server.replace(self._server.kinds.of(resource), namespace, name, body, self._manager)

        return self._decoded(resource, self._answer(where, write), where)

    async def delete(
        self,
        resource: Resource[T],
        namespace: str | None,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        grace_seconds: int | None = None,
        propagation: Propagation | None = None,
    ) -> None:
        where = Where("delete", resource, namespace, name)

        def write() -> None:
            delete(
                self._server,
                self._server.kinds.of(resource),
                namespace,
                name,
                uid=uid,
                resource_version=resource_version,
                grace_seconds=grace_seconds,
                propagation=propagation,
            )

        self._answer(where, write)

    async def review_token(self, token: str, audiences: Sequence[str]) -> TokenReview:
        return self._tokens.review(token, audiences)

    def _answer(self, where: Where, request: Callable[[], A]) -> A:
        try:
            return request()
        except Refusal as refusal:
            raise refusal.error(str(where)) from None

    @staticmethod
    def _decoded(resource: Resource[T], stored: Stored, where: Where) -> T:
        try:
            return stored.decode(resource.struct)
        except msgspec.ValidationError as error:
            raise ServerError(f"the answer cannot be decoded: {error}", where=str(where)) from error


class _Due:
    """What the clock asks of one watch."""

    __slots__ = ("bookmark", "end")

    def __init__(self) -> None:
        self.bookmark = self.end = False


def _version(text: str | None) -> int:
    """0 for "any". Raises Refusal (400)."""
    if not text:
        return 0
    if not text.isdigit():
        raise bad_request(f"resourceVersion: {text[:60]!r} is no resource version")
    return int(text)


class Where:
    """Which request it is; the text is made only for an error. Raises ValueError where a URL could not be made."""

    __slots__ = ("name", "namespace", "resource", "sub", "verb")

    def __init__(
        self, verb: str, resource: Resource[Any], namespace: str | None, name: str | None, sub: str | None = None
    ) -> None:
        self.verb, self.resource, self.namespace, self.name, self.sub = verb, resource, namespace, name, sub
        if resource.namespaced:
            if name is not None and namespace is None:
                raise ValueError(
                    f"one of the {resource.plural} is named {name!r} in every namespace; give the namespace"
                )
        elif namespace is not None:
            raise ValueError(f"{resource.plural} have no namespace; call with namespace=None instead of {namespace!r}")

    def __str__(self) -> str:
        place = "/".join(part for part in (self.namespace, self.name) if part)
        plural = self.resource.plural + (f"/{self.sub}" if self.sub else "")
        return " ".join(part for part in (self.verb, plural, place) if part)
