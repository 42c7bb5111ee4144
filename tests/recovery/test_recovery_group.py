"""Collectives over gloo that end when they are told to, in threads of one process, each with a rank of its own."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from everstep.recovery.forming import forming
from everstep.recovery.group.in_flight import PeerLost
from everstep.recovery.group.recoverable import RecoverableGroup

COLLECTIVES: dict[str, Callable[[RecoverableGroup], Any]] = {
    "allreduce": lambda g: g.allreduce([torch.ones(3)]),
    "allreduce_coalesced": lambda g: g.allreduce_coalesced([torch.ones(3), torch.ones(2)]),
    "broadcast": lambda g: g.broadcast([torch.ones(3)]),
    "reduce": lambda g: g.reduce([torch.ones(3)]),
    "allgather": lambda g: g.allgather([[torch.zeros(3), torch.zeros(3)]], [torch.ones(3)]),
    "allgather_base": lambda g: g._allgather_base(torch.zeros(6), torch.ones(3)),
    "allgather_coalesced": lambda g: g.allgather_coalesced([[torch.zeros(3)], [torch.zeros(3)]], [torch.ones(3)]),
    "gather": lambda g: g.gather([[torch.zeros(3), torch.zeros(3)]] if g.rank() == 0 else [], [torch.ones(3)]),
    "scatter": lambda g: g.scatter([torch.zeros(3)], [[torch.ones(3), torch.ones(3)]] if g.rank() == 0 else []),
    "reduce_scatter": lambda g: g.reduce_scatter([torch.zeros(3)], [[torch.ones(3), torch.ones(3)]]),
    "reduce_scatter_base": lambda g: g._reduce_scatter_base(torch.zeros(3), torch.ones(6)),
    "allgather_into_tensor_coalesced": lambda g: g.allgather_into_tensor_coalesced(
        [torch.zeros(6), torch.zeros(2)], [torch.ones(3), torch.ones(1)]
    ),
    "reduce_scatter_tensor_coalesced": lambda g: g.reduce_scatter_tensor_coalesced(
        [torch.zeros(3), torch.zeros(1)], [torch.ones(6), torch.ones(2)]
    ),
    "alltoall_base": lambda g: g.alltoall_base(torch.zeros(4), torch.ones(4), [], []),
    "barrier": lambda g: g.barrier(),
}
# Their source has sent, and is done, before anybody receives.
ONE_SIDED = {"broadcast", "scatter"}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_that_is_stood_in_for_ends_at_once_and_is_not_run(name: str) -> None:
    group, asked = RecoverableGroup(), list[str]()
    group.set_rank(1, 2)

    def stands_in(called: str) -> bool:
        asked.append(called)
        return True

    group.stands_in = stands_in  # and no round is attached: one that is run fails
    assert COLLECTIVES[name](group).wait()
    assert asked
    assert group.begun == 0
    assert group.failures == 0


def test_gathering_that_is_stood_in_for_gives_what_this_member_has_for_all() -> None:
    group = RecoverableGroup()
    group.stands_in = lambda _: True
    own, every, flat = torch.tensor([1.0, 2.0]), [torch.zeros(2), torch.zeros(2)], torch.zeros(4)
    group.allgather([every], [own]).wait()
    group._allgather_base(flat, own).wait()
    assert [t.tolist() for t in every] == [[1, 2], [1, 2]]
    assert flat.tolist() == [1, 2, 1, 2]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[RecoverableGroup]]]:
    """Two members of one round; the first tells `on_lost`. Their connections are closed with the test: gloo's threads
    would wait for each other, and the groups for their threads."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    count = iter(range(100))
    addresses: set[forming.Address] = set()
    held: list[Any] = []

    def make(on_lost: Callable[[str, int], None] | None = None) -> list[RecoverableGroup]:
        store = PrefixStore(str(next(count)), HashStore())
        groups = [RecoverableGroup(on_lost), RecoverableGroup()]
        devices = []
        for _ in groups:
            device, address = forming.listening(lambda: forming.gloo_device("127.0.0.1", 1))
            devices.append(device)
            addresses.add(address)
        made = both(lambda r: forming._gloo(store, r, 2, devices[r]))
        held.extend(made)
        for r, group in enumerate(groups):
            group.attach(made[r], r, 2)
        return groups

    make.shut = lambda: forming.shut(addresses, lambda: False, 10)  # type: ignore[attr-defined]
    yield make
    assert forming.shut(addresses, lambda: False, 10)
    held.clear()


def both(do: Callable[[int], Any]) -> list[Any]:
    """`do(0)` and `do(1)` at once; what they return, or raise."""
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            found[rank] = do(rank)
        except Exception as e:
            found[rank] = e

    threads = [threading.Thread(target=run, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return found


# c10d's functions want a default group, even where another is passed.
pytestmark = pytest.mark.usefixtures("world_of_one")


def test_sum_over_two_members_is_their_sum(pair: Any) -> None:
    groups = pair()
    tensors = [torch.full((4,), float(r + 1)) for r in range(2)]
    both(lambda r: groups[r].allreduce([tensors[r]]).wait())
    assert all(t.tolist() == [3.0] * 4 for t in tensors)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_ends_with_its_result_when_all_take_part(name: str, pair: Any) -> None:
    groups = pair()
    assert both(lambda r: COLLECTIVES[name](groups[r]).wait()) == [True, True]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collective_whose_peer_does_not_come_ends_when_the_round_is_abandoned(name: str, pair: Any) -> None:
    group, _absent = pair()
    work = COLLECTIVES[name](group)
    waited: list[Any] = []

    def wait() -> None:
        try:
            waited.append(work.wait())
        except PeerLost as e:
            waited.append(str(e))

    thread = threading.Thread(target=wait)
    thread.start()
    group.abandon("round 2 began")
    thread.join(60)
    assert waited == ["round 2 began"] or (name in ONE_SIDED and waited == [True])


def test_collective_after_the_round_was_abandoned_fails_at_once_and_after_attach_works(pair: Any) -> None:
    groups, next_round = pair(), pair()
    groups[0].abandon("over")
    assert groups[0].lost == "over"
    with pytest.raises(PeerLost, match="over"):
        groups[0].allreduce([torch.ones(1)]).wait()
    for r in range(2):
        groups[r].abandon("over")
        groups[r].attach(next_round[r]._inner, 1 - r, 2)
    assert both(lambda r: groups[r].allreduce([torch.ones(1)]).wait()) == [True, True]
    assert [(g.lost, g.rank(), g.size()) for g in groups] == [(None, 1, 2), (None, 0, 2)]


def test_error_of_one_collective_ends_the_others_and_is_told(pair: Any) -> None:
    told: list[str] = []
    groups = pair(lambda reason, _: told.append(reason))
    first = groups[0].allreduce([torch.ones(1000)])
    second = groups[0].allreduce([torch.ones(3)])
    pair.shut()
    for work in (first, second):
        with pytest.raises(PeerLost):
            work.wait()
    until = time.monotonic() + 60
    while not told and time.monotonic() < until:
        time.sleep(0.001)
    assert len(told) == 1
    assert groups[0].lost == told[0]


def test_future_of_an_abandoned_collective_raises_as_ddp_sees_it(pair: Any) -> None:
    group, _absent = pair()
    future = group.allreduce([torch.ones(3)]).get_future()
    group.abandon("over")
    with pytest.raises(RuntimeError, match="PeerLost"):
        future.wait()
