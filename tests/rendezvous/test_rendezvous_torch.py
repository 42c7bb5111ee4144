"""What PyTorch's own tests expect of a rendezvous handler, held to ours over the operator's store and over etcd.

The situations are those of pytorch's `dynamic_rendezvous_test.py`, `c10d_rendezvous_backend_test.py` and
`out_of_tree_rendezvous_test.py`, for handlers as torchrun makes them, and real stores. Where ours does otherwise on
purpose, the test says why.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from everstep.contract import env
from everstep.contract.document import Document, decode
from everstep.membership.backends.configuration import ConfigurationInvalid
from support.rendezvous.agents import LIMIT, until
from support.rendezvous.etcd_server import EtcdCluster
from support.rendezvous.operator_server import OperatorServer
from support.rendezvous.torch_handlers import Handlers

pytestmark = pytest.mark.timeout(240)
OURS = {"everstep-rounds-watch", "everstep-present", "everstep-rendezvous", "everstep-listener"}
STORES = ["everstep", "etcd-v3"]


@pytest.fixture(params=STORES)
def handlers(request: pytest.FixtureRequest) -> Iterator[Handlers]:
    server = request.getfixturevalue("operator" if request.param == "everstep" else "etcd")
    made = Handlers(request.param, server)
    yield made
    made.close()


@pytest.fixture(params=STORES)
def alone(request: pytest.FixtureRequest) -> Iterator[Handlers]:
    """With a store that no other test needs."""
    if request.param == "everstep":
        server: OperatorServer = request.getfixturevalue("operators")
        replica = server.start()
        until(lambda: server.leads(replica))
        made = Handlers(request.param, server)
        yield made
        made.close()
        return
    cluster = EtcdCluster(request.getfixturevalue("etcd_folder"), 1)
    cluster.start()
    made = Handlers(request.param, cluster)
    yield made
    made.close()
    cluster.stop()


def document(handlers: Handlers) -> Document:
    data = handlers.store().read().document
    assert data is not None
    return decode(data)


def waiting(handlers: Handlers) -> Callable[[int], Any]:
    """Wait until so many agents wait for a round."""
    store = handlers.store()

    def wait(count: int) -> None:
        def found() -> bool:
            data = store.read().document
            return data is not None and len(decode(data).joining) == count

        until(found)

    return wait


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in OURS]


# --- what a handler is made of


def test_a_handler_knows_its_backend_and_its_run(handlers: Handlers) -> None:
    for sizes in ((2, 3), (3, 3)):
        made = handlers.make(*sizes)
        assert (made.get_backend(), made.get_run_id()) == (handlers.backend, handlers.run_id)


def test_a_run_without_a_name_is_refused(etcd: EtcdCluster) -> None:
    """Over etcd. With the operator's store the job is that of the pod's token, whatever the name."""
    unnamed = Handlers("etcd-v3", etcd)
    unnamed.run_id = ""
    with pytest.raises(ValueError, match="--rdzv-id is empty"):
        unnamed.make()


def test_sizes_that_cannot_be_are_refused(handlers: Handlers) -> None:
    for low, high in ((0, 1), (-10, 1), (3, 2)):
        with pytest.raises(ValueError, match="nodes"):
            handlers.make(low, high)
    with pytest.raises(ConfigurationInvalid, match="--nnodes and --rdzv-conf allowed: allowed sizes"):
        handlers.make(2, 3, allowed="5")


@pytest.mark.parametrize("key", ["join_timeout", "close_timeout"])
def test_times_that_are_not_positive_are_refused(handlers: Handlers, key: str) -> None:
    for value in ("0", "-1"):
        conf: dict[str, Any] = {key: value}
        with pytest.raises(ValueError, match=f"{key}={value}: a number of seconds"):
            handlers.make(**conf)


# --- joining


def test_all_agents_come_into_one_round_with_one_store(handlers: Handlers) -> None:
    infos = handlers.join(handlers.make(2, 2), handlers.make(2, 2))
    assert {info.rank for info in infos} == {0, 1}
    assert {info.world_size for info in infos} == {2}
    infos[0].store.set("from 0", b"a")  # type: ignore[arg-type]
    assert infos[1].store.get("from 0") == b"a"
    places = [(p.master_addr, p.master_port) for info in infos if (p := info.bootstrap_store_info)]
    assert len(places) == 2
    assert len(set(places)) == 1


def test_the_last_agent_has_the_next_rank_and_a_round_that_is_full_waits_for_nobody(handlers: Handlers) -> None:
    late = str(10 * LIMIT)
    first = [handlers.make(1, 3, last_call_timeout=late) for _ in range(2)]
    early = handlers.joining(*first)
    waiting(handlers)(2)
    last = handlers.make(1, 3, last_call_timeout=late)
    infos = [*handlers.join(last), *(future.result(LIMIT) for future in early)]
    assert {info.rank for info in infos} == {0, 1, 2}
    assert {info.world_size for info in infos} == {3}


def test_a_round_that_has_enough_agents_begins_after_the_last_call(handlers: Handlers) -> None:
    (info,) = handlers.join(handlers.make(1, 2, last_call_timeout="0.5"))
    assert (info.rank, info.world_size) == (0, 1)


@pytest.mark.long_but("everstep")
def test_one_agent_too_few_again_ends_the_last_call(handlers: Handlers) -> None:
    stays = handlers.make(2, 3, last_call_timeout="30")
    goes = handlers.make(2, 3, last_call_timeout="30", join_timeout="1")
    future, gone = handlers.joining(stays, goes)
    with pytest.raises(RendezvousTimeoutError):
        gone.result(LIMIT)
    waiting(handlers)(1)
    assert not future.done()
    infos = handlers.join(handlers.make(2, 3), handlers.make(2, 3))
    assert {info.rank for info in (*infos, future.result(LIMIT))} == {0, 1, 2}


def test_each_call_leads_into_the_next_round_with_a_store_of_its_own(
    handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.ROUND, "")  # and as it was, afterwards
    made = handlers.make()
    rounds = []
    for _ in range(4):
        (info,) = handlers.join(made)
        assert not info.store.check(["mine"])
        info.store.set("mine", b"1")  # type: ignore[arg-type]
        rounds.append(int(os.environ[env.ROUND]))
    assert rounds == list(range(rounds[0], rounds[0] + 4))


@pytest.mark.long
def test_nobody_waits_longer_than_asked_and_who_gave_up_is_not_waited_for(handlers: Handlers) -> None:
    gave_up = handlers.make(2, 3, join_timeout="1")
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 agents wait"):
        gave_up.next_rendezvous()
    assert document(handlers).joining == ()
    infos = handlers.join(handlers.make(2, 3), handlers.make(2, 3))
    assert {info.world_size for info in infos} == {2}
    # As torchrun does after that error. The others train on.
    try:
        raise RendezvousTimeoutError
    except RendezvousTimeoutError:
        gave_up.shutdown()
    assert document(handlers).closed is None


def test_a_member_that_joins_again_takes_the_others_with_it(handlers: Handlers) -> None:
    one, two = handlers.make(2, 2), handlers.make(2, 2)
    handlers.join(one, two)
    (again,) = handlers.joining(one)
    until(lambda: two.num_nodes_waiting() > 0)
    assert {info.rank for info in (*handlers.join(two), again.result(LIMIT))} == {0, 1}


@pytest.mark.long
def test_an_agent_that_is_too_many_waits_for_a_place_for_as_long_as_it_takes(handlers: Handlers) -> None:
    one, two = handlers.make(1, 2), handlers.make(1, 2)
    handlers.join(one, two)
    spare = handlers.make(1, 2, join_timeout="4")
    (future,) = handlers.joining(spare)
    waiting(handlers)(1)
    with pytest.raises(TimeoutError):
        future.result(8)  # twice as long as it has
    assert one.num_nodes_waiting() == 0, "and disturbs nobody"
    two._driver.leave()  # type: ignore[attr-defined]  # as if it was ended
    until(lambda: one.num_nodes_waiting() > 0)
    infos = [*handlers.join(one), future.result(LIMIT)]
    assert {(info.rank, info.world_size) for info in infos} == {(0, 2), (1, 2)}


def test_agents_that_died_are_missed_and_the_living_are_not(handlers: Handlers) -> None:
    one, two, dies = (handlers.make(1, 3, ttl="2") for _ in range(3))
    handlers.join(one, two, dies)
    dies._driver.stop()  # type: ignore[attr-defined]  # without a word
    until(lambda: one.num_nodes_waiting() > 0)
    infos = handlers.join(one, two)
    assert {(info.rank, info.world_size) for info in infos} == {(0, 2), (1, 2)}


@pytest.mark.long_but("everstep")
def test_a_round_of_which_nobody_is_left_is_followed_by_the_next(handlers: Handlers) -> None:
    dead = handlers.make(ttl="2")
    handlers.join(dead)
    dead._driver.stop()  # type: ignore[attr-defined]
    number = document(handlers).round
    handlers.join(handlers.make(ttl="2"))
    assert document(handlers).round > number


def test_the_processes_find_each_other_at_the_agents_own_address(handlers: Handlers) -> None:
    (info,) = handlers.join(handlers.make(local_addr="127.0.0.2"))
    assert info.bootstrap_store_info is not None
    assert info.bootstrap_store_info.master_addr == "127.0.0.2"


def test_what_no_agent_wrote_is_an_error_that_says_so(etcd: EtcdCluster, operator: OperatorServer) -> None:
    """The operator's store says it to torchrun's log, and goes on asking: somebody may delete the ConfigMap."""
    broken = Handlers("etcd-v3", etcd)
    store = broken.store()
    assert store.compare_and_swap(0, b"corrupt") is not None
    made = broken.make()
    for call in (made.next_rendezvous, made.is_closed, made.set_closed):
        with pytest.raises(RendezvousStateError, match="not JSON"):
            call()
    broken.close()


# --- waiting agents


@pytest.mark.long_but("everstep")
def test_agents_that_wait_are_counted_once_a_round_runs(handlers: Handlers) -> None:
    one, two = handlers.make(2, 4), handlers.make(2, 4)
    assert one.num_nodes_waiting() == 0, "there is no round yet"
    handlers.join(one, two)
    outside = handlers.make(2, 4)
    handlers.joining(handlers.make(2, 4), handlers.make(2, 4))
    for handler in (one, two, outside):
        until(lambda handler=handler: handler.num_nodes_waiting() == 2)


# --- closing


def closed_everywhere(handlers: Handlers, by: RendezvousHandler) -> None:
    other = handlers.make()
    assert by.is_closed()
    assert other.is_closed()
    with pytest.raises(RendezvousClosedError):
        by.next_rendezvous()
    with pytest.raises(RendezvousClosedError, match="nothing was trained here") as found:
        other.next_rendezvous()
    remedy = "give each run an id of its own" if handlers.backend == "etcd-v3" else "create another one"
    assert remedy in str(found.value)


def test_a_rendezvous_is_open_until_it_is_closed(handlers: Handlers) -> None:
    one, two = handlers.make(), handlers.make()
    assert not one.is_closed()
    two.set_closed()
    assert one.is_closed()


@pytest.mark.parametrize("rounds", [0, 1])
def test_set_closed_closes_for_all_however_often_it_is_called(handlers: Handlers, rounds: int) -> None:
    made = handlers.make()
    for _ in range(rounds):
        handlers.join(made)
    made.set_closed()
    made.set_closed()
    closed_everywhere(handlers, made)


@pytest.mark.parametrize("rounds", [0, 1])
def test_shutdown_closes_for_all_however_often_it_is_called(handlers: Handlers, rounds: int) -> None:
    made = handlers.make()
    for _ in range(rounds):
        handlers.join(made)
    assert made.shutdown() is True
    assert made.shutdown() is True
    closed_everywhere(handlers, made)


def test_set_closed_ends_what_others_wait_for(handlers: Handlers) -> None:
    (future,) = handlers.joining(handlers.make(2, 2))
    waiting(handlers)(1)
    handlers.make(2, 2).set_closed()
    with pytest.raises(RendezvousClosedError):
        future.result(LIMIT)


def test_members_hear_that_the_rendezvous_was_closed(handlers: Handlers) -> None:
    one, two = handlers.make(2, 2), handlers.make(2, 2)
    handlers.join(one, two)
    one.set_closed()
    until(two.is_closed)
    assert two.num_nodes_waiting() == 0


def test_who_is_in_no_round_does_not_close_that_of_others_and_is_told(handlers: Handlers) -> None:
    """torch's closes it: here no single agent ends a job in which it is not."""
    member, stranger = handlers.make(), handlers.make()
    handlers.join(member)
    with pytest.raises(RendezvousStateError, match="may not close the job"):
        stranger.set_closed()
    assert stranger.shutdown() is False
    assert not member.is_closed()


