"""The transport against a server that misbehaves in every way a real one, or a proxy before it, can."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from everstep_operator.kube.client import Bookmark, Changed
from everstep_operator.kube.credentials import InCluster, KubeConfig
from everstep_operator.kube.errors import (
    AlreadyExists,
    Conflict,
    ConnectionFailed,
    CredentialsError,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    Operation,
    Rejected,
    ServerError,
    StreamBroken,
    TooManyRequests,
    Unauthorized,
    from_response,
)
from everstep_operator.kube.framing import split_lines
from everstep_operator.kube.resources import (
    CLAIMS,
    CONFIGMAPS,
    EVENTS,
    FLAVORS,
    LEASES,
    NETWORK_POLICIES,
    NODES,
    PDBS,
    POD_GROUPS,
    PODS,
    PRIORITY_CLASSES,
    SERVICES,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
    Resource,
)
from everstep_operator.kube.service_account import TokenFile
from everstep_operator.kube.transport import ClientLimits, HttpKubeClient
from everstep_operator.main import JOBS
from everstep_operator.page.reviews import ACCESS_REVIEWS
from everstep_operator.runtime.errors import NotLeading
from everstep_operator.telemetry.metrics import RESOURCES, VERBS, Metrics

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def status(code: int, reason: str = "", message: str = "", headers: dict[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code, headers=headers)


def pod(name: str, version: int = 1) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "uid": f"u-{name}", "resourceVersion": str(version)}}


def page(*names: str, version: int = 1, more: str = "") -> web.Response:
    items = [pod(name) for name in names]
    return web.json_response({"metadata": {"resourceVersion": str(version), "continue": more}, "items": items})


class Server:
    """Answers from a script, the last answer for ever; remembers what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.script: list[web.StreamResponse | Answer] = []
        self.requests: list[tuple[str, str, str, Any]] = []
        self.tokens: list[str] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.write_kubeconfig("first")

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def write_kubeconfig(self, token: str) -> None:
        assert self._runner is not None
        host, port = self._runner.addresses[0][:2]
        config = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://{host}:{port}"}}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
        self.kubeconfig.write_text(json.dumps(config))

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(
            (request.method, request.path_qs, request.content_type, json.loads(body) if body else None)
        )
        self.tokens.append(request.headers.get("Authorization", ""))
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, web.StreamResponse):
            # A response object serves one request: the last of the script is made anew each time.
            assert isinstance(answer, web.Response)
            headers = {key: value for key, value in answer.headers.items() if key == "Retry-After"}
            return web.Response(
                body=answer.body, status=answer.status, headers=headers, content_type=answer.content_type
            )
        return await answer(request)


def streams(*chunks: bytes, cut: bool = False) -> Answer:
    """A chunked 200 that sends `chunks`; `cut` breaks the connection instead of ending the body."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


def event(type: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": type, "object": obj}).encode() + b"\n"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Server, None]:
    made = Server(tmp_path)
    await made.start()
    yield made
    await made.stop()


class Waits:
    """Stands for sleeping and keeps how long each wait would have been."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
async def client(server: Server, waits: Waits) -> AsyncGenerator[HttpKubeClient, None]:
    limits = ClientLimits(request_seconds=20.0, watch_slack=20.0)
    async with HttpKubeClient(KubeConfig(str(server.kubeconfig)), limits=limits, rng=lambda: 0.5, sleep=waits) as made:
        yield made


async def events_of(client: HttpKubeClient) -> list[Changed[Any] | Bookmark]:
    seen: list[Changed[Any] | Bookmark] = []
    async with aclosing(client.watch(PODS, "ns", resource_version="1", timeout_seconds=1)) as stream:
        async for item in stream:
            seen.append(item)
    return seen


async def test_retry_after_is_waited_for_with_jitter(client: HttpKubeClient, server: Server, waits: Waits) -> None:
    server.script = [status(429, headers={"Retry-After": "3"}), status(503), web.json_response(pod("a"))]
    assert (await client.get(PODS, "ns", "a")).metadata.name == "a"
    assert waits.seconds == [pytest.approx(3.075), pytest.approx(0.15)]


async def test_read_gives_up_after_its_retries(client: HttpKubeClient, server: Server, waits: Waits) -> None:
    server.script = [status(500, message="etcd is read-only")]
    with pytest.raises(ServerError, match="get pods ns/a: 500: etcd is read-only"):
        await client.get(PODS, "ns", "a")
    assert len(server.requests) == 4
    assert sum(waits.seconds) < 5


async def test_retry_after_beyond_patience_is_the_callers(client: HttpKubeClient, server: Server, waits: Waits) -> None:
    server.script = [status(429, "TooManyRequests", headers={"Retry-After": "600"})]
    with pytest.raises(TooManyRequests) as caught:
        await client.get(PODS, "ns", "a")
    assert caught.value.retry_after == 600.0
    assert waits.seconds == []


