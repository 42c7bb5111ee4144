"""What answers in the operator's place for a moment: an operator that starts, a proxy, another pod with its address.

None of it ends a worker. It is an outage: agents ask again until the operator itself answers, whatever it says then.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from everstep.contract.document import Document, JoinRequest, Member, Sizes, encode
from everstep.contract.rounds import PRESENCE_PATH
from everstep.membership.backends.etcd import EtcdStore
from everstep.membership.backends.etcd_http import Access, Gateway
from everstep.membership.backends.etcd_http import Limits as EtcdLimits
from everstep.membership.backends.operator_store import HttpStore
from everstep.membership.driver import Driver
from everstep.membership.errors import StoreRefused, StoreUnavailable
from everstep.membership.world_state import Whole
from everstep_operator.kube.resources import PODS
from everstep_operator.main import JOBS
from everstep_operator.runtime.informers import EVERYWHERE
from support.rendezvous.agents import LIMIT, QUICK, until
from support.rendezvous.operator_server import OperatorServer, Pod
from support.rendezvous.strangers import STRANGERS, Stranger, answer

SIZES = Sizes(1, 1)


@pytest.fixture(params=list(STRANGERS))
def stranger(request: pytest.FixtureRequest) -> Iterator[Stranger]:
    made = Stranger(STRANGERS[request.param])
    yield made
    made.stop()


@pytest.fixture
def pod(operator: OperatorServer) -> Pod:
    return operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}"), 0)


@pytest.mark.long_but("200 with other JSON")
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
    assert driver.world_state() == Whole()
    driver.stop()


def test_no_call_takes_a_strangers_answer_for_the_operators(
    operator: OperatorServer, pod: Pod, stranger: Stranger
) -> None:
    store = operator.store(pod, stranger.url)
    join_request = JoinRequest(Member(0, "a"), 0, SIZES).encode()
    calls: list[Callable[[], object]] = [
        store.read,
        store.present,
        lambda: store.compare_and_swap(1, encode(Document(SIZES))),
        lambda: store.announce("a", join_request, 3.0),
    ]
    if stranger.says != STRANGERS["204 of another server"]:  # an operator says no more than that to these
        calls += [lambda: store.renew("a"), lambda: store.withdraw("a")]
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
    operators.loop.call_soon_threadsafe(caches.jobs.of(EVERYWHERE)._cache._drop, job.key)
    until(lambda: caches.jobs.get(*job.key) is None)
    store: HttpStore = operators.store(pod)
    with pytest.raises(StoreUnavailable, match=r"503: .*TrainingJob digits is not known at the moment"):
        store.read()
    operators.do(operators.client.patch_status(JOBS, "default", "digits", {"reason": "seen again"}))
    assert until(lambda: caches.jobs.get(*job.key))
    assert store.read().version == 0
    assert operators.do(operators.client.get(PODS, "default", pod.name)).metadata.uid == pod.uid