def test_an_agent_that_fails_before_its_first_round_ends_nobody_elses(handlers: Handlers) -> None:
    """torch's closes the rendezvous."""
    (future,) = handlers.joining(handlers.make(2, 2))
    waiting(handlers)(1)
    failing = handlers.make(2, 2)
    try:
        raise OSError("no such script")
    except OSError:
        failing.shutdown()
    infos = [*handlers.join(handlers.make(2, 2)), future.result(LIMIT)]
    assert {info.rank for info in infos} == {0, 1}


# --- a store that is away


@pytest.mark.long
def test_closing_has_its_time_and_says_that_it_could_not_be(alone: Handlers) -> None:
    one, two = alone.make(close_timeout="1"), alone.make(close_timeout="1")
    alone.away()
    with pytest.raises(RendezvousTimeoutError, match="not in 1 s: "):
        one.set_closed()
    assert two.shutdown() is False


def test_a_store_that_is_away_changes_nothing_for_a_round_and_is_an_error_for_who_has_none(alone: Handlers) -> None:
    """torch's raises in a round, too, which ends torchrun."""
    member, stranger = alone.make(), alone.make()
    alone.join(member)
    alone.away()
    for ask in (stranger.is_closed, stranger.num_nodes_waiting):
        with pytest.raises(RendezvousConnectionError):
            ask()
    assert member.num_nodes_waiting() == 0
    assert not member.is_closed()
    assert {"everstep-present", "everstep-rendezvous"} <= {thread.name for thread in threads()}, "it goes on renewing"


