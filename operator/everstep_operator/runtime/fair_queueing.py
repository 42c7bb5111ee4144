"""Decides which request is started next, so that many requests of one sender do not delay those of others.

One request costs the event loop little, but fifty that arrive together would delay every request that comes a moment
later. So one turn of the event loop starts a few requests of each group (a namespace; or an address, before the sender
is authenticated) and a few more of all groups. The others wait: round robin between groups, and in a group between its
flows (deficit round robin: Shreedhar and Varghese, SIGCOMM 1995, with a quantum of one request). This module decides
only when a request starts; other modules limit how many a sender may have. Invariants: each request is started once, in
the order of its flow. A flow waits for at most one turn for each other waiting flow.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("everstep.fair_queueing")

MAX_OF_GROUP, MAX_OF_ALL = 2, 8  # requests

Start = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Flow:
    """One sender. `group`: its namespace, or its address; `name`: the pod in that namespace."""

    group: str
    name: str = ""


class FairQueue:
    """`soon` calls its argument in the next turn of the event loop. One turn starts at most `max_of_all` requests."""

    def __init__(
        self, soon: Callable[[Start], object], max_of_group: int = MAX_OF_GROUP, max_of_all: int = MAX_OF_ALL
    ) -> None:
        self._soon, self._max_of_group, self._max_of_all = soon, max_of_group, max_of_all
        self._waiting: OrderedDict[str, OrderedDict[str, deque[Start]]] = OrderedDict()
        self._started: Counter[str] = Counter()  # in this turn, by group
        self._started_of_all = 0
        self._next_is_due = False

    def ask(self, flow: Flow, start: Start) -> bool:
        """Return True if the caller may start now. Otherwise `start` is called in a later turn."""
        group = flow.group
        may = self._started_of_all < self._max_of_all and self._started[group] < self._max_of_group
        free = may and group not in self._waiting
        if free:
            self._count(group)
        else:
            self._waiting.setdefault(group, OrderedDict()).setdefault(flow.name, deque()).append(start)
        if not self._next_is_due:
            self._next_is_due = True
            self._soon(self._next)
        return free

    async def wait(self, flow: Flow) -> None:
        """Return in the turn in which the caller may start."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self.ask(flow, lambda: None if turn.done() else turn.set_result(None)):
            await turn

    def __len__(self) -> int:
        """How many requests wait."""
        return sum(len(calls) for flows in self._waiting.values() for calls in flows.values())

    def _count(self, group: str) -> None:
        self._started[group] += 1
        self._started_of_all += 1

    def _next(self) -> None:
        self._next_is_due, self._started_of_all = False, 0
        self._started.clear()
        while self._waiting and self._started_of_all < self._max_of_all:
            group, flows = self._waiting.popitem(last=False)
            if self._started[group] >= self._max_of_group:  # and so is the group of each waiting request
                self._waiting[group] = flows
                self._waiting.move_to_end(group, last=False)
                break
            name, calls = flows.popitem(last=False)
            start = calls.popleft()
            if calls:
                flows[name] = calls
            if flows:
                self._waiting[group] = flows
            self._count(group)
            try:
                start()
            except Exception:
                log.exception("a request failed before it was started")
        if (self._waiting or self._started_of_all) and not self._next_is_due:
            self._next_is_due = True
            self._soon(self._next)
