"""Operators that restart, follow and fail over under running agents; and senders that mean no good."""

from __future__ import annotations

import http.client
import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from everstep.contract.document import MAX_BYTES, Document, JoinRequest, Member, Sizes, decode, encode
from everstep.contract.rounds import (
    DOCUMENT_PATH,
    EXPIRATIONS_HEADER,
    MAX_JOIN_REQUEST_BYTES,
    PRESENCE_PATH,
    TTL_HEADER,
    VERSION_HEADER,
)
from everstep.membership.backends.operator_calls import Limits, OperatorCalls
from everstep.membership.backends.operator_store import HttpStore
from everstep.membership.driver import Driver
from everstep.membership.errors import StoreRefused, StoreUnavailable
from everstep.membership.world_state import Broken, Whole
from support.rendezvous.agents import EXPIRING, LIMIT, QUICK, Crew, until
from support.rendezvous.operator_server import OperatorServer, Pod

SIZES = Sizes(1, 3)
EMPTY = Document(SIZES)


def join_request(agent: str, index: int = -1) -> bytes:
    return JoinRequest(Member(index, agent), 0, SIZES).encode()


# --- operators that come and go


class Agents(Crew):
    """Agents whose pods are workers 0, 1, … of a job; they reach the operators at `url`."""

    def __init__(self, server: OperatorServer, url: str, sizes: Sizes) -> None:
        self.job = server.create_job()
        self.pods: list[Pod] = []

        def store() -> HttpStore:
            self.pods.append(server.create_pod(self.job, len(self.pods)))
            return server.store(self.pods[-1], url)

        super().__init__(store, sizes, EXPIRING)


def leading(server: OperatorServer, port: int = 0) -> Any:
    replica = server.start(port)
    until(lambda: server.leads(replica))
    return replica


@pytest.mark.long
def test_restarted_operator_disturbs_no_round_and_delays_one_that_forms_by_less_than_a_second(
    operators: OperatorServer,
) -> None:
    first = leading(operators)
    agents = Agents(operators, first.url, Sizes(2, 3))
    try:
        agents.start("ab")
        port = first.port
        operators.kill(first)
        assert agents.drivers["a"].wait(3.0) == Whole()  # longer than a lease: nobody could renew it
        second = leading(operators, port)
        assert agents.drivers["b"].wait(3.0) == Whole()
        assert set(operators.store(agents.pods[0]).present()) == {"a", "b"}

        operators.kill(second)
        joining = agents.joining("ab")
        time.sleep(0.5)
        assert not any(future.done() for future in joining.values())
        third = leading(operators, port)
        back = time.monotonic()
        assert {future.result(LIMIT).number for future in joining.values()} == {2}
        took = time.monotonic() - back
        print(f"formed {took:.2f} s after the operator was back")
        assert took < 10  # the goal is 1 s; this machine does much else
        assert operators.published() == 2
        assert third.port == port
    finally:
        agents.stop()


def test_agent_that_died_with_the_operator_is_missed_one_lease_after_the_next_one_came(
    operators: OperatorServer,
) -> None:
    first = leading(operators)
    agents = Agents(operators, first.url, Sizes(1, 2))
    try:
        names = agents.start("ab")
        assert {r.number for r in names.values()} == {1}
        operators.kill(first)
        agents.drivers["b"].stop()
        leading(operators, first.port)
        world_state = agents.drivers["a"].wait(LIMIT)
        assert isinstance(world_state, Broken)
        assert "b is gone" in world_state.why
        assert agents.join("a")["a"].world_size == 1
    finally:
        agents.stop()


def test_leader_with_another_count_of_expirations_is_followed_as_quietly(
    operators: OperatorServer,
) -> None:
    """As after the Lease was deleted: the leader's terms, and what it counts, begin again."""
    first = leading(operators)
    pod = operators.create_pod(operators.create_job(), 0)
    store = operators.store(pod, first.url)
    before = store.read()
    for name in "ab":
        store.announce(name, join_request(name), 60.0)
        store.withdraw(name)
    seen = store.read()
    assert seen != before
    operators.kill(first)
    leading(operators, first.port)
    seen = until(lambda: (view := store.watch(seen, 1.0)) != seen and view)  # who is present may be news
    calls = Counter[str]()
    call = store._calls.call
    store._calls.call = lambda *args, **more: calls.update([args[1]]) or call(*args, **more)  # type: ignore[method-assign]
    assert store.watch(seen, 1.0) == seen
    assert sum(calls.values()) <= 1
    store.announce("c", join_request("c"), 60.0)
    store.withdraw("c")
    assert store.watch(seen, LIMIT).expirations == seen.expirations + 1


