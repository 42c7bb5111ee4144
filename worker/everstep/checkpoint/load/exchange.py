"""Brings what each rank has read to all others, over the process group, in messages of bounded size.

Every rank derives the same messages from the same plan, so nothing is said but the bytes. Memory: a few messages beside
the tensors themselves; large runs are sent from, and received into, their place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from everstep.checkpoint.load.reading import Task
from everstep.checkpoint.ranks import Ranks

MESSAGE: Final = 32 * 2**20
PACKED: Final = 2**20  # runs below this share a message
WINDOW: Final = 4  # messages under way at once


def exchange(divided: Sequence[Sequence[Task]], buffers: Sequence[Any], ranks: Ranks) -> None:
    """After it, the bytes of every task are in every rank's buffers; before, those of `divided[r]` are in rank r's.

    Collective: every rank passes the same tasks. Raises what the process group raises.
    """
    under_way: deque[tuple[Any, Any, list[Any]]] = deque()
    for source, tasks in enumerate(divided):
        for runs in _messages(tasks, buffers):
            if len(under_way) == WINDOW:
                _arrived(*under_way.popleft())
            whole = runs[0] if len(runs) == 1 else np.concatenate(runs)
            mine = source == ranks.rank
            under_way.append((ranks.broadcast(torch.from_numpy(whole), source), whole, [] if mine else runs))
    while under_way:
        _arrived(*under_way.popleft())


def _arrived(work: Any, whole: Any, runs: list[Any]) -> None:
    work.wait()
    if len(runs) > 1:
        at = 0
        for run in runs:
            run[:] = whole[at : at + len(run)]
            at += len(run)


def _messages(tasks: Sequence[Task], buffers: Sequence[Any]) -> Iterator[list[Any]]:
    """The runs of bytes of each message: one large one, or several small ones."""
    packed: list[Any] = []
    size = 0
    for buffer, begin, end in _runs(tasks):
        if end - begin < PACKED:
            packed.append(buffers[buffer][begin:end])
            size += end - begin
            if size >= PACKED:
                yield packed
                packed, size = [], 0
            continue
        for at in range(begin, end, MESSAGE):
            yield [buffers[buffer][at : min(end, at + MESSAGE)]]
    if packed:
        yield packed


def _runs(tasks: Sequence[Task]) -> Iterator[tuple[int, int, int]]:
    """The tasks' segments as buffer, begin, end; neighbours are joined."""
    last: tuple[int, int, int] | None = None
    for task in tasks:
        for s in task.segments:
            if last is not None and last[0] == s.buffer and last[2] == s.at:
                last = (s.buffer, last[1], s.at + s.size)
                continue
            if last is not None:
                yield last
            last = (s.buffer, s.at, s.at + s.size)
    if last is not None:
        yield last
