"""Functions that several ranks run together, each in a process forked from the test's own: torch is imported once."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from support.processes.forked import end_with
from testcluster.daemon import free_ports

SECONDS = 90.0  # on a machine with other work


class RankFailed(AssertionError):
    """A rank raised, or has not ended in time. What it raised is printed, or where its threads stand."""


def on_ranks(size: int, folder: Path, body: Callable[[], Any]) -> list[Any]:
    """What `body` returns on each of `size` ranks, by rank. It finds a launcher's variables in its environment."""
    (port,) = free_ports(1)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _run(rank, size, port, folder, body)
        children.append(child)
    _wait(children)
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(size)]


def _run(rank: int, size: int, port: int, folder: Path, body: Callable[[], Any]) -> NoReturn:
    def work() -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(size)}
        (folder / str(rank)).write_bytes(pickle.dumps(body()))

    faulthandler.register(signal.SIGUSR1, file=2)  # of the parent: a timer would wait for the thread that a fork lost
    end_with(work)


def _wait(children: list[int]) -> None:
    deadline, left, failed = time.monotonic() + SECONDS, list(children), False
    while left and not failed and time.monotonic() < deadline:
        for child in tuple(left):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                left.remove(child)
                failed |= bool(status)
        time.sleep(0.005)
    for child in left:
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.2)  # for what it prints
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if left or failed:
        raise RankFailed(f"{len(left)} of {len(children)} ranks were still running" if left else "a rank failed")