@pytest.mark.long
def test_follower_sends_agents_to_the_leader_and_they_follow_the_next_one(operators: OperatorServer) -> None:
    leader = leading(operators)
    follower = operators.start()
    until(lambda: follower.operator.elector.holder_address() is not None)
    agents = Agents(operators, follower.url, Sizes(2, 2))
    try:
        agents.start("ab")
        assert agents.drivers["a"]._store._calls._leader == leader.url  # type: ignore[attr-defined]
        operators.kill(leader)
        until(lambda: operators.leads(follower))
        assert agents.drivers["a"].wait(2.5) == Whole()
        assert {r.number for r in agents.join("ab").values()} == {2}
    finally:
        agents.stop()


def test_no_leader_means_later_and_not_never(operators: OperatorServer) -> None:
    alone = leading(operators)
    pod = operators.create_pod(operators.create_job(), 0)
    alone.faults.cut()
    until(lambda: not operators.leads(alone))
    store = operators.store(pod)
    with pytest.raises(StoreUnavailable, match=r"503: (no replica leads|the token cannot be checked)"):
        store.read()
    alone.faults.heal()
    until(lambda: operators.leads(alone))
    assert store.read().version == 0


@pytest.mark.long
def test_api_server_that_is_away_delays_a_round_and_disturbs_none(operators: OperatorServer) -> None:
    replica = leading(operators)
    agents = Agents(operators, replica.url, Sizes(2, 2))
    try:
        agents.start("ab")
        replica.faults.cut()
        assert agents.drivers["a"].wait(2.5) == Whole()
        joining = agents.joining("ab")
        time.sleep(0.3)
        replica.faults.heal()
        assert {future.result(LIMIT).number for future in joining.values()} == {2}
    finally:
        agents.stop()


# --- tokens


def test_token_that_was_rotated_is_read_again(operator: OperatorServer) -> None:
    pod = operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}"), 0)
    store = operator.store(pod)
    assert store.read().version == 0
    calls = store._calls
    texts = iter(["an-old-token", pod.token])
    calls._token = lambda: next(texts)  # type: ignore[method-assign]
    assert store.read().version == 0  # the old one was refused, the file held another by then


@pytest.mark.parametrize("token", ["", "nonsense", "a.b", "x" * 7000, "x" * 20_000, "two\nlines"])
def test_token_that_is_none_is_refused_for_good(operator: OperatorServer, token: str) -> None:
    pod = operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}"), 0)
    pod.token_file.write_text(token)
    with pytest.raises(StoreRefused, match=r"401|holds no token") as refused:
        operator.store(pod).read()
    assert not token or token not in str(refused.value)


def test_token_file_that_is_not_there_yet_is_waited_for(operator: OperatorServer) -> None:
    pod = operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}"), 0)
    pod.token_file.unlink()
    with pytest.raises(StoreUnavailable, match="token cannot be read"):
        operator.store(pod).read()


def test_pod_of_a_job_with_another_backend_is_refused(operator: OperatorServer) -> None:
    job = operator.create_job(f"job-{uuid.uuid4().hex}", backend="c10d")
    with pytest.raises(StoreRefused, match=r"has rendezvous\.backend c10d"):
        operator.store(operator.create_pod(job, 0)).compare_and_swap(0, encode(EMPTY))
    assert operator.published(job.metadata.name) == 0


# --- hostile senders


def send(
    operator: OperatorServer, pod: Pod, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", operator.replicas[0].port, timeout=30)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {pod.token}", **(headers or {})})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status == 404 or "reason" in json.loads(text or b"{}"), text
        return answer.status
    finally:
        connection.close()


