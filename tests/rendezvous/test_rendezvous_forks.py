"""A child that is forked while threads of its parent speak with the store: a training process is one."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator

import pytest

from everstep.contract.document import Document, JoinRequest, Member, Sizes, encode
from everstep.membership.backends.etcd import EtcdStore
from everstep.membership.backends.etcd_http import Gateway
from everstep.membership.backends.operator_store import HttpStore
from everstep.membership.store import View
from support.rendezvous.agents import LIMIT, until
from support.rendezvous.etcd_server import EtcdCluster
from support.rendezvous.operator_server import OperatorServer

# The operator writes no join request into it.
CLOSED = encode(Document(Sizes(1, 3), closed="over"))
CHILDREN = 5

Store = EtcdStore | HttpStore


@pytest.fixture
def etcd_store(etcd: EtcdCluster) -> Iterator[EtcdStore]:
    made = EtcdStore(Gateway(etcd.urls), f"job-{uuid.uuid4().hex}")
    yield made
    made.close()


@pytest.fixture
def operator_store(operator: OperatorServer) -> HttpStore:
    return operator.store(operator.create_pod(operator.create_job(f"job-{uuid.uuid4().hex}"), 0))


@pytest.mark.parametrize("backend", ["etcd_store", "operator_store"])
def test_a_forked_child_uses_connections_of_its_own(request: pytest.FixtureRequest, backend: str) -> None:
    store: Store = request.getfixturevalue(backend)
    version = store.compare_and_swap(0, CLOSED)
    assert version is not None
    until(lambda: store.watch(View(None, 0), 1.0).version == version)
    busy = threading.Event()

    def hammer() -> None:
        while not busy.wait(0.001):
            store.read()

    threads = [threading.Thread(target=hammer) for _ in range(4)]  # some lock is held at any moment
    for thread in threads:
        thread.start()
    children = []
    for i in range(CHILDREN):
        pid = os.fork()
        if pid == 0:
            os._exit(child(store, i, version))
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * CHILDREN
    busy.set()
    for thread in threads:
        thread.join(LIMIT)
    assert store.read().document == CLOSED
    assert set(store.present()) == {f"child-{i}" for i in range(CHILDREN)}


def child(store: Store, i: int, version: int) -> int:
    """Exit code: 0 if all calls did in the child what they do in the parent."""
    try:
        signal.alarm(60)
        mine = store.read()
        store.announce(f"child-{i}", JoinRequest(Member(-1, f"child-{i}"), 0, Sizes(1, 3)).encode(), 60.0)
        seen = store.watch(View(None, 0), 10.0)
        written = store.compare_and_swap(version + 1, CLOSED)  # it is of another version
    except BaseException:  # whatever it is: the parent's test must not go on in the child
        return 1
    return 0 if mine.document == CLOSED and seen.version >= version and written is None else 2
