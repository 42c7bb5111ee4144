"""Counts point-to-point messages in a world of torch's own, because gloo numbers them together with collectives.

All ranks have begun the same number of collectives, but each rank its own number of messages. `monitored_barrier` is
made of messages too. Invariant: each message counted here is in gloo's number, and none is part of a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from everstep.torch_private.patches import Replacements, around

_FUNCTIONS = (
    "send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list", "monitored_barrier",
)  # fmt: skip


class Messages:
    """Counts the messages that the script sends and receives, until `end`. `number`: gloo's number of the default
    group."""

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number
        self._inside = False
        self.count = 0
        self._replaced = Replacements()
        for name in _FUNCTIONS:
            self._replaced.put(name, around(self._counting), distributed_c10d, dist)

    def end(self) -> None:
        self._replaced.end()

    def _counting(self, function: Any, *arguments: Any, **named: Any) -> Any:
        if self._inside:
            return function(*arguments, **named)
        before, self._inside = self._number(), True
        try:
            return function(*arguments, **named)
        finally:
            self._inside = False
            self.count += self._number() - before