# --- threads


def test_threads_begin_with_the_first_rendezvous_and_end_with_shutdown(handlers: Handlers) -> None:
    before = set(threads())
    made = handlers.make()
    assert {t.name for t in set(threads()) - before} <= {"everstep-listener"}, "which is known to others from now on"
    handlers.join(made)
    assert {t.name for t in set(threads()) - before} == OURS
    made.shutdown()
    assert set(threads()) <= before


@pytest.mark.long_but("everstep")
def test_threads_end_with_the_handler_though_nobody_shut_it_down(handlers: Handlers) -> None:
    before = set(threads())
    made = handlers.make()
    handlers.join(made)
    handlers.forget(made)
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    assert set(threads()) <= before
    assert document(handlers).closed is None, "it left, and closed nothing"
    assert document(handlers).remaining() == ()


# --- the store of the processes


def test_processes_share_the_agents_store_by_default(handlers: Handlers) -> None:
    made = handlers.make()
    assert made.use_agent_store
    (info,) = handlers.join(made)
    place = info.bootstrap_store_info
    assert place is not None
    with socket.create_connection((place.master_addr, place.master_port), LIMIT):
        pass


def test_processes_make_a_store_of_their_own_where_that_is_asked_for(
    handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    made = handlers.make(2, 2), handlers.make(2, 2)
    assert not any(handler.use_agent_store for handler in made)
    for _ in range(2):
        infos: list[RendezvousInfo] = handlers.join(*made)
        (port,) = {p.master_port for info in infos if (p := info.bootstrap_store_info)}
        with socket.create_server(("127.0.0.1", port)):
            pass  # nobody listens there
