"""Collectives of an accelerator's tensors: counted while they are under way, aborted with their round.

No GPU: the accelerator is played, with tensors of torch's `meta` device. What NCCL itself does nobody has seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from everstep.recovery.announcements import AnnouncedRound
from everstep.recovery.forming import forming
from everstep.recovery.group.in_flight import DEVICE_WORKS, PeerLost
from everstep.recovery.group.recoverable import RecoverableGroup


class Kernel(dist.Work):
    """A collective on the device's stream: it ends when all take part, or when it is aborted."""

    def __init__(self, over: Callable[[], bool]) -> None:
        super().__init__()
        self._over = over

    def is_completed(self) -> bool:
        return self._over()


class Device:
    """The group of an accelerator. `peers`: the others take part in what is begun."""

    def __init__(self) -> None:
        self.peers = threading.Event()
        self.aborted = threading.Event()

    def allreduce(self, tensors: Any, opts: Any) -> Kernel:
        if self.aborted.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted on rank 0")
        return Kernel(lambda: self.peers.is_set() or self.aborted.is_set())


@pytest.fixture
def device() -> Device:
    return Device()


def group_of(device: Device, on_lost: Callable[[str, int], None] | None = None) -> RecoverableGroup:
    group = RecoverableGroup(on_lost)
    group.attach(device, 0, 2, device.aborted.set)
    return group


def reduce(group: RecoverableGroup) -> Any:
    return group.allreduce([torch.ones(3, device="meta")])


def test_a_rank_waits_while_a_collective_is_on_the_device_and_is_not_called_hung(device: Device) -> None:
    group = group_of(device)
    assert not group.waits
    reduce(group)
    assert group.waits
    device.peers.set()
    assert not group.waits


def test_collectives_of_a_round_that_is_given_up_are_aborted_and_none_begins(device: Device) -> None:
    group = group_of(device)
    work = reduce(group)
    group.abandon("round 2 began")
    assert device.aborted.wait(10)
    assert work.is_completed()
    assert group.left_on_device == []
    with pytest.raises(PeerLost, match="round 2 began"):
        reduce(group).wait()
    after = Device()
    group.attach(after, 0, 2, after.aborted.set)
    reduce(group)
    assert group.waits


def test_a_broken_communicator_is_a_lost_peer_and_is_told(device: Device) -> None:
    told: list[str] = []
    group = group_of(device, lambda reason, _: told.append(reason))
    device.aborted.set()
    with pytest.raises(PeerLost, match="aborted"):
        reduce(group).wait()
    assert told == [group.lost]


def test_works_that_are_over_are_not_kept(device: Device) -> None:
    group = group_of(device)
    device.peers.set()
    for _ in range(4 * DEVICE_WORKS):
        reduce(group)
    assert len(group._in_flight._device) < DEVICE_WORKS


def test_a_device_that_does_not_end_its_collectives_keeps_the_step_from_being_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forming, "ABORT_SECONDS", 0.05)
    formed = forming.FormedRound(AnnouncedRound(3, 0, 2, ("127.0.0.1", 1)), None, None, frozenset(), None)
    with pytest.raises(forming.FormingFailed, match="round 3: the device did not end its collectives"):
        forming.close(formed, [], [Kernel(lambda: False)])
    forming.close(formed, [], [Kernel(lambda: True)])