async def test_create_is_sent_once_after_500_but_again_after_429(client: HttpKubeClient, server: Server) -> None:
    server.script = [status(500)]
    with pytest.raises(ServerError):
        await client.create(PODS, "ns", pod("a"))
    assert len(server.requests) == 1
    server.script = [status(429), web.json_response(pod("a"), status=201)]
    await client.create(PODS, "ns", pod("a"))
    assert len(server.requests) == 3


@pytest.mark.parametrize("verb", ["create", "patch", "delete"])
async def test_write_is_not_sent_again_by_a_replica_that_may_not_write_any_more(
    verb: str, client: HttpKubeClient, server: Server
) -> None:
    """A replaced leader that was frozen between two tries: its delete and its create name no version, so the server
    would take them."""
    may = iter([True, False])

    def check() -> None:
        if not next(may):
            raise NotLeading("another replica leads")

    client.guard(check)
    server.script = [status(429), web.json_response(pod("a"))]
    write = {
        "create": lambda: client.create(PODS, "ns", pod("a")),
        "patch": lambda: client.merge_patch(PODS, "ns", "a", {}),
        "delete": lambda: client.delete(PODS, "ns", "a", uid="u"),
    }[verb]
    with pytest.raises(NotLeading):
        await write()
    assert len(server.requests) == 1
    assert (await client.get(PODS, "ns", "a")).metadata.name == "a", "it may still read"


async def test_delete_is_repeated_only_when_bound_to_a_uid(client: HttpKubeClient, server: Server) -> None:
    server.script = [status(503)]
    with pytest.raises(ServerError):
        await client.delete(PODS, "ns", "a")
    assert len(server.requests) == 1
    server.script = [status(503), web.json_response({})]
    await client.delete(PODS, "ns", "a", uid="u", resource_version="7", grace_seconds=0, propagation="Background")
    assert server.requests[-1][3] == {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": "u", "resourceVersion": "7"},
        "gracePeriodSeconds": 0,
        "propagationPolicy": "Background",
    }


async def test_patches_carry_their_content_type_and_precondition(client: HttpKubeClient, server: Server) -> None:
    server.script = [web.json_response(pod("a"))]
    await client.patch_status(PODS, "ns", "a", {"phase": "Failed"}, resource_version="9")
    ((_, path, merge, patch),) = server.requests
    assert path == "/api/v1/namespaces/ns/pods/a/status"
    assert merge == "application/merge-patch+json"
    assert patch == {"status": {"phase": "Failed"}, "metadata": {"resourceVersion": "9"}}


async def test_list_reads_every_page(client: HttpKubeClient, server: Server) -> None:
    server.script = [page("a", "b", more="t=1/x"), page("c", version=7)]
    listed = await client.list(PODS, label_selector="a=b,c in (d)")
    assert [item.metadata.name for item in listed.items] == ["a", "b", "c"]
    assert listed.resource_version == "7"
    assert "continue=t%3D1%2Fx" in server.requests[1][1] or "continue=t%3D1/x" in server.requests[1][1]


async def test_list_whose_history_expires_between_pages_begins_anew(client: HttpKubeClient, server: Server) -> None:
    server.script = [page("old", more="t"), status(410, "Expired"), page("a", more="u"), page("b", version=9)]
    listed = await client.list(PODS, "ns")
    assert [item.metadata.name for item in listed.items] == ["a", "b"]
    server.script = [
        page("old", more="t"),
        status(410),
        page("old", more="t"),
        status(410),
        page(more="t"),
        status(410),
    ]
    with pytest.raises(Gone):
        await client.list(PODS, "ns")


async def test_list_without_items_is_empty(client: HttpKubeClient, server: Server) -> None:
    server.script = [web.json_response({"metadata": {"resourceVersion": "3"}, "items": None})]
    assert (await client.list(NODES)).items == ()


async def test_watch_decodes_lines_across_chunks(client: HttpKubeClient, server: Server) -> None:
    first, second = event("ADDED", pod("a", 2)), event("DELETED", pod("a", 3))
    mark = event("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
    server.script = [streams(first[:10], first[10:] + second[:1], second[1:] + b"\n" + mark)]
    seen = await events_of(client)
    assert [item.resource_version for item in seen] == ["2", "3", "9"]
    assert "allowWatchBookmarks=true" in server.requests[0][1]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (streams(event("ADDED", pod("a"))[:-9]), StreamBroken),
        (streams(b"<html>bad gateway</html>\n"), StreamBroken),
        (streams(event("SURPRISE", pod("a"))), StreamBroken),
        (streams(event("ADDED", {"metadata": {"name": 5}})), StreamBroken),
        (streams(b'{"type":"ADDED"}\n'), StreamBroken),
        (streams(b"\xff\xfe\n"), StreamBroken),
        (streams(b"[" * 5000 + b"\n"), StreamBroken),
        (streams(event("ADDED", pod("a")), cut=True), ConnectionFailed),
        (streams(event("ERROR", {"code": 410, "reason": "Expired", "message": "too old"})), Gone),
        (streams(event("ERROR", {"code": 500, "message": "boom"})), ServerError),
        (status(410, "Gone"), Gone),
        (status(403, "Forbidden"), Forbidden),
    ],
)
async def test_watch_that_goes_wrong_raises_its_kind(
    client: HttpKubeClient, server: Server, answer: Any, error: type[Exception]
) -> None:
    server.script = [answer]
    with pytest.raises(error):
        await events_of(client)


