"""Stock torchrun agents on the loopback, each a process of its own, and what their training processes wrote.

The agents begin warm; the training processes as torchrun starts them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from support import TESTS
from support.processes.warm_python import Process, warm
from support.rendezvous.agents import until

SCRIPT = TESTS / "rendezvous" / "elastic_script.py"
START = 90.0  # seconds until agents that were started have formed a world, on a machine that does much else


@dataclass(frozen=True)
class Line:
    """A training process in a world, at its first all-reduce. `at`: seconds since the epoch."""

    at: float
    agent: int
    restart: int
    rank: int
    world: int
    total: int
    round: int  # that it was told


class TorchrunJob:
    """`variables(n)` are the environment of agent n, as its pod's would be."""

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        job: str,
        *flags: str,
        nodes: str = "2:3",
        backend: str = "etcd-v3",
        variables: Callable[[int], Mapping[str, str]] = lambda _: {},
    ) -> None:
        self.folder, self._endpoint, self._job, self._flags, self._nodes = folder, endpoint, job, flags, nodes
        self._backend, self._variables = backend, variables
        self.agents: list[Process] = []

    def start(self, count: int = 1, conf: str = "last_call=3") -> None:
        for _ in range(count):
            argv = [
                "-m", "torch.distributed.run", f"--nnodes={self._nodes}", "--nproc-per-node=1",
                "--max-restarts=10", f"--rdzv-backend={self._backend}", f"--rdzv-endpoint={self._endpoint}",
                f"--rdzv-id={self._job}", f"--rdzv-conf={conf}", *self._flags, str(SCRIPT), str(self.folder),
            ]  # fmt: skip
            with self.log(len(self.agents)).open("wb") as out:
                variables = {**os.environ, "OMP_NUM_THREADS": "1", **self._variables(len(self.agents))}
                self.agents.append(warm().popen(*argv, stdout=out, stderr=out, start_new_session=True, env=variables))

    def log(self, index: int) -> Path:
        return self.folder / f"agent-{index}.log"

    def kill(self, agent: int) -> float:
        """End an agent and its training process as a power cut would; when that was, in seconds since the epoch."""
        os.kill(agent, signal.SIGSTOP)  # so that it starts no other meanwhile
        pids = [agent, *children(agent)]
        at = time.time()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        next(a for a in self.agents if a.pid == agent).wait()
        return at

    def lines(self) -> list[Line]:
        try:
            rows = (self.folder / "worlds").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [Line(float(at), *map(int, rest)) for at, *rest in (row.split() for row in rows)]

    def world(self, size: int, since: float = 0.0) -> list[Line]:
        """Wait until `size` processes are in a world of that size that was formed after `since`; in rank order."""

        def found() -> list[Line]:
            fresh = [line for line in self.lines() if line.at > since and line.world == size]
            # Not ranks of two rounds, where the first of these ended before all had written.
            newest = max((line.round for line in fresh), default=0)
            by_rank = {line.rank: line for line in fresh if line.round == newest}
            return [by_rank[rank] for rank in sorted(by_rank)] if len(by_rank) == size else []

        try:
            return until(found, START)
        except AssertionError:
            tails = "\n".join(f"{i}: {self.log(i).read_text()[-1500:]}" for i in range(len(self.agents)))
            raise AssertionError(f"no world of {size}: {self.lines()}\n{tails}") from None

    def finish(self) -> list[int]:
        """Let the script end; the agents' exit codes."""
        (self.folder / "stop").touch()
        return [agent.wait(START) for agent in self.agents]

    def clean_up(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                self.kill(agent.pid)


def children(pid: int) -> list[int]:
    """The processes that a process started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found
