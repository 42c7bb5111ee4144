"""The server's table: who may go on with which parameters (stale synchronous parallel).

While a worker computes, each other one can give 2 · bound + 1 gradients: it may be `bound` behind at first, and give
`bound` + 1 more than the worker at last. A gradient is at most so many versions old for each other worker.
"""

import copy
import threading
from collections import deque

from torch import nn


class Table:
    """The state of all server's threads: newest parameters, waiting gradients, how many each worker has given."""

    def __init__(self, bound: int) -> None:
        self.bound, self.changed = bound, threading.Condition()
        self.newest: dict[str, object] | None = None  # the parameters, and how many gradients made them
        self.waiting: deque[tuple[int, dict]] = deque()
        self.given: dict[int, int] = {}  # by worker
        self.taken: int | None = None  # the worker whose gradient is being applied

    def answer(self, worker: int, gradient: dict | None) -> dict | None:
        """The parameters for a worker's next gradient, once its last one is applied and the slowest is near enough."""
        with self.changed:
            if gradient is None:
                self.given[worker] = min(self.given.values(), default=0)
                due = self.given[worker]
            else:
                self.waiting.append((worker, gradient))
                due = self.given[worker] + 1
                self.changed.notify_all()
            self.changed.wait_for(lambda: self.newest and self.given[worker] >= due and self.is_near(worker))
            return self.newest

    def is_near(self, worker: int) -> bool:
        return self.given[worker] <= min(self.given.values()) + self.bound

    def left(self, worker: int) -> None:
        with self.changed:
            self.given.pop(worker, None)  # nobody waits for it
            self.changed.notify_all()

    def publish(self, version: int, model: nn.Module) -> None:
        with self.changed:
            self.newest = {"version": version, "parameters": copy.deepcopy(model.state_dict())}
            if self.taken in self.given:
                self.given[self.taken] += 1
            self.changed.notify_all()

    def take(self) -> dict:
        with self.changed:
            self.changed.wait_for(lambda: self.waiting)
            self.taken, gradient = self.waiting.popleft()
            return gradient