VERSION = {VERSION_HEADER: "VERSION"}  # the one that is there
TTL = {TTL_HEADER: "3"}
BODIES: list[tuple[str, str, bytes, dict[str, str], int]] = [
    ("PUT", DOCUMENT_PATH, b"", VERSION, 400),
    ("PUT", DOCUMENT_PATH, b"[" * 100_000, VERSION, 400),
    ("PUT", DOCUMENT_PATH, b"{}", VERSION, 400),
    ("PUT", DOCUMENT_PATH, encode(EMPTY).decode().encode("utf-16"), VERSION, 400),
    ("PUT", DOCUMENT_PATH, encode(EMPTY), {}, 400),
    ("PUT", DOCUMENT_PATH, encode(EMPTY), {VERSION_HEADER: "-1"}, 400),
    ("PUT", DOCUMENT_PATH, encode(EMPTY), {VERSION_HEADER: "9" * 5000}, 400),
    ("PUT", DOCUMENT_PATH, encode(EMPTY), {VERSION_HEADER: "9" * 15}, 412),
    ("PUT", DOCUMENT_PATH, encode(replace(EMPTY, round=0)).replace(b'"round":0', b'"round":-1'), VERSION, 400),
    ("PUT", DOCUMENT_PATH, b" " * (MAX_BYTES + 1), VERSION, 413),
    ("PUT", PRESENCE_PATH + "/b", b" " * (MAX_JOIN_REQUEST_BYTES + 1), TTL, 413),
    ("PUT", PRESENCE_PATH + "/b", b"{}", TTL, 400),
    ("PUT", PRESENCE_PATH + "/b", join_request("c"), TTL, 400),
    ("PUT", PRESENCE_PATH + "/b", join_request("b", 1), TTL, 403),
    ("PUT", PRESENCE_PATH + "/b", join_request("b"), {}, 400),
    ("PUT", PRESENCE_PATH + "/b", join_request("b"), {TTL_HEADER: "nan"}, 400),
    ("PUT", PRESENCE_PATH + "/b", join_request("b"), {TTL_HEADER: "1e9"}, 400),
    *(
        ("PUT", PRESENCE_PATH + "/b", join_request("b"), {TTL_HEADER: text}, 400)
        for text in ("inf", "1e999", "-inf", "9" * 5000, "1e1" + "0" * 40)
    ),
    *(
        (method, DOCUMENT_PATH + query, encode(EMPTY) if method == "PUT" else b"", headers, 400)
        for text in (str(2**63), str(10**19), str(10**400), "9" * 5000, "1e999", "inf", "nan", "٣")
        for method, query, headers in (
            ("GET", f"?version={quote(text)}", {}),
            ("GET", f"?version=1&lapses={quote(text)}", {}),
            ("GET", f"?version=1&lapses={quote(text)}&wait=1", {}),
            ("PUT", "", {VERSION_HEADER: text}),
        )
        if method == "GET" or text.isascii()
    ),
    *(("GET", f"{DOCUMENT_PATH}?version=1&lapses=1&wait={text}", b"", {}, 400) for text in ("inf", "nan", "1e999")),
    ("PUT", PRESENCE_PATH + "/" + "b" * 65, join_request("b"), TTL, 400),
    ("PUT", PRESENCE_PATH + "/b%2Fc", join_request("b"), TTL, 400),
    ("PUT", PRESENCE_PATH + "/../report", join_request("b"), TTL, 404),
    ("GET", DOCUMENT_PATH + "?version=x", b"", {}, 400),
    ("GET", DOCUMENT_PATH + "?version=1&lapses=-2&wait=1", b"", {}, 400),
    ("GET", DOCUMENT_PATH + "?version=1&lapses=1&wait=soon", b"", {}, 400),
    ("POST", PRESENCE_PATH + "/nobody", b"", {}, 410),
]


@pytest.mark.parametrize(("method", "path", "body", "headers", "status"), BODIES)
def test_request_that_makes_no_sense_gets_a_4xx_and_nothing_changes(
    operator: OperatorServer, method: str, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    job = operator.create_job(f"job-{uuid.uuid4().hex}")
    pod = operator.create_pod(job, 0)
    store = operator.store(pod)
    store.compare_and_swap(0, encode(EMPTY))
    store.announce("a", join_request("a"), 30.0)
    until(lambda: (document := store.read().document) is not None and decode(document).joining)
    before = store.read()
    found = {name: str(before.version) if value == "VERSION" else value for name, value in headers.items()}
    assert send(operator, pod, method, path, body, found) == status
    assert store.read() == before
    assert set(store.present()) == {"a"}
    assert operator.published(job.metadata.name) == 0


def test_watches_of_one_pod_are_few_and_the_newest(operator: OperatorServer) -> None:
    pod = operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}"), 0)
    found = operator.calls(pod).call("GET", DOCUMENT_PATH, expect=(200, 204), limit=MAX_BYTES)
    path = f"{DOCUMENT_PATH}?version=0&lapses={found.headers[EXPIRATIONS_HEADER]}&wait=30"
    ended: list[int] = []

    def answered() -> bool:
        """As agents do, call again where nobody leads: for a moment, behind a standstill of the machine."""
        try:
            reply = operator.calls(pod).call("GET", path, expect=(200, 304), limit=MAX_BYTES, reply=60)
        except StoreUnavailable:
            return False
        ended.append(reply.status)
        return True

    def watch() -> None:
        until(answered)

    began = time.monotonic()
    threads = [threading.Thread(target=watch, daemon=True) for _ in range(12)]
    for thread in threads:
        thread.start()
    until(lambda: len(ended) == 4)
    assert time.monotonic() - began < 20
    operator.store(pod).compare_and_swap(0, encode(EMPTY))
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(ended) == [200] * 8 + [304] * 4


# --- redirects that mean no good


class Redirector:
    """An HTTP server that answers everything with one redirect, and keeps what it was told."""

    def __init__(self) -> None:
        self.location, self.status = "", 307
        self.tokens: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.tokens.append(self.headers.get("Authorization", ""))
                self.send_response(outer.status)
                self.send_header("Location", outer.location.replace("PATH", self.path))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(LIMIT)