async def test_watch_without_end_is_cut_after_its_slack(server: Server) -> None:
    async def hang(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event("ADDED", pod("a")))
        while request.transport is not None and not request.transport.is_closing():
            await response.write(b"\n")
            await asyncio.sleep(0.1)
        return response

    server.script = [hang]
    limits = ClientLimits(watch_slack=0.5)
    async with HttpKubeClient(KubeConfig(str(server.kubeconfig)), limits=limits) as client:
        with pytest.raises(ConnectionFailed, match=r"within 1\.5 s"):
            await events_of(client)


async def test_line_beyond_the_bound_is_refused_before_it_is_complete() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        for _ in range(100):
            yield b"x" * 100

    with pytest.raises(StreamBroken, match="exceeds the limit of 1000"):
        async for _ in split_lines(chunks(), Operation("watch", "pods"), max_line=1000):
            pass


async def test_token_that_expired_is_read_again(client: HttpKubeClient, server: Server) -> None:
    server.script = [web.json_response(pod("a"))]
    await client.get(PODS, "ns", "a")
    server.write_kubeconfig("second")
    # Only a load that is not moments old is believed to be outdated.
    client._session._loaded_at -= 60
    server.script = [status(401), web.json_response(pod("a"))]
    assert (await client.get(PODS, "ns", "a")).metadata.name == "a"
    assert server.tokens == ["Bearer first", "Bearer first", "Bearer second"]


async def test_token_that_stays_refused_ends_after_one_more_try(client: HttpKubeClient, server: Server) -> None:
    server.script = [status(401, "Unauthorized")]
    with pytest.raises(Unauthorized):
        await client.get(PODS, "ns", "a")
    assert len(server.requests) == 2


async def test_server_that_is_not_there_is_retryable(client: HttpKubeClient, server: Server, waits: Waits) -> None:
    await server.stop()
    with pytest.raises(ConnectionFailed, match="get pods ns/a"):
        await client.get(PODS, "ns", "a")
    assert len(waits.seconds) == 3
    with pytest.raises(ConnectionFailed):
        await client.create(PODS, "ns", pod("a"))
    assert len(waits.seconds) == 3
    await server.start()


