"""What answers in the operator's place for a moment: an operator that starts, a proxy, another pod with its address.

None of it ends a worker. It is an outage: agents ask again until the operator itself answers, whatever it says then.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from agents import LIMIT, QUICK, until
from operator_server import OperatorServer, Pod

from everstep.contract.document import Document, Member, Sizes, Wish, encode
from everstep.contract.rounds import LAPSES_HEADER, PRESENCE_PATH, VERSION_HEADER
from everstep.rendezvous.driver import Driver
from everstep.rendezvous.errors import StoreRefused, StoreUnavailable
from everstep.rendezvous.etcd import EtcdStore
from everstep.rendezvous.etcd_http import Access, Gateway
from everstep.rendezvous.etcd_http import Limits as EtcdLimits
from everstep.rendezvous.http import HttpStore
from everstep.rendezvous.participant import Whole
from everstep_operator.kube.resources import PODS
from everstep_operator.main import JOBS

SIZES = Sizes(1, 1)
HTML = b"<html><body>It works!</body></html>"
STATUS = json.dumps({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden"}).encode()


def answer(status: int, body: bytes = b"", *, kind: str = "text/html", headers: str = "", cut: int = 0) -> bytes:
    """A response; the last `cut` bytes of it are never sent."""
    lines = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    lines += f"Connection: close\r\n{headers}\r\n"
    return (lines.encode() + body)[: -cut or None]


SEEN = f"{VERSION_HEADER}: 7\r\n{LAPSES_HEADER}: 0\r\n"
STRANGERS = {
    "404 of a server that knows no such path": answer(404, b"404: Not Found", kind="text/plain"),
    "404 of an API server": answer(404, STATUS, kind="application/json"),
    "403 of an API server": answer(403, STATUS, kind="application/json"),
    "403 of a firewall": answer(403, HTML),
    "401 of a proxy": answer(401, HTML, headers="WWW-Authenticate: Basic\r\n"),
    "400 of a server that wants TLS": answer(400, b"Client sent an HTTP request to an HTTPS server."),
    "405": answer(405),
    "421": answer(421),
    "451": answer(451, HTML),
    "redirect to a login page": answer(302, headers="Location: http://127.0.0.1:9/login\r\n"),
    "redirect to another scheme": answer(307, headers="Location: https://127.0.0.1:9/v1\r\n"),
    "redirect to nowhere": answer(307),
    "500 of a proxy": answer(500, HTML),
    "502 of a proxy": answer(502, HTML),
    "503 without a word": answer(503),
    "200 with a page": answer(200, HTML),
    "200 with other JSON": answer(200, b'{"status": "ok"}', kind="application/json"),
    "201": answer(201, b"{}", kind="application/json"),
    "204 of another server": answer(204),
    "document that is cut off": answer(
        200, encode(Document(SIZES)), kind="application/json", headers=SEEN, cut=len(encode(Document(SIZES))) // 2
    ),
    "body that is much too long": answer(200, b"x" * 2_000_000),
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "nothing": b"",
}


class Stranger:
    """Answers each request with the same bytes and closes, until it is told where the operator is."""

    def __init__(self, says: bytes) -> None:
        self.says, self.asked = says, 0
        self.operator = ""  # sent there, from then on
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LIMIT)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                guest, _ = self._listener.accept()
                with guest, contextlib.suppress(OSError):
                    guest.settimeout(LIMIT)
                    self._answer(guest)

    def _answer(self, guest: socket.socket) -> None:
        with guest.makefile("rb") as file:
            path = file.readline().split(b" ")[1].decode()
            headers = dict(line.lower().split(b": ", 1) for line in iter(file.readline, b"\r\n"))
            file.read(int(headers.get(b"content-length", b"0")))
        self.asked += 1
        location = f"Location: {self.operator}{path}\r\n"
        guest.sendall(answer(307, headers=location) if self.operator else self.says)


@pytest.fixture(params=list(STRANGERS))
def stranger(request: pytest.FixtureRequest) -> Iterator[Stranger]:
    made = Stranger(STRANGERS[request.param])
    yield made
    made.stop()


@pytest.fixture
def pod(operator: OperatorServer) -> Pod:
    return operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}"), 0)


def test_agent_that_joins_waits_for_the_operator_itself(operator: OperatorServer, pod: Pod, stranger: Stranger) -> None:
    away = replace(QUICK.away, most=0.05)
    driver = Driver(operator.store(pod, stranger.url), Member(0, "a"), SIZES, replace(QUICK, away=away))
    found: list[object] = []

    def join() -> None:
        try:
            found.append(driver.join(LIMIT).number)
        except Exception as e:  # shown by the assertion
            found.append(e)

    thread = threading.Thread(target=join)
    thread.start()
    until(lambda: stranger.asked >= 6 or found)
    assert found == []
    stranger.operator = operator.replicas[0].url
    thread.join(LIMIT)
    assert found == [1]
    assert driver.standing() == Whole()
    driver.stop()


def test_no_call_takes_a_strangers_answer_for_the_operators(
    operator: OperatorServer, pod: Pod, stranger: Stranger
) -> None:
    store = operator.store(pod, stranger.url)
    wish = Wish(Member(0, "a"), 0, SIZES).encode()
    calls: list[Callable[[], object]] = [
        store.read,
        store.present,
        lambda: store.compare_and_swap(1, encode(Document(SIZES))),
    ]
    if stranger.says != STRANGERS["204 of another server"]:  # an operator says no more than that to these
        calls += [lambda: store.renew("a"), lambda: store.withdraw("a"), lambda: store.announce("a", wish, 3.0)]
    for call in calls:
        with pytest.raises(StoreUnavailable):
            call()


def test_no_call_takes_a_strangers_answer_for_etcds(stranger: Stranger) -> None:
    store = EtcdStore(Gateway((stranger.url,), limits=EtcdLimits(rounds=1)), "job")
    calls: list[Callable[[], object]] = [
        store.read,
        store.present,
        lambda: store.compare_and_swap(1, encode(Document(SIZES))),
        lambda: store.announce("a", b"{}", 3.0),
    ]
    named = Gateway((stranger.url,), Access(user="u", password="p"), EtcdLimits(rounds=1))
    calls.append(EtcdStore(named, "job").read)
    for call in calls:
        with pytest.raises(StoreUnavailable):
            call()
    store.close()
    named.close()


def test_refusal_of_the_operator_itself_is_final(operator: OperatorServer) -> None:
    other = operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}", backend="c10d"), 0)
    with pytest.raises(StoreRefused, match=r"403: .*c10d"):
        operator.store(other).read()


def test_presence_of_the_job_is_not_read_from_a_list_of_something_else(pod: Pod, operator: OperatorServer) -> None:
    for body in (b'{"a": 1}', b'{"a": "up"}', b"[]", b"1", b"[" * 100_000):
        stranger = Stranger(answer(200, body, kind="application/json"))
        with pytest.raises(StoreUnavailable):
            operator.store(pod, stranger.url).present()
        stranger.stop()


# --- operators that are not ready


def test_operator_that_starts_says_so_and_when_to_ask_again(operators: OperatorServer) -> None:
    first = operators.start()
    until(lambda: operators.leads(first))
    pod = operators.create_pod(operators.create_job(), 0)
    port = first.port
    operators.kill(first)
    second = operators.start(port, cut=True)
    store = operators.store(pod, second.url)
    with pytest.raises(StoreUnavailable, match=r"503: this replica starts: it waits for the first list of .*pods"):
        store.read()
    found = store._calls._own_pool().request("POST", second.url + PRESENCE_PATH + "/a", retries=False)
    assert (found.status, found.headers["Retry-After"]) == (503, "1")


def test_pod_whose_job_is_not_known_yet_is_asked_to_come_again(operators: OperatorServer) -> None:
    """The list of jobs and the list of pods that an operator starts with are of different moments."""
    replica = operators.start()
    until(lambda: operators.leads(replica))
    job = operators.create_job()
    pod = operators.create_pod(job, 0)
    caches = replica.operator.caches
    until(lambda: caches.pods.get("default", pod.name) is not None)
    kept = caches.jobs.get(*job.key)
    assert kept is not None
    operators.loop.call_soon_threadsafe(caches.jobs._cache._drop, job.key)
    until(lambda: caches.jobs.get(*job.key) is None)
    store: HttpStore = operators.store(pod)
    with pytest.raises(StoreUnavailable, match=r"503: .*TrainingJob digits is not known at the moment"):
        store.read()
    operators.do(operators.client.patch_status(JOBS, "default", "digits", {"reason": "seen again"}))
    assert until(lambda: caches.jobs.get(*job.key))
    assert store.read().version == 0
    assert operators.do(operators.client.get(PODS, "default", pod.name)).metadata.uid == pod.uid
