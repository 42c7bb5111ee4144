"""Decides which of many waiting requests is next, so that many requests of one sender do not delay those of others.

`RoundRobin` is that order: round robin between groups, and in a group between its flows (deficit round robin:
Shreedhar and Varghese, SIGCOMM 1995, with a quantum of one request). `write_limit` uses it for writes to the API
server. `FairQueue` uses it for the requests of workers.

One request costs the event loop little, but fifty that arrive together would delay every request that arrives a moment
later. So one turn of the event loop starts a few requests of each group (a namespace; or an address, before the sender
is authenticated) and a few more of all groups. The others wait. This module decides only when a request starts; other
modules limit how many a sender may have. Invariants: each request is started once, in the order of its flow. A flow
waits for at most one turn for each other waiting flow.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger("everstep.fair_queueing")

# Requests. A call of a worker takes a few turns of the loop, so each more of another's in a turn delays it threefold.
MAX_OF_GROUP, MAX_OF_ALL = 1, 4

Start = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Flow:
    """One sender. `group`: its namespace, or its address; `name`: the pod in that namespace."""

    group: str
    name: str = ""


class RoundRobin(Generic[T]):
    """Items that wait, by flow. `pop` removes and returns an item of the group, and in it of the flow, that waits
    longest for a turn."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, OrderedDict[str, deque[T]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(items) for flows in self._groups.values() for items in flows.values())

    def __bool__(self) -> bool:
        return bool(self._groups)

    def has_group(self, group: str) -> bool:
        return group in self._groups

    @property
    def next_group(self) -> str:
        """The group of the next item."""
        return next(iter(self._groups))

    def add(self, flow: Flow, item: T) -> None:
        self._groups.setdefault(flow.group, OrderedDict()).setdefault(flow.name, deque()).append(item)

    def pop(self) -> T:
        """Remove the next item. Raises KeyError if none waits."""
        group, flows = self._groups.popitem(last=False)
        name, items = flows.popitem(last=False)
        item = items.popleft()
        if items:
            flows[name] = items
        if flows:
            self._groups[group] = flows
        return item


class FairQueue:
    """`soon` calls its argument in the next turn of the event loop. One turn starts at most `max_of_all` requests."""

    def __init__(
        self, soon: Callable[[Start], object], max_of_group: int = MAX_OF_GROUP, max_of_all: int = MAX_OF_ALL
    ) -> None:
        self._soon, self._max_of_group, self._max_of_all = soon, max_of_group, max_of_all
        self._waiting: RoundRobin[Start] = RoundRobin()
        self._started: Counter[str] = Counter()  # in this turn, by group
        self._started_of_all = 0
        self._next_is_due = False

    def try_start(self, flow: Flow, start: Start) -> bool:
        """Return True if the caller may start now. Otherwise `start` is called in a later turn."""
        group = flow.group
        may = self._started_of_all < self._max_of_all and self._started[group] < self._max_of_group
        free = may and not self._waiting.has_group(group)
        if free:
            self._count(group)
        else:
            self._waiting.add(flow, start)
        if not self._next_is_due:
            self._next_is_due = True
            self._soon(self._next)
        return free

    async def wait(self, flow: Flow) -> None:
        """Return in the turn in which the caller may start."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self.try_start(flow, lambda: None if turn.done() else turn.set_result(None)):
            await turn

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def _count(self, group: str) -> None:
        self._started[group] += 1
        self._started_of_all += 1

    def _next(self) -> None:
        self._next_is_due, self._started_of_all = False, 0
        self._started.clear()
        while self._waiting and self._started_of_all < self._max_of_all:
            group = self._waiting.next_group
            if self._started[group] >= self._max_of_group:  # and so is the group of each waiting request
                break
            start = self._waiting.pop()
            self._count(group)
            try:
                start()
            except Exception:
                log.exception("a request failed before it was started")
        if (self._waiting or self._started_of_all) and not self._next_is_due:
            self._next_is_due = True
            self._soon(self._next)
