"""`KubeClient` over an in-memory cluster: each client has its own view and its own faults.

Invariant: callers see the same results, errors and order as with the HTTP transport over a real API server;
`tests/conformance` checks both. Without faults a call does not wait, so a caller that loops without awaiting anything
else starves its event loop. The retries of the transport are not imitated here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from everstep_local.apiserver.deletion import delete
from everstep_local.apiserver.faults import Delay, Disconnect, Expire, Faults, LoseAnswer, Refuse, Request, Stale
from everstep_local.apiserver.kinds.kind import Kind
from everstep_local.apiserver.refusals import Refusal, bad_request, expired, not_found
from everstep_local.apiserver.server import Server
from everstep_local.apiserver.storage.feed import Feed
from everstep_local.apiserver.storage.selectors import parse
from everstep_local.apiserver.storage.store import Stored
from everstep_local.apiserver.stream import Stream
from everstep_local.apiserver.tokens import TokenAuthority
from everstep_operator.kube.client import (
    PAGE,
    Bookmark,
    Changed,
    ListResult,
    Propagation,
    TokenReview,
    WatchEvent,
)
from everstep_operator.kube.errors import ConnectionFailed, ServerError
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.wire import KubeObject

T = TypeVar("T", bound=KubeObject)
A = TypeVar("A")


class Where:
    """Identifies a request. Its text is made only for an error. Raises ValueError if no URL could be made."""

    __slots__ = ("name", "namespace", "resource", "sub", "verb")

    def __init__(
        self,
        verb: str,
        resource: Resource[Any],
        namespace: str | None,
        name: str | None = None,
        sub: str | None = None,
        *,
        named: bool = True,
    ) -> None:
        self.verb, self.resource, self.namespace, self.name, self.sub = verb, resource, namespace, name, sub
        if not resource.namespaced:
            if namespace is not None:
                raise ValueError(f"{resource.plural} have no namespace; call with namespace=None, not {namespace!r}")
        elif namespace is None and named and name is not None:
            raise ValueError(f"one of the {resource.plural} is named {name!r} in every namespace; give the namespace")

    def __str__(self) -> str:
        place = "/".join(part for part in (self.namespace, self.name) if part)
        plural = self.resource.plural + (f"/{self.sub}" if self.sub else "")
        return " ".join(part for part in (self.verb, plural, place) if part)

    def request(self) -> Request:
        return Request(self.verb, self.resource.plural, self.namespace or "", self.name or "")


class MemoryClient:
    """Implements `kube.client.KubeClient`; made by `MemoryCluster.client`."""

    def __init__(self, server: Server, tokens: TokenAuthority, faults: Faults | None) -> None:
        self._server, self._tokens = server, tokens
        self.faults = faults

    async def get(self, resource: Resource[T], namespace: str | None, name: str) -> T:
        where = Where("get", resource, namespace, name)
        at = None if self.faults is None else (await self._disturbed(where.request(), str(where))).at

        def read() -> Stored:
            kind = self._server.kinds.of(resource)
            if at is None:
                return self._server.find(kind, namespace, name)
            table = self._server.store.table(kind.id)
            found = table.at((namespace or "", name), max(at, table.floor))
            if found is None:
                raise not_found(kind.full_plural, name)
            return found

        return _decoded(resource, _answer(where, read), where)

    async def list(
        self,
        resource: Resource[T],
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        limit: int = PAGE,
        resource_version: str | None = None,
    ) -> ListResult[T]:
        where = Where("list", resource, namespace)
        at = None if self.faults is None else (await self._disturbed(where.request(), str(where))).at
        store = self._server.store

        def read() -> list[Stored]:
            kind = self._server.kinds.of(resource)
            asked = _version(resource_version)
            if asked > store.version:
                raise Refusal(504, "Timeout", f"Timeout: Too large resource version: {asked}, current: {store.version}")
            selector = parse(label_selector) if label_selector else None
            table = store.table(kind.id)
            found = table.select(namespace, None if at is None else max(at, table.floor))
            return found if selector is None else [one for one in found if selector(one.labels)]

        items = tuple([_decoded(resource, one, where) for one in _answer(where, read)])
        return ListResult(items, str(store.version if at is None else at))

    async def watch(
        self,
        resource: Resource[T],
        namespace: str | None = None,
        *,
        resource_version: str,
        label_selector: str | None = None,
        timeout_seconds: int = 60,
    ) -> AsyncGenerator[WatchEvent[T], None]:
        where = Where("watch", resource, namespace)
        if self.faults is not None:
            await self._disturbed(where.request(), str(where))

        def open_feed() -> Feed:
            kind = self._server.kinds.of(resource)
            selector = parse(label_selector) if label_selector else None
            table = self._server.store.table(kind.id)
            return Feed(table, namespace, selector, _version(resource_version) or None)

        feed = _answer(where, open_feed)
        async with (
            Stream(feed, self._server.clock, timeout_seconds, self.faults, where.request(), str(where)) as stream,
            aclosing(stream.events()) as events,
        ):
            async for told in events:
                if isinstance(told, int):
                    yield Bookmark(str(told))
                else:
                    yield Changed(told.type, _decoded(resource, told.object, where))

    async def create(self, resource: Resource[T], namespace: str | None, body: Mapping[str, Any]) -> T:
        where = Where("create", resource, namespace, body.get("metadata", {}).get("name"), named=False)
        return await self._write(resource, where, lambda kind: self._server.create(kind, namespace, body))

    async def merge_patch(
        self,
        resource: Resource[T],
        namespace: str | None,
        name: str,
        body: Mapping[str, Any],
        *,
        subresource: str | None = None,
        resource_version: str | None = None,
    ) -> T:
        where = Where("patch", resource, namespace, name, subresource)
        if resource_version is not None:
            body = {**body, "metadata": {**body.get("metadata", {}), "resourceVersion": resource_version}}

        def write(kind: Kind) -> Stored:
            return self._server.merge_patch(kind, namespace, name, body, subresource=subresource)

        return await self._write(resource, where, write)

    async def patch_status(
        self,
        resource: Resource[T],
        namespace: str | None,
        name: str,
        status: Mapping[str, Any],
        *,
        resource_version: str | None = None,
    ) -> T:
        return await self.merge_patch(
            resource,
            namespace,
            name,
            {"status": status},
            subresource="status",
            resource_version=resource_version,
        )

    async def replace(self, resource: Resource[T], namespace: str | None, name: str, body: Mapping[str, Any]) -> T:
        where = Where("replace", resource, namespace, name)
        return await self._write(resource, where, lambda kind: self._server.replace(kind, namespace, name, body))

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

        def write(kind: Kind) -> None:
            delete(
                self._server,
                kind,
                namespace,
                name,
                uid=uid,
                resource_version=resource_version,
                grace_seconds=grace_seconds,
                propagation=propagation,
            )

        await self._written(resource, where, write)

    async def review_token(self, token: str, audiences: Sequence[str]) -> TokenReview:
        if self.faults is not None:
            await self._disturbed(Request("review", "tokenreviews"), "review token")
        return self._tokens.review(token, audiences)

    async def signing_keys(self) -> Mapping[str, Any]:
        if self.faults is not None:
            await self._disturbed(Request("get", "jwks"), "get jwks")
        return self._tokens.key_set()

    async def _write(self, resource: Resource[T], where: Where, write: Callable[[Kind], Stored]) -> T:
        return _decoded(resource, await self._written(resource, where, write), where)

    async def _written(self, resource: Resource[Any], where: Where, write: Callable[[Kind], A]) -> A:
        if self.faults is None:
            return _answer(where, lambda: write(self._server.kinds.of(resource)))
        lost = (await self._disturbed(where.request(), str(where))).lost
        answer = _answer(where, lambda: write(self._server.kinds.of(resource)))
        if lost:
            raise ConnectionFailed("the answer was lost", where=str(where))
        return answer

    async def _disturbed(self, request: Request, where: str) -> _Struck:
        """Apply the faults before the request. Return those that come after it."""
        faults = self.faults
        assert faults is not None
        at, lost = None, False
        if faults.is_cut:
            raise ConnectionFailed("no connection", where=where)
        for fault in faults.strike(request):
            match fault:
                case Delay(seconds):
                    await self._server.clock.sleep(seconds)
                case Refuse():
                    raise fault.refusal().error(where)
                case Disconnect():
                    raise ConnectionFailed("no connection", where=where)
                case Expire():
                    raise expired(0, self._server.store.version).error(where)
                case Stale(versions):
                    at = max(1, self._server.store.floor, self._server.store.version - versions)
                case LoseAnswer():
                    lost = True
                case _:
                    raise ValueError(f"{fault} strikes events of a watch, not {request}; add it for the verb 'event'")
        if faults.is_cut:
            raise ConnectionFailed("no connection", where=where)
        if lost and request.verb in _READS:
            raise ConnectionFailed("the answer was lost", where=where)
        return _Struck(at, lost)


@dataclass(frozen=True, slots=True)
class _Struck:
    """The effect of faults. `at`: the version that a read sees, None for the newest. `lost`: the answer will not
    arrive."""

    at: int | None
    lost: bool


_READS = ("get", "list", "watch", "review")


def _answer(where: Where, request: Callable[[], A]) -> A:
    try:
        return request()
    except Refusal as refusal:
        raise refusal.error(str(where)) from None


def _decoded(resource: Resource[T], stored: Stored, where: Where) -> T:
    try:
        return stored.decode(resource.struct)
    except msgspec.ValidationError as error:
        raise ServerError(f"the answer cannot be decoded: {error}", where=str(where)) from error


def _version(text: str | None) -> int:
    """A resource version as a number; 0 for "any". Raises Refusal (400)."""
    if not text:
        return 0
    if not text.isdigit():
        raise bad_request(f"resourceVersion: {text[:60]!r} is no resource version")
    return int(text)
