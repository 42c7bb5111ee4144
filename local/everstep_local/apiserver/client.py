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
from everstep_local.apiserver.storage.selectors import fields, parse
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
from everstep_operator.kube.errors import ConnectionFailed, Operation, ServerError
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.wire import KubeObject

T = TypeVar("T", bound=KubeObject)
A = TypeVar("A")


def _operation(
    verb: str,
    resource: Resource[Any],
    namespace: str | None,
    name: str | None = None,
    subresource: str | None = None,
    *,
    named: bool = True,
) -> Operation:
    """The operation, as the HTTP transport names it. Raises ValueError if no URL could be made."""
    if not resource.namespaced:
        if namespace is not None:
            raise ValueError(f"{resource.plural} have no namespace; call with namespace=None, not {namespace!r}")
    elif namespace is None and named and name is not None:
        raise ValueError(f"one of the {resource.plural} is named {name!r} in every namespace; give the namespace")
    plural = f"{resource.plural}/{subresource}" if subresource else resource.plural
    return Operation(verb, plural, namespace or "", name or "")


def _request(operation: Operation) -> Request:
    """The request that faults may strike. They do not distinguish subresources."""
    return Request(operation.verb, operation.resource.partition("/")[0], operation.namespace, operation.name)


class MemoryClient:
    """Implements `kube.client.KubeClient`; made by `MemoryCluster.client`."""

    def __init__(self, server: Server, tokens: TokenAuthority, faults: Faults | None) -> None:
        self._server, self._tokens = server, tokens
        self.faults = faults

    async def get(self, resource: Resource[T], namespace: str | None, name: str) -> T:
        operation = _operation("get", resource, namespace, name)
        at = None if self.faults is None else (await self._disturbed(_request(operation), operation)).at

        def read() -> Stored:
            kind = self._server.kinds.of(resource)
            if at is None:
                return self._server.find(kind, namespace, name)
            table = self._server.store.table(kind.id)
            stored = table.at((namespace or "", name), max(at, table.floor))
            if stored is None:
                raise not_found(kind.full_plural, name)
            return stored

        return _decoded(resource, _answer(operation, read), operation)

    async def list(
        self,
        resource: Resource[T],
        namespace: str | None = None,
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        limit: int = PAGE,
        resource_version: str | None = None,
        pages: int | None = None,
    ) -> ListResult[T]:
        operation = _operation("list", resource, namespace)
        at = None if self.faults is None else (await self._disturbed(_request(operation), operation)).at
        store = self._server.store

        def read() -> list[Stored]:
            kind = self._server.kinds.of(resource)
            version = _version(resource_version)
            if version > store.version:
                raise Refusal(
                    504, "Timeout", f"Timeout: Too large resource version: {version}, current: {store.version}"
                )
            selector = parse(label_selector) if label_selector else None
            table = store.table(kind.id)
            stored = table.select(namespace, None if at is None else max(at, table.floor))
            if field_selector:
                chosen = fields(kind.kind, field_selector)
                stored = [item for item in stored if chosen(item.raw)]
            return stored if selector is None else [item for item in stored if selector(item.labels)]

        items = tuple([_decoded(resource, listed, operation) for listed in _answer(operation, read)])
        return ListResult(items if pages is None else items[: pages * limit], str(store.version if at is None else at))

    async def watch(
        self,
        resource: Resource[T],
        namespace: str | None = None,
        *,
        resource_version: str,
        label_selector: str | None = None,
        timeout_seconds: int = 60,
    ) -> AsyncGenerator[WatchEvent[T], None]:
        operation = _operation("watch", resource, namespace)
        if self.faults is not None:
            await self._disturbed(_request(operation), operation)

        def open_feed() -> Feed:
            kind = self._server.kinds.of(resource)
            selector = parse(label_selector) if label_selector else None
            table = self._server.store.table(kind.id)
            return Feed(table, namespace, selector, _version(resource_version) or None)

        feed = _answer(operation, open_feed)
        async with (
            Stream(feed, self._server.clock, timeout_seconds, self.faults, _request(operation), operation) as stream,
            aclosing(stream.events()) as events,
        ):
            async for event in events:
                if isinstance(event, int):
                    yield Bookmark(str(event))
                else:
                    yield Changed(event.type, _decoded(resource, event.object, operation))

    async def create(self, resource: Resource[T], namespace: str | None, body: Mapping[str, Any]) -> T:
        operation = _operation("create", resource, namespace, body.get("metadata", {}).get("name"), named=False)
        return await self._write(resource, operation, lambda kind: self._server.create(kind, namespace, body))

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
        operation = _operation("patch", resource, namespace, name, subresource)
        if resource_version is not None:
            body = {**body, "metadata": {**body.get("metadata", {}), "resourceVersion": resource_version}}

        def write(kind: Kind) -> Stored:
            return self._server.merge_patch(kind, namespace, name, body, subresource=subresource)

        return await self._write(resource, operation, write)

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
        operation = _operation("replace", resource, namespace, name)
        return await self._write(resource, operation, lambda kind: self._server.replace(kind, namespace, name, body))

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
        operation = _operation("delete", resource, namespace, name)

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

        await self._written(resource, operation, write)

    async def review_token(self, token: str, audiences: Sequence[str]) -> TokenReview:
        if self.faults is not None:
            await self._disturbed(Request("review", "tokenreviews"), Operation("review", "tokenreviews"))
        return self._tokens.review(token, audiences)

    async def signing_keys(self) -> Mapping[str, Any]:
        if self.faults is not None:
            await self._disturbed(Request("get", "jwks"), Operation("get", "jwks"))
        return self._tokens.key_set()

    async def _write(self, resource: Resource[T], operation: Operation, write: Callable[[Kind], Stored]) -> T:
        return _decoded(resource, await self._written(resource, operation, write), operation)

    async def _written(self, resource: Resource[Any], operation: Operation, write: Callable[[Kind], A]) -> A:
        if self.faults is None:
            return _answer(operation, lambda: write(self._server.kinds.of(resource)))
        lost = (await self._disturbed(_request(operation), operation)).lost
        answer = _answer(operation, lambda: write(self._server.kinds.of(resource)))
        if lost:
            raise ConnectionFailed("the answer was lost", operation=operation)
        return answer

    async def _disturbed(self, request: Request, operation: Operation) -> _Struck:
        """Apply the faults before the request. Return those that come after it."""
        faults = self.faults
        assert faults is not None
        at, lost = None, False
        if faults.is_cut:
            raise ConnectionFailed("no connection", operation=operation)
        for fault in faults.strike(request):
            match fault:
                case Delay(seconds):
                    await self._server.clock.sleep(seconds)
                case Refuse():
                    raise fault.refusal().error(operation)
                case Disconnect():
                    raise ConnectionFailed("no connection", operation=operation)
                case Expire():
                    raise expired(0, self._server.store.version).error(operation)
                case Stale(versions):
                    at = max(1, self._server.store.floor, self._server.store.version - versions)
                case LoseAnswer():
                    lost = True
                case _:
                    raise ValueError(f"{fault} strikes events of a watch, not {request}; add it for the verb 'event'")
        if faults.is_cut:
            raise ConnectionFailed("no connection", operation=operation)
        if lost and request.verb in _READS:
            raise ConnectionFailed("the answer was lost", operation=operation)
        return _Struck(at, lost)


@dataclass(frozen=True, slots=True)
class _Struck:
    """The effect of faults. `at`: the version that a read sees, None for the newest. `lost`: the answer will not
    arrive."""

    at: int | None
    lost: bool


_READS = ("get", "list", "watch", "review")


def _answer(operation: Operation, request: Callable[[], A]) -> A:
    try:
        return request()
    except Refusal as refusal:
        raise refusal.error(operation) from None


def _decoded(resource: Resource[T], stored: Stored, operation: Operation) -> T:
    try:
        return stored.decode(resource.struct)
    except msgspec.ValidationError as error:
        raise ServerError(f"the answer cannot be decoded: {error}", operation=operation) from error


def _version(text: str | None) -> int:
    """A resource version as a number; 0 for "any". Raises Refusal (400)."""
    if not text:
        return 0
    if not text.isdigit():
        raise bad_request(f"resourceVersion: {text[:60]!r} is no resource version")
    return int(text)