async def test_answer_that_never_comes_ends_at_the_time_limit(server: Server, waits: Waits) -> None:
    async def hang(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    server.script = [hang]
    limits = ClientLimits(request_seconds=0.2, retries=0)
    async with HttpKubeClient(KubeConfig(str(server.kubeconfig)), limits=limits, sleep=waits) as client:
        with pytest.raises(ConnectionFailed, match=r"within 0\.2 s"):
            await client.get(PODS, "ns", "a")


async def test_body_that_is_no_object_is_a_server_error(client: HttpKubeClient, server: Server) -> None:
    server.script = [web.Response(body=b"<html>", status=200)]
    with pytest.raises(ServerError, match="cannot be decoded"):
        await client.create(PODS, "ns", pod("a"))


async def test_missing_kubeconfig_says_what_to_check(tmp_path: Path) -> None:
    async with HttpKubeClient(KubeConfig(str(tmp_path / "none"))) as client:
        with pytest.raises(CredentialsError, match="check that the files exist"):
            await client.get(PODS, "ns", "a")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("token", None, "the token cannot be read: [Errno 2] No such file"),
        ("token", b"", "is empty"),
        ("token", b"one two", "has more than a token"),
        ("token", b"\xff\xfe", "the token cannot be read: 'ascii' codec"),
        ("ca.crt", None, "the CA of the API server cannot be read: [Errno 2] No such file"),
        ("ca.crt", b"", "has no certificate in PEM"),
        ("ca.crt", b"no certificate", "has no certificate in PEM"),
    ],
)
async def test_file_of_a_service_account_that_cannot_be_used_is_named(
    name: str, content: bytes | None, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    async with HttpKubeClient(InCluster(tmp_path, "127.0.0.1", "1")) as client:
        with pytest.raises(CredentialsError) as caught:
            await client.get(PODS, "ns", "a")
    assert str(caught.value).startswith(f"{tmp_path / name}: {problem}")


async def test_token_that_the_kubelet_replaces_is_used_at_once_and_the_last_one_while_its_file_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    (tmp_path / "..1").mkdir()
    (tmp_path / "..1/token").write_text("first\n")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "token").symlink_to("..data/token")
    token = TokenFile(tmp_path / "token", monotonic=lambda: now)
    assert await token.authorization() == "Bearer first"

    (tmp_path / "..2").mkdir()
    (tmp_path / "..2/token").write_text("other\n")
    (tmp_path / "..new").symlink_to("..2")
    (tmp_path / "..new").replace(tmp_path / "..data")  # as a kubelet does
    assert await token.authorization() == "Bearer other"

    (tmp_path / "token").unlink()
    assert [await token.authorization() for _ in range(3)] == ["Bearer other"] * 3
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "the token cannot be read again, so the last one is used"
    ]
    (tmp_path / "token").write_text("third")
    assert await token.authorization() == "Bearer third"

    old = (tmp_path / "token").stat()
    (tmp_path / "token").write_text("fifth")
    os.utime(tmp_path / "token", ns=(old.st_atime_ns, old.st_mtime_ns))  # a file system that shows no change
    now += 60
    assert await token.authorization() == "Bearer fifth"


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (400, "BadRequest", Invalid),
        (401, "Unauthorized", Unauthorized),
        (403, "Forbidden", Forbidden),
        (404, "NotFound", NotFound),
        (405, "MethodNotAllowed", Rejected),
        (408, "", ConnectionFailed),
        (409, "AlreadyExists", AlreadyExists),
        (409, "Conflict", Conflict),
        (410, "Expired", Gone),
        (422, "Invalid", Invalid),
        (429, "TooManyRequests", TooManyRequests),
        (500, "InternalError", ServerError),
        (504, "Timeout", ServerError),
    ],
)
def test_every_code_becomes_one_error(code: int, reason: str, expected: type[Exception]) -> None:
    body = json.dumps({"reason": reason, "message": "m", "code": code}).encode()
    assert type(from_response(code, {}, body, Operation("get", "pods"))) is expected


def test_causes_name_the_fields() -> None:
    causes = [{"reason": "FieldValueInvalid", "message": "must be >= 1", "field": "spec.replicas"}]
    body = json.dumps({"reason": "Invalid", "message": "bad", "details": {"causes": causes}}).encode()
    error = from_response(422, {}, body, Operation("create", "trainingjobs", "ns", "a"))
    assert [(cause.field, cause.message) for cause in error.causes] == [("spec.replicas", "must be >= 1")]
    assert str(error) == "create trainingjobs ns/a: 422 Invalid: bad"


def test_page_of_a_proxy_is_quoted_within_a_bound() -> None:
    error = from_response(502, {"Retry-After": "x"}, b"<html>" + b"y" * 100_000, Operation("get", "pods"))
    assert isinstance(error, ServerError)
    assert len(str(error)) < 3000
    assert error.retry_after is None


async def test_every_request_is_counted_by_words_that_the_metric_knows(server: Server) -> None:
    metrics = Metrics(process=False)
    server.script = [web.json_response({"metadata": {}, "items": [], "status": {"authenticated": False}})]
    async with HttpKubeClient(KubeConfig(str(server.kubeconfig)), on_answer=metrics.api_request) as client:
        objects: tuple[Resource[Any], ...] = (
            *(PODS, SERVICES, CONFIGMAPS, EVENTS, LEASES, PDBS, NETWORK_POLICIES, CLAIMS, WORKLOADS, JOBS),
            *POD_GROUPS.values(),
        )
        for resource in objects:
            await client.create(resource, "ns", {})
            await client.get(resource, "ns", "a")
            await client.list(resource, "ns")
            await client.replace(resource, "ns", "a", {})
            await client.merge_patch(resource, "ns", "a", {})
            await client.delete(resource, "ns", "a")
        await client.patch_status(JOBS, "ns", "a", {})
        await client.patch_status(WORKLOADS, "ns", "a", {})
        for resource in (NODES, FLAVORS, WORKLOAD_PRIORITY_CLASSES, PRIORITY_CLASSES):
            await client.list(resource)
        await client.review_token("t", ("us",))
        await client.create(ACCESS_REVIEWS, None, {})
        await client.signing_keys()
    families = {f.name: f for f in metrics.registry.collect()}
    counted = [s.labels for s in families["everstep_api_requests"].samples if s.name.endswith("_total")]
    assert {labels["verb"] for labels in counted} == set(VERBS)
    assert {labels["resource"] for labels in counted} == set(RESOURCES)
    assert {s.labels["verb"] for s in families["everstep_api_request_seconds"].samples} == set(VERBS)