@pytest.fixture
def redirector() -> Iterator[Callable[[], Redirector]]:
    made: list[Redirector] = []

    def make() -> Redirector:
        made.append(Redirector())
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.mark.parametrize(
    "location",
    [
        "", "/", "PATH", "TARGET", "TARGET/other", "TARGET/elsewherePATH", "TARGETPATH?more=1", "ftp://TARGET-HOSTPATH",
        "https://TARGET-HOSTPATH", "http://user:pass@TARGET-HOSTPATH", "http://127.0.0.1PATH", "http://:80PATH",
        "http://127.0.0.1:99999PATH", "//TARGET-HOSTPATH",
    ],
)  # fmt: skip
def test_redirect_to_anything_but_the_same_path_is_not_followed_and_the_token_kept(
    operator: OperatorServer, redirector: Callable[[], Redirector], location: str
) -> None:
    evil, target = redirector(), redirector()
    evil.location = location.replace("TARGET-HOST", urlsplit(target.url).netloc).replace("TARGET", target.url)
    pod = operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}"), 0)
    with pytest.raises(StoreUnavailable, match="redirects to") as refused:
        operator.store(pod, evil.url).read()
    assert pod.token not in str(refused.value)
    assert target.tokens == []


@pytest.mark.parametrize("status", [301, 302, 303, 308])
def test_redirect_of_another_kind_is_not_followed(
    operator: OperatorServer, redirector: Callable[[], Redirector], status: int
) -> None:
    evil, target = redirector(), redirector()
    evil.location, evil.status = target.url + "PATH", status
    pod = operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}"), 0)
    with pytest.raises(StoreUnavailable, match=str(status)):
        operator.store(pod, evil.url).read()
    assert target.tokens == []


def test_leader_that_names_another_leader_is_not_followed(
    operator: OperatorServer, redirector: Callable[[], Redirector]
) -> None:
    service, stale, target = redirector(), redirector(), redirector()
    service.location, stale.location = stale.url + "PATH", target.url + "PATH"
    pod = operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}"), 0)
    with pytest.raises(StoreUnavailable, match="not settled"):
        operator.store(pod, service.url).read()
    assert target.tokens == []


def test_what_a_remembered_leader_says_is_not_final(
    operator: OperatorServer, redirector: Callable[[], Redirector]
) -> None:
    """Its address may be another pod's by now, which knows nothing of us."""
    other = redirector()
    other.status = 404
    pod = operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}"), 0)
    calls = operator.calls(pod)
    calls._leader = other.url
    assert calls.call("GET", DOCUMENT_PATH, expect=(200, 204), limit=MAX_BYTES).status == 204
    assert (calls._leader, len(other.tokens)) == (None, 1)  # type: ignore[comparison-overlap]
    calls.close()


def test_answer_that_is_too_large_or_too_slow_is_given_up(operator: OperatorServer) -> None:
    pod = operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}"), 0)
    store = operator.store(pod)
    store.compare_and_swap(0, encode(EMPTY))
    with pytest.raises(StoreUnavailable, match="more than 10 bytes"):
        store._calls.call("GET", DOCUMENT_PATH, expect=(200, 204), limit=10)
    hasty = operator.calls(pod, limits=Limits(reply=0.2, tries=1))
    seen = store._calls.call("GET", DOCUMENT_PATH, expect=(200, 204), limit=MAX_BYTES).headers
    watch = f"{DOCUMENT_PATH}?version={seen[VERSION_HEADER]}&lapses={seen[EXPIRATIONS_HEADER]}&wait=9"
    with pytest.raises(StoreUnavailable, match="does not answer"):
        hasty.call("GET", watch, expect=(200, 304), limit=MAX_BYTES)


def test_server_that_is_no_operator_is_named_as_such(redirector: Callable[[], Redirector]) -> None:
    other = redirector()
    other.status = 404
    with pytest.raises(StoreUnavailable, match=r"404: .* no Everstep operator, or one of an older release"):
        OperatorCalls(other.url).call("GET", DOCUMENT_PATH, expect=(200, 204), limit=10)
    with pytest.raises(StoreUnavailable, match="unknown host"):
        OperatorCalls("http://no-such-host.invalid:1").call("GET", DOCUMENT_PATH, expect=(200, 204), limit=10)


def test_driver_that_is_refused_says_so_at_once(operator: OperatorServer) -> None:
    pod = operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}", backend="c10d"), 0)
    driver = Driver(operator.store(pod), Member(0, "a"), SIZES, QUICK)
    with pytest.raises(StoreRefused, match="c10d"):
        driver.join(LIMIT)
    driver.stop()
