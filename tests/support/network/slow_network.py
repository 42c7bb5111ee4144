"""A second network between a test's machines, on which packets come late or not at all.

Each machine has an interface whose packets this process carries (a TUN device), so any delay and loss can be had,
whatever the kernel has been built with. Chance is seeded.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import threading
import time
from itertools import count

from support.network.netspaces import Machines
from testcluster.proc import run

NETWORK = "10.231.8"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MOST_QUEUED = 100_000


class SlowNetwork:
    """What the machines `bad` send comes `delay` seconds late, or with the chance `loss` never. Use as a context
    manager inside of the machines'."""

    def __init__(self, machines: Machines, names: str, *, bad: str, delay: float, loss: float, seed: int = 1) -> None:
        self._machines, self._names, self._bad = machines, names, bad
        self._delay, self._loss = delay, loss
        self._chance = random.Random(seed)
        self.addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
        self._ends: dict[bytes, int] = {}
        self._bad_ends: set[int] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="slow-network")

    def __enter__(self) -> SlowNetwork:
        for name in self._names:
            with self._machines.inside(name):
                end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", b"slow0", IFF_TUN | IFF_NO_PI))
                run("ip", "address", "add", f"{self.addresses[name]}/24", "dev", "slow0")
                run("ip", "link", "set", "slow0", "up")
            self._ends[bytes(map(int, self.addresses[name].split(".")))] = end
            if name in self._bad:
                self._bad_ends.add(end)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        for end in self._ends.values():
            os.close(end)

    def _carry(self) -> None:
        queue: list[tuple[float, int, int, bytes]] = []
        order = count()
        poll = select.poll()
        for end in self._ends.values():
            poll.register(end, select.POLLIN)
        while not self._closed.is_set():
            pause = min(0.1, queue[0][0] - time.monotonic()) if queue else 0.1
            for end, _ in poll.poll(max(0.0, pause) * 1e3):
                packet = os.read(end, 65536)
                target = self._ends.get(packet[16:20])
                if target is None or len(queue) >= MOST_QUEUED:
                    continue
                bad = end in self._bad_ends
                if not bad or self._chance.random() >= self._loss:
                    heapq.heappush(queue, (time.monotonic() + bad * self._delay, next(order), target, packet))
            while queue and queue[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(queue)
                with contextlib.suppress(BlockingIOError):  # as a full buffer of a switch
                    os.write(target, packet)
