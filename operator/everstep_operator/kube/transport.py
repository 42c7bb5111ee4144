"""`KubeClient` over HTTP.

The client repeats a request by itself only if that cannot do anything twice: reads, server-side checks, deletes bound
to a UID, and requests that flow control refused (429) before they began. Waits have jitter, and follow the server's
Retry-After up to a bound. After `ClientLimits.retries` the caller gets the error with its `retry_after`.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import msgspec

from everstep_operator.kube import credentials
from everstep_operator.kube.backoff import Backoff
from everstep_operator.kube.client import (
    PAGE,
    ListResult,
    Propagation,
    TokenIdentity,
    TokenRefused,
    TokenReview,
    WatchEvent,
)
from everstep_operator.kube.errors import (
    ConnectionFailed,
    Gone,
    KubeError,
    Operation,
    ServerError,
    TooManyRequests,
)
from everstep_operator.kube.framing import decode_event, decode_object, decode_page, split_lines
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.session import Request, Session, read_body
from everstep_operator.kube.wire import KubeObject

T = TypeVar("T", bound=KubeObject)

MERGE = "application/merge-patch+json"
RESTARTED_LISTS = 3  # how often one list may begin again because its continue token expired


OnAnswer = Callable[[str, str, str, float], None]


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """`connections`: at a time (a watch holds one). `retries`: after the first try. `patience`: the longest Retry-After
    that is waited for here, in seconds. `watch_slack`: how long after its announced end a watch is cut off."""

    connections: int = 64
    request_seconds: float = 30.0
    connect_seconds: float = 5.0
    retries: int = 3
    patience: float = 10.0
    watch_slack: float = 15.0
    backoff: Backoff = Backoff(base=0.1, cap=2.0)  # noqa: RUF009 - frozen


class HttpKubeClient:
    """Implements `client.KubeClient`. Use it in one event loop; `close` it, or use it as an async context manager."""

    def __init__(
        self,
        source: credentials.Source,
        *,
        limits: ClientLimits = ClientLimits(),
        rng: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        on_answer: OnAnswer | None = None,
    ) -> None:
        """`on_answer(verb, resource, code, seconds)` is called for every request except watches. Code "error": no
        answer."""
        self._on_answer = on_answer
        self._session = Session(source, limits.connections)
        self._limits = limits
        self._rng = rng
        self._sleep = sleep
        self._may_write: Callable[[], object] = lambda: None

    def guard(self, may_write: Callable[[], object]) -> None:
        """From now on `may_write()` is called right before a create, a patch or a delete is sent, the first time and
        again, and raises if it must not be. The caller's own check is not enough: between two tries another replica may
        have begun to lead."""
        self._may_write = may_write

    async def __aenter__(self) -> "HttpKubeClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def get(self, resource: Resource[T], namespace: str | None, name: str) -> T:
        operation = _operation("get", resource, namespace, name)
        body = await self._exchange(Request("GET", resource.path(namespace, name), operation), idempotent=True)
        return decode_object(resource.struct, body, operation)

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
        selectors = _query(labelSelector=label_selector, fieldSelector=field_selector)
        for _ in range(RESTARTED_LISTS):
            try:
                return await self._list_pages(resource, namespace, selectors, limit, resource_version, pages)
            except Gone as error:
                # The server compacted its history between two pages. A mix of two histories could hide a deletion.
                expired = error
        raise expired

    async def _list_pages(
        self,
        resource: Resource[T],
        namespace: str | None,
        selectors: tuple[tuple[str, str], ...],
        limit: int,
        resource_version: str | None,
        pages: int | None,
    ) -> ListResult[T]:
        operation = _operation("list", resource, namespace, None)
        query = _query(limit=limit) + selectors
        first = _query(resourceVersion=resource_version)
        items: list[T] = []
        for number in count(1):
            request = Request("GET", resource.path(namespace), operation, query=query + first)
            page = decode_page(resource.struct, await self._exchange(request, idempotent=True), operation)
            items += page.items or ()
            if not page.metadata.continue_ or number == pages:
                return ListResult(tuple(items), page.metadata.resource_version)
            first = _query(**{"continue": page.metadata.continue_})
        raise AssertionError("the last page returns")

    async def watch(
        self,
        resource: Resource[T],
        namespace: str | None = None,
        *,
        resource_version: str,
        label_selector: str | None = None,
        timeout_seconds: int = 60,
    ) -> AsyncGenerator[WatchEvent[T], None]:
        operation = _operation("watch", resource, namespace, None)
        query = _query(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=resource_version,
            labelSelector=label_selector,
            timeoutSeconds=timeout_seconds,
        )
        request = Request(
            "GET",
            resource.path(namespace),
            operation,
            query=query,
            total=timeout_seconds + self._limits.watch_slack,
            connect=self._limits.connect_seconds,
        )
        async with self._session.send(request) as response:
            async for line in split_lines(response.content.iter_any(), operation):
                yield decode_event(resource.struct, line, operation)

    async def create(self, resource: Resource[T], namespace: str | None, body: Mapping[str, Any]) -> T:
        operation = _operation("create", resource, namespace, body.get("metadata", {}).get("name"))
        full = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        return await self._write("POST", resource, resource.path(namespace), operation, full)

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
        path = resource.path(namespace, name, subresource)
        return await self._write("PATCH", resource, path, operation, body, MERGE)

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
        full = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        return await self._write("PUT", resource, resource.path(namespace, name), operation, full)

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
        preconditions = _present(uid=uid, resourceVersion=resource_version)
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            **_present(
                preconditions=preconditions or None, gracePeriodSeconds=grace_seconds, propagationPolicy=propagation
            ),
        }
        operation = _operation("delete", resource, namespace, name)
        request = Request("DELETE", resource.path(namespace, name), operation, body=body, check=self._may_write)
        await self._exchange(request, idempotent=uid is not None)

    async def review_token(self, token: str, audiences: Sequence[str]) -> TokenReview:
        operation = Operation("review", "tokenreviews")
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": list(audiences)},
        }
        # This POST stores nothing, so it may be repeated.
        request = Request("POST", "/apis/authentication.k8s.io/v1/tokenreviews", operation, body=body)
        return _review(await self._exchange(request, idempotent=True), operation)

    async def signing_keys(self) -> Mapping[str, Any]:
        operation = Operation("get", "jwks")
        # The server answers 406 if a client accepts plain JSON only.
        request = Request("GET", "/openid/v1/jwks", operation, accept="application/jwk-set+json")
        body = await self._exchange(request, idempotent=True)
        try:
            return msgspec.json.decode(body, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ServerError(f"the answer is no key set: {error}", operation=operation) from error

    async def _write(
        self,
        method: str,
        resource: Resource[T],
        path: str,
        operation: Operation,
        body: Mapping[str, Any],
        content_type: str = "application/json",
    ) -> T:
        request = Request(method, path, operation, body=body, content_type=content_type, check=self._may_write)
        return decode_object(resource.struct, await self._exchange(request, idempotent=False), operation)

    async def _exchange(self, request: Request, *, idempotent: bool) -> bytes:
        """The body of the answer, after as many tries as are safe and bounded."""
        request = replace(request, total=self._limits.request_seconds, connect=self._limits.connect_seconds)
        for attempt in range(self._limits.retries + 1):
            try:
                return await self._once(request)
            except (TooManyRequests, ServerError, ConnectionFailed) as error:
                delay = self._delay(error, attempt, safe=idempotent or isinstance(error, TooManyRequests))
                if delay is None:
                    raise
                await self._sleep(delay)
        raise AssertionError("the last attempt raises")

    async def _once(self, request: Request) -> bytes:
        began = asyncio.get_running_loop().time()
        code = "error"
        try:
            async with self._session.send(request) as response:
                body = await read_body(response, request.operation)
                code = str(response.status)
                return body
        except KubeError as error:
            code = str(error.status) if error.status else "error"
            raise
        finally:
            if self._on_answer is not None:
                seconds = asyncio.get_running_loop().time() - began
                self._on_answer(request.operation.verb, request.operation.resource, code, seconds)

    def _delay(self, error: KubeError, attempt: int, *, safe: bool) -> float | None:
        """Seconds until the next try; None if there is none."""
        requested = error.retry_after or 0.0
        if not safe or attempt >= self._limits.retries or requested > self._limits.patience:
            return None
        # Jitter is added to Retry-After, because the server gives everybody the same seconds.
        return requested + self._limits.backoff.delay(attempt, self._rng())


class _User(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: dict[str, list[str]] = {}


class _ReviewStatus(msgspec.Struct):
    authenticated: bool = False
    user: _User = msgspec.field(default_factory=_User)
    audiences: list[str] = []
    error: str = ""


class _Review(msgspec.Struct):
    status: _ReviewStatus = msgspec.field(default_factory=_ReviewStatus)


def _review(body: bytes, operation: Operation) -> TokenReview:
    try:
        status = msgspec.json.decode(body, type=_Review).status
    except msgspec.DecodeError as error:
        raise ServerError(f"the answer is no TokenReview: {error}", operation=operation) from error
    if not status.authenticated:
        return TokenRefused(status.error or "not authenticated")

    user = status.user

    def extra(name: str) -> str:
        return next(iter(user.extra.get(f"authentication.kubernetes.io/{name}", ())), "")

    return TokenIdentity(
        user.username, tuple(status.audiences), extra("pod-name"), extra("pod-uid"), user.uid, user.groups, user.extra
    )


def _operation(
    verb: str, resource: Resource[Any], namespace: str | None, name: str | None, subresource: str | None = None
) -> Operation:
    plural = f"{resource.plural}/{subresource}" if subresource else resource.plural
    return Operation(verb, plural, namespace or "", name or "")


def _present(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _query(**values: Any) -> tuple[tuple[str, str], ...]:
    return tuple((key, str(value)) for key, value in values.items() if value is not None)
