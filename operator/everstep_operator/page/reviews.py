"""Who may read on a cluster: whoever has a bearer token of it, and only what that account may read by its own rights.

The token comes in the header Authorization, as from a proxy that signs people in, or in a cookie from the form of this
page. TokenReview says whose it is; SubjectAccessReview, whether that account may `get trainingjobs` in a namespace.
Invariants: a token is neither kept nor logged, only its SHA-256; answers of the API server are kept for `TTL` seconds
at most, and in bounded number; strangers' tokens cost few reviews.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from aiohttp import hdrs, web

from everstep.contract import labels
from everstep_operator.kube.client import KubeClient, TokenIdentity, TokenRefused
from everstep_operator.kube.errors import KubeError
from everstep_operator.kube.resources import Resource
from everstep_operator.kube.wire import KubeObject, Wire
from everstep_operator.page.model import May, Unavailable

T = TypeVar("T")

TTL = 30.0  # seconds for which an answer counts
READERS, RIGHTS = 64, 1100  # readers that are kept, and namespaces of each
PARALLEL = 4  # reviews: as many as the client has connections
STRANGERS, STRANGERS_SECONDS = 20, 10.0  # reviews of tokens that were not valid a moment ago, in so many seconds
MAX_TOKEN = 3_800  # bytes: what a browser keeps as a cookie
MAX_BODY = 16 * 1024
COOKIE = "__Host-everstep"  # a browser sends it back over TLS, or to localhost, alone
LOGIN, LOGOUT = "/login", "/logout"


class _AccessStatus(Wire, frozen=True, kw_only=True):
    allowed: bool = False


class _AccessReview(KubeObject, frozen=True, kw_only=True):
    status: _AccessStatus = _AccessStatus()


ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", _AccessReview, namespaced=False
)


@dataclass(slots=True)
class _Reader:
    user: TokenIdentity
    until: float  # monotonic seconds
    rights: OrderedDict[str, tuple[bool, float]] = field(default_factory=OrderedDict)  # by namespace, with their ends


class ReviewedAccess:
    """`form` makes the page that asks for a token, with a status and with what is wrong."""

    def __init__(self, client: KubeClient, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._client, self._monotonic = client, monotonic
        self._readers: OrderedDict[bytes, _Reader] = OrderedDict()
        self._strangers: deque[float] = deque()
        self._slots = asyncio.Semaphore(PARALLEL)
        self.form: Callable[[web.Request, int, str], web.Response] = _plain_form  # until there is a page

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post(LOGIN, self._login)
        router.add_post(LOGOUT, self._logout)

    def shown(self, request: web.Request) -> Mapping[str, Any]:
        reader = self._readers.get(_digest(_token(request)))
        if reader is None:
            return {}
        return {"user": reader.user.username, **({"leave": LOGOUT} if COOKIE in request.cookies else {})}

    async def admit(self, request: web.Request) -> May | web.Response:
        token = _token(request)
        if not token:
            return self.form(request, 401, "")
        reader = await self._reader(token)
        if reader is None:
            return self.form(request, 401, "The cluster does not accept this token: it has expired, or is another's.")

        async def may(namespace: str) -> bool:
            # Most readers may see all namespaces or few, so the one question is asked first.
            return await self._may(reader, "") or await self._may(reader, namespace)

        return may

    async def _reader(self, token: str) -> _Reader | None:
        key, now = _digest(token), self._monotonic()
        known = self._readers.get(key)
        if known is not None and now < known.until:
            return known
        if known is None:
            while self._strangers and self._strangers[0] <= now - STRANGERS_SECONDS:
                self._strangers.popleft()
            if len(self._strangers) >= STRANGERS:
                raise Unavailable("Too many tokens were tried: wait ten seconds.")
            self._strangers.append(now)
        user = await self._review(lambda: self._client.review_token(token, ()))
        if isinstance(user, TokenRefused) or not user.username:
            self._readers.pop(key, None)
            return None
        reader = _Reader(user, self._monotonic() + TTL)
        if known is not None and known.user == reader.user:
            reader.rights = known.rights
        self._readers[key] = reader
        self._readers.move_to_end(key)
        while len(self._readers) > READERS:
            self._readers.popitem(last=False)
        return reader

    async def _may(self, reader: _Reader, namespace: str) -> bool:
        """Whether the account may get TrainingJobs in this namespace; in all, if it is empty."""
        allowed, until = reader.rights.get(namespace, (False, 0.0))
        if self._monotonic() < until:
            return allowed
        user = reader.user
        spec = {
            "user": user.username, "uid": user.uid, "groups": list(user.groups),
            "extra": {name: list(values) for name, values in user.extra.items()},
            "resourceAttributes": {
                "namespace": namespace, "verb": "get", "group": labels.GROUP, "resource": labels.PLURAL,
            },
        }  # fmt: skip
        review = await self._review(lambda: self._client.create(ACCESS_REVIEWS, None, {"spec": spec}))
        allowed = review.status.allowed
        reader.rights[namespace] = allowed, self._monotonic() + TTL
        reader.rights.move_to_end(namespace)
        while len(reader.rights) > RIGHTS:
            reader.rights.popitem(last=False)
        return allowed

    async def _review(self, ask: Callable[[], Awaitable[T]]) -> T:
        """A review stores nothing, whatever becomes of the request."""
        try:
            async with self._slots:
                return await ask()
        except KubeError as e:
            raise Unavailable(f"The API server does not say who may read: {e}") from e

    async def _login(self, request: web.Request) -> web.Response:
        """Keep a token as a cookie, if the cluster accepts it."""
        if not _of_this_page(request):
            return self.form(request, 403, "This form was sent by another site.")
        if (request.content_length or 0) > MAX_BODY:
            return self.form(request, 413, "This is no token: it is too long.")
        try:
            async with asyncio.timeout(10):
                body = (await request.read()).decode("ascii", "replace")
                token = "".join(parse_qs(body).get("token", [""])[0].split())
                if not token or len(token) > MAX_TOKEN or not token.isascii():
                    problem = f"A token of 1 to {MAX_TOKEN} characters is expected. Longer ones: through a proxy."
                    return self.form(request, 400, problem)
                if await self._reader(token) is None:
                    return self.form(request, 401, "The cluster does not accept this token.")
        except Unavailable as e:
            return self.form(request, 503, str(e))
        except TimeoutError:
            return self.form(request, 504, "The API server did not answer in time.")
        answer = web.Response(status=303, headers={hdrs.LOCATION: "/"})
        answer.set_cookie(COOKIE, token, httponly=True, secure=True, samesite="Strict", path="/")
        return answer

    async def _logout(self, request: web.Request) -> web.Response:
        answer = web.Response(status=303, headers={hdrs.LOCATION: "/"})
        if _of_this_page(request):
            self._readers.pop(_digest(request.cookies.get(COOKIE, "")), None)
            answer.del_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="Strict")
        return answer


def _token(request: web.Request) -> str:
    scheme, _, value = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else request.cookies.get(COOKIE, "")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _of_this_page(request: web.Request) -> bool:
    """Whether a form was sent by a page of this server, as far as the browser says."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get(hdrs.ORIGIN)
    return origin is None or urlsplit(origin).netloc == request.host


def _plain_form(request: web.Request, status: int, problem: str) -> web.Response:
    del request
    return web.Response(status=status, text=f"a bearer token of the cluster is needed. {problem}\n")
