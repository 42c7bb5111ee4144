"""The protocol by which the operator talks to Kubernetes, and its values. It does not say how requests are sent.

The HTTP transport and the in-memory cluster implement it, and all code above uses only this. Both keep these rules.
Every failure is an `errors.KubeError`. A write is sent at most once, unless the server refused it (429) or the verb is
safe to repeat. Every wait has a bound.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from everstep_operator.kube.resources import Resource
from everstep_operator.kube.wire import KubeObject

T = TypeVar("T", bound=KubeObject)

Propagation: TypeAlias = Literal["Background", "Orphan"]

PAGE = 500  # objects a list request: keeps a page of pods near 3 MB


@dataclass(frozen=True, slots=True)
class ListResult(Generic[T]):
    """All items of a list, every page of it, and the resource version that a watch continues from."""

    items: tuple[T, ...]
    resource_version: str


class EventType(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class Changed(Generic[T]):
    """An object changed; for DELETED `object` is its last state, with the resource version of the deletion."""

    type: EventType
    object: T

    @property
    def resource_version(self) -> str:
        return self.object.metadata.resource_version


@dataclass(frozen=True, slots=True)
class Bookmark:
    """Nothing else changed up to `resource_version`. The stream is alive, and a reconnect may start here."""

    resource_version: str


WatchEvent: TypeAlias = Changed[T] | Bookmark


@dataclass(frozen=True, slots=True)
class TokenIdentity:
    """The owner of a bearer token. The pod fields are empty for a token that is bound to no pod. `uid`, `groups` and
    `extra` are what a SubjectAccessReview asks for beside the name."""

    username: str
    audiences: tuple[str, ...]
    pod_name: str
    pod_uid: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)

    @property
    def namespace(self) -> str:
        """The namespace in `system:serviceaccount:<namespace>:<name>`; empty for a user that is no service account."""
        parts = self.username.split(":")
        return parts[2] if len(parts) == 4 and parts[:2] == ["system", "serviceaccount"] else ""


@dataclass(frozen=True, slots=True)
class TokenRefused:
    """The token is valid for none of the audiences; `reason` is the server's and never quotes the token."""

    reason: str


TokenReview: TypeAlias = TokenIdentity | TokenRefused


class KubeClient(Protocol):
    """Kubernetes as this operator uses it. All methods raise `errors.KubeError` and its subclasses only."""

    async def get(self, resource: Resource[T], namespace: str | None, name: str) -> T:
        """The object, read consistently. Raises `NotFound`."""
        ...

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
        """Every object, read in pages of `limit`. If the history expires between two pages, the list begins again.

        `field_selector`: fields and values, such as `regarding.uid=…,type=Warning`; which fields there are depends on
        the kind.
        `resource_version=None` is a consistent read; "0" may be any cached state. `pages`: at most so many are read,
        where strangers decide how many there are.
        """
        ...

    def watch(
        self,
        resource: Resource[T],
        namespace: str | None = None,
        *,
        resource_version: str,
        label_selector: str | None = None,
        timeout_seconds: int = 60,
    ) -> AsyncGenerator[WatchEvent[T], None]:
        """Changes after `resource_version`, until the server ends the stream (normally, after `timeout_seconds`).

        Close it (`contextlib.aclosing`) to free the connection. Raises `Gone`, `StreamBroken`, `ConnectionFailed`.
        """
        ...

    async def create(self, resource: Resource[T], namespace: str | None, body: Mapping[str, Any]) -> T:
        """Create. Raises `AlreadyExists` if the name is taken. After `ConnectionFailed` or `ServerError` the object may
        exist."""
        ...

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
        """JSON merge patch (null deletes); with `resource_version`, `Conflict` if the object moved on."""
        ...

    async def patch_status(
        self,
        resource: Resource[T],
        namespace: str | None,
        name: str,
        status: Mapping[str, Any],
        *,
        resource_version: str | None = None,
    ) -> T:
        """Merge `status` into the status subresource; with `resource_version` it is a compare-and-swap."""
        ...

    async def replace(self, resource: Resource[T], namespace: str | None, name: str, body: Mapping[str, Any]) -> T:
        """PUT the whole object; `body.metadata.resourceVersion` makes it a compare-and-swap (`Conflict`)."""
        ...

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
        """Ask for deletion; `NotFound` if it is gone, `Conflict` if a precondition does not hold."""
        ...

    async def review_token(self, token: str, audiences: Sequence[str]) -> TokenReview:
        """The token's owner, if it is valid for one of `audiences`. The token is never logged."""
        ...

    async def signing_keys(self) -> Mapping[str, Any]:
        """The public keys with which tokens of service accounts are signed: a JSON Web Key Set (RFC 7517). Raises
        `Forbidden` if this account may not read them.
        """
        ...
