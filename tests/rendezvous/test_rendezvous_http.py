"""The operator's round store over HTTP: what every store promises, whose presence is whose, dead pods, settings."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from everstep.contract import env
from everstep.contract.document import Document, JoinRequest, Member, Sizes, decode, encode
from everstep.membership.backends.configuration import ConfigurationInvalid, read_operator
from everstep.membership.backends.operator_calls import OperatorCalls
from everstep.membership.backends.operator_store import HttpStore
from everstep.membership.driver import Driver
from everstep.membership.errors import StoreRefused
from everstep.membership.store import View
from everstep.membership.world_state import Broken, Whole
from everstep_operator.kube.resources import NODES, PODS
from everstep_operator.kube.wire import Unstructured
from support.rendezvous.agents import LIMIT, QUICK, until
from support.rendezvous.operator_server import NAMESPACE, OperatorServer, Pod

SIZES = Sizes(1, 3)
EMPTY = Document(SIZES)


def join_request(agent: str, index: int = -1, incarnation: int = 0) -> bytes:
    return JoinRequest(Member(index, agent, incarnation), 0, SIZES).encode()


@pytest.fixture
def job(operator: OperatorServer) -> Unstructured:
    return operator.create_job(f"job-{uuid.uuid4().hex}")


@pytest.fixture
def pod(operator: OperatorServer, job: Unstructured) -> Pod:
    return operator.create_pod(job, 0)


@pytest.fixture
def store(operator: OperatorServer, pod: Pod) -> Iterator[HttpStore]:
    made = operator.store(pod)
    yield made
    made.close()


# --- what a store promises


def test_of_two_writers_of_one_version_one_wins(store: HttpStore) -> None:
    assert (store.read().document, store.read().version) == (None, 0)
    first = store.compare_and_swap(0, encode(EMPTY))
    assert first is not None
    assert store.compare_and_swap(0, encode(replace(EMPTY, restarts=1))) is None
    assert (store.read().document, store.read().version) == (encode(EMPTY), first)
    second = store.compare_and_swap(first, encode(replace(EMPTY, restarts=2)))
    assert second is not None
    assert second > first


@pytest.mark.long
def test_many_writers_at_once_lose_no_write(operator: OperatorServer, job: Unstructured) -> None:
    operator.store(operator.create_pod(job, 9)).compare_and_swap(0, encode(EMPTY))

    def count(index: int) -> None:
        store = operator.store(operator.create_pod(job, index))
        for _ in range(10):
            while True:
                view = store.read()
                assert view.document is not None
                document = decode(view.document)
                more = encode(replace(document, restarts=document.restarts + 1))
                if store.compare_and_swap(view.version, more) is not None:
                    break

    threads = [threading.Thread(target=count, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    held = operator.store(operator.create_pod(job, 8)).read().document
    assert held is not None
    assert decode(held).restarts == 50


def test_a_watch_sees_changes_and_expirations_but_not_arrivals(
    operator: OperatorServer, job: Unstructured, store: HttpStore
) -> None:
    other = operator.store(operator.create_pod(job, 1))
    seen = until(lambda: (view := store.watch(View(None, 0, -1), 1.0)).expirations >= 0 and view)
    closed = encode(replace(EMPTY, closed="over"))  # into which the operator writes no join request
    version = other.compare_and_swap(0, closed)
    assert version is not None
    seen = store.watch(seen, LIMIT)
    assert seen == View(closed, version, seen.expirations)
    other.announce("a", join_request("a"), 60.0)
    assert store.watch(seen, 0.3) == seen
    other.withdraw("a")
    assert store.watch(seen, LIMIT) == View(closed, version, seen.expirations + 1)


def test_presence_lasts_while_it_is_renewed_and_ends_with_its_lease(store: HttpStore) -> None:
    store.announce("a", join_request("a"), 2.0)
    store.announce("b", join_request("b"), 2.0)
    store.announce("a", join_request("a", 0), 2.0)
    until(lambda: store.renew("a") and set(store.present()) == {"a"})
    assert store.present() == {"a": join_request("a", 0)}
    assert not store.renew("b")


def test_jobs_do_not_see_each_other(operator: OperatorServer) -> None:
    stores = []
    for _ in range(3):
        job = operator.create_job(f"job-{uuid.uuid4().hex}")
        stores.append(operator.store(operator.create_pod(job, 0)))
    for i, one in enumerate(stores):
        assert one.compare_and_swap(0, encode(replace(EMPTY, restarts=i))) is not None
        one.announce(f"agent{i}", join_request(f"agent{i}"), 60.0)
    for i, one in enumerate(stores):
        document = one.read().document
        assert document is not None
        assert decode(document).restarts == i
        assert set(one.present()) == {f"agent{i}"}


def test_an_answer_that_comes_late_does_not_turn_a_view_back(store: HttpStore) -> None:
    store.read()
    early = store._known()
    version = store.compare_and_swap(0, encode(EMPTY))
    assert version is not None
    now = store._merge(View(None, 0, early.counted + 3), early)
    assert now == View(encode(EMPTY), version, now.expirations)
    later = store._merge(View(None, 0, early.counted + 2), early)
    assert later == now, "a count that was on its way before a larger one came"


def test_document_that_comes_after_there_was_none_is_newer_though_its_version_is_smaller(store: HttpStore) -> None:
    version = store.compare_and_swap(0, encode(EMPTY))
    seen = store.read()
    assert version is not None
    none = store._merge(View(None, 0, store._counted), store._known())
    fresh = store._merge(View(encode(EMPTY), version - 1, store._counted), store._known())
    assert (none.document, fresh.document) == (None, encode(EMPTY))
    assert seen.edition < none.edition < fresh.edition


# --- whose presence it is


def test_a_presence_belongs_to_the_pod_that_announced_it(
    operator: OperatorServer, job: Unstructured, store: HttpStore
) -> None:
    store.announce("a", join_request("a"), 30.0)
    other = operator.store(operator.create_pod(job, 1))
    for attempt in (
        lambda: other.renew("a"),
        lambda: other.withdraw("a"),
        lambda: other.announce("a", join_request("a"), 30.0),
    ):
        with pytest.raises(StoreRefused, match="belongs to another pod"):
            attempt()
    assert store.renew("a")


def test_an_agent_cannot_announce_another_worker_or_an_older_life_of_it(
    operator: OperatorServer, job: Unstructured
) -> None:
    store = operator.store(operator.create_pod(job, 1, incarnation=2))
    store.announce("a", join_request("a", 1, 2), 30.0)
    for index, incarnation in ((0, 2), (1, 1), (1, 3)):
        with pytest.raises(StoreRefused, match="announces worker"):
            store.announce("b", join_request("b", index, incarnation), 30.0)
    assert set(store.present()) == {"a"}


def test_a_pod_has_a_few_agents_and_not_thousands(store: HttpStore) -> None:
    names = [f"a{i}" for i in range(8)]
    for name in names:
        store.announce(name, join_request(name), 30.0)
    with pytest.raises(Exception, match="8 of them of this pod"):
        store.announce("one-more", join_request("one-more"), 30.0)
    assert set(store.present()) == set(names)


# --- pods that die


class Trio:
    """Three linked-by-nothing agents with leases of a minute: only the operator can tell them of a death in time."""

    def __init__(self, operator: OperatorServer, job: Unstructured) -> None:
        self.pods = [operator.create_pod(job, i, node=f"{job.metadata.name}-{i}") for i in range(3)]
        settings = replace(QUICK, patience=replace(QUICK.patience, last_call=LIMIT), ttl=60.0)
        self.drivers = [
            Driver(operator.store(pod), Member(pod.index, f"agent-{pod.index}"), Sizes(2, 3), settings)
            for pod in self.pods
        ]
        threads = [threading.Thread(target=driver.join, args=(LIMIT,)) for driver in self.drivers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert [driver.world_state() for driver in self.drivers] == [Whole()] * 3

    def assert_missed(self, index: int) -> None:
        began = time.monotonic()
        for driver in (d for i, d in enumerate(self.drivers) if i != index):
            world_state = driver.wait(LIMIT)
            assert isinstance(world_state, Broken)
            assert f"agent-{index} is gone" in world_state.why
        took = time.monotonic() - began
        print(f"told after {took * 1000:.0f} ms")
        assert took < 20  # a third of the lease, on a machine that does much else

    def stop(self) -> None:
        for driver in self.drivers:
            driver.stop()


@pytest.fixture
def trio(operator: OperatorServer, job: Unstructured) -> Iterator[Trio]:
    made = Trio(operator, job)
    yield made
    made.stop()


def test_a_pod_that_is_deleted_is_missed_at_once_and_its_token_is_refused(operator: OperatorServer, trio: Trio) -> None:
    operator.delete_pod(trio.pods[1])
    trio.assert_missed(1)
    with pytest.raises(StoreRefused):
        operator.store(trio.pods[1]).announce("agent-1", join_request("agent-1", 1), 30.0)


def test_a_pod_that_failed_is_missed_at_once_and_may_not_come_back(operator: OperatorServer, trio: Trio) -> None:
    operator.set_pod(trio.pods[0], {"phase": "Failed"})
    trio.assert_missed(0)
    with pytest.raises(StoreRefused, match="has ended"):
        operator.store(trio.pods[0]).read()


def test_a_worker_container_that_ended_is_missed_though_its_pod_goes_on(operator: OperatorServer, trio: Trio) -> None:
    ended = {"name": "worker", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    operator.set_pod(trio.pods[2], {"phase": "Running", "containerStatuses": [ended]})
    trio.assert_missed(2)


def test_a_node_that_is_lost_takes_its_agents_with_it(operator: OperatorServer, trio: Trio, job: Unstructured) -> None:
    node = f"{job.metadata.name}-1"
    operator.set_node(node, True)
    operator.set_node(node, False)  # of a silent node the agents themselves tell more: ADR 0041
    operator.do(operator.client.delete(NODES, None, node))
    trio.assert_missed(1)
    # It only seemed lost: its agent says so itself, and is taken in again.
    assert trio.drivers[1]._store.renew("agent-1") is False


def test_a_pod_that_is_asked_to_end_keeps_its_presence_until_it_has(operator: OperatorServer, trio: Trio) -> None:
    operator.do(operator.client.delete(PODS, NAMESPACE, trio.pods[1].name, grace_seconds=300))
    time.sleep(0.3)
    assert trio.drivers[0].world_state() == Whole()
    assert operator.store(trio.pods[1]).renew("agent-1")  # it saves, and leaves by itself


# --- settings

PODS_OWN = {env.REPORT_URL: "http://everstep.everstep-system.svc/v1/report", env.TOKEN_FILE: "/var/run/token"}


@pytest.mark.parametrize(
    ("endpoint", "config", "url", "token"),
    [
        ("", {}, "http://everstep.everstep-system.svc:80", "/var/run/token"),
        ("operator", {}, "http://operator:8080", "/var/run/token"),
        ("operator:1", {"token_file": "t"}, "http://operator:1", "t"),
        ("https://[::1]", {}, "https://[::1]:443", "/var/run/token"),
        ("operator:1", {"ca_file": "c"}, "https://operator:1", "/var/run/token"),
    ],
)
def test_settings_default_to_what_the_operator_told_the_pod(
    endpoint: str, config: dict[str, str], url: str, token: str
) -> None:
    settings = read_operator(config, endpoint, PODS_OWN)
    assert (settings.urls, settings.token_file) == ((url,), token)


@pytest.mark.parametrize(
    ("endpoint", "config", "environ", "named"),
    [
        ("", {}, {}, "--rdzv-endpoint is missing"),
        ("a:1", {}, {}, "token_file is missing"),
        ("a:1", {"password_file": "x"}, PODS_OWN, "password_file: no such key"),
        ("a:1", {"token_fil": "x"}, PODS_OWN, "token_fil: no such key; did you mean token_file"),
        ("a:1", {"ttl": "1"}, PODS_OWN, "ttl=1"),
        ("ftp://a", {}, PODS_OWN, "host"),
        ("http://a/path", {}, PODS_OWN, "host"),
        ("a:99999", {}, PODS_OWN, "--rdzv-endpoint"),
    ],
)
def test_settings_that_are_wrong_are_refused_by_name(
    endpoint: str, config: dict[str, str], environ: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigurationInvalid, match=named):
        read_operator(config, endpoint, environ)


def test_certificates_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match=r"nowhere\.pem"):
        OperatorCalls("https://127.0.0.1:1", "", str(tmp_path / "nowhere.pem"))
