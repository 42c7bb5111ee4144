"""Whose request is handled next: a few in each turn of the event loop, and by turns where more wait.

What one request costs the loop is small, but fifty that arrive together are ahead of everybody who comes a moment
later, whoever they are from. So in one turn of the loop a few of each namespace (or address, before it is known who
speaks) are begun, and a few more of all; the others wait, round robin between namespaces and in each between its pods
(deficit round robin of requests: Shreedhar and Varghese, SIGCOMM 1995, with a quantum of one). Rates and shares say how
much anybody may have (`tenants`); this says only when. Invariants: what is asked for is begun, once, in its own order;
nobody waits for more turns than there are others who wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("everstep.fair_queueing")

OF_ONE, OF_ALL = 2, 8  # requests

Go = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Queue:
    """`group`: a namespace, or an address; `one`: a pod of it."""

    group: str
    one: str = ""


class Turns:
    """`soon` calls something in the next turn of the event loop. `of_one`, `of_all`: begun in one turn."""

    def __init__(self, soon: Callable[[Go], object], of_one: int = OF_ONE, of_all: int = OF_ALL) -> None:
        self._soon, self._of_one, self._of_all = soon, of_one, of_all
        self._waiting: OrderedDict[str, OrderedDict[str, deque[Go]]] = OrderedDict()
        self._begun: Counter[str] = Counter()  # in this turn
        self._all = 0
        self._next_is_due = False

    def ask(self, queue: Queue, go: Go) -> bool:
        """True: go on now. False: `go` is called in a later turn."""
        free = self._all < self._of_all and self._begun[queue.group] < self._of_one and queue.group not in self._waiting
        if free:
            self._count(queue.group)
        else:
            self._waiting.setdefault(queue.group, OrderedDict()).setdefault(queue.one, deque()).append(go)
        if not self._next_is_due:
            self._next_is_due = True
            self._soon(self._next)
        return free

    async def wait(self, queue: Queue) -> None:
        """Return in the turn that may go on."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self.ask(queue, lambda: None if turn.done() else turn.set_result(None)):
            await turn

    def __len__(self) -> int:
        """How many wait."""
        return sum(len(calls) for pods in self._waiting.values() for calls in pods.values())

    def _count(self, group: str) -> None:
        self._begun[group] += 1
        self._all += 1

    def _next(self) -> None:
        self._next_is_due, self._all = False, 0
        self._begun.clear()
        while self._waiting and self._all < self._of_all:
            group, pods = self._waiting.popitem(last=False)
            if self._begun[group] >= self._of_one:  # so has each that waits
                self._waiting[group] = pods
                self._waiting.move_to_end(group, last=False)
                break
            one, calls = pods.popitem(last=False)
            go = calls.popleft()
            if calls:
                pods[one] = calls
            if pods:
                self._waiting[group] = pods
            self._count(group)
            try:
                go()
            except Exception:
                log.exception("a request failed before it was read")
        if (self._waiting or self._all) and not self._next_is_due:
            self._next_is_due = True
            self._soon(self._next)
