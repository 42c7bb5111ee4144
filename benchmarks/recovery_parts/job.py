"""Agents of one job on the loopback, under any launcher, and what their training processes wrote."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torchft_peer
from stores import Store

from testcluster.daemon import free_ports

T = TypeVar("T")

SCRIPT = Path(__file__).with_name("train.py")
STAMPED = Path(__file__).with_name("stamped.py")
START = 120.0
# `python -m` of the agents, and the settings by which stock torchrun notices and forms as fast as it can.
TORCHRUN, AGENT = "torch.distributed.run", "everstep.agent.main"
TUNED = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)
TUNED_CONF = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"
OURS = "last_call=30"  # and what an agent does by default: the lease of 3 s, too
REMEMBERED = 300.0  # seconds: whoever measures looks no further back, and reading all again and again would disturb it


@dataclass(frozen=True)
class Way:
    """A column of the table: how agents are started."""

    name: str
    module: str  # python -m
    backend: str
    conf: str = ""
    session: bool = False
    environ: tuple[tuple[str, str], ...] = ()
    store: str = "etcd"  # of `stores.STORES`
    rehearsed: bool = False  # the script has the stamp of a rehearsal
    peer: str = ""  # torchft's distribution: its own interpreter, and each agent is the torchrun of a world of one
    script: Path | None = None  # another one than `train.py`
    nodes: str = "2:3"

    @property
    def survives(self) -> bool:
        """Whether the others go on without one that is lost."""
        return self.session or bool(self.peer)


@dataclass(frozen=True)
class Line:
    pid: int
    rank: int
    world: int
    step: int
    checksum: int  # of the parameters after it
    at: float


@dataclass(frozen=True)
class Parts:
    """Of one member's way from a fault to its next step, in seconds."""

    detect: float  # until it is started, or hears of the next round
    rendezvous: float  # until its process group has formed
    restore: float  # until it has the state
    first_step: float


class NeverError(RuntimeError):
    """It did not happen within the time that was given."""


@dataclass(eq=False)
class Job:
    folder: Path
    way: Way
    store: Store
    arguments: tuple[str, ...] = ()  # of the script, behind the folder
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of each agent, from 0
    _read: dict[Path, tuple[int, list[Line]]] = field(default_factory=dict)
    _port: int = 0

    def __post_init__(self) -> None:
        self.id = self.store.new_job()
        script = self.way.script or (torchft_peer.SCRIPT if self.way.peer else SCRIPT)
        flags = ["--session"] if self.way.session and script is SCRIPT else []
        self._script = [str(script), str(self.folder), *flags, *self.arguments]
        if self.way.rehearsed:
            self._script[0] = str(shutil.copy(SCRIPT, self.folder))
            subprocess.run([sys.executable, str(STAMPED), *self._script], check=True)

    def replace(self, agent: subprocess.Popen[bytes]) -> None:
        """Start another one in its place."""
        self.start(place=self.places[self.agents.index(agent)])

    def start(self, count: int = 1, place: int | None = None) -> list[subprocess.Popen[bytes]]:
        """Start agents, each in a place of its own or in this one."""
        way = self.way
        if way.backend == "c10d" and not self._port:
            (self._port,) = free_ports(1)
        made = []
        for _ in range(count):
            log = self.folder / f"agent-{len(self.agents)}.log"
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **dict(way.environ)}
            self.places.append(len(self.agents) if place is None else place)
            environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each new process compiles torch anew
            environ |= self.store.variables(self.id, self.places[-1])
            with log.open("wb") as out:
                agent = subprocess.Popen(self._command(), stdout=out, stderr=out, start_new_session=True, env=environ)
            self.agents.append(agent)
            made.append(agent)
        return made

    def _command(self) -> list[str]:
        """Of the next agent."""
        way, script = self.way, self._script
        restarts = "--max-restarts=1000"
        if way.peer:
            python = str(torchft_peer.interpreter(way.peer))
            return [python, "-m", way.module, "--standalone", restarts, *script]
        conf = [way.conf] if way.conf else []
        if way.backend == "c10d":  # else any of the first three may come to host the store
            conf.append(f"is_host={int(not self.agents)}")
        endpoint = f"127.0.0.1:{self._port}" if way.backend == "c10d" else self.store.endpoint
        where = [f"--rdzv-backend={way.backend}", f"--rdzv-id={self.id}"]
        where += [f"--rdzv-endpoint={endpoint}"] if endpoint else []
        where += [f"--rdzv-conf={','.join(conf)}"] if conf else []
        return [sys.executable, "-m", way.module, f"--nnodes={way.nodes}", restarts, *where, *script]

    def below(self, agent: subprocess.Popen[bytes]) -> list[int]:
        """All that the agent started, and what that started."""
        found, open_ = [], [agent.pid]
        while open_:
            more = children(open_.pop())
            found += more
            open_ += more
        return found

    def trainer(self, agent: subprocess.Popen[bytes]) -> int:
        """The pid of its training process that made the newest step."""
        below = set(self.below(agent))
        mine = [line for line in self.lines() if line.pid in below]
        if not mine:
            raise NeverError("this agent has no training process")
        return max(mine, key=lambda line: line.at).pid

    def alive(self) -> list[subprocess.Popen[bytes]]:
        return [a for a in self.agents if a.poll() is None]

    def others(self) -> list[subprocess.Popen[bytes]]:
        """Those that host nothing."""
        return [a for a in self.alive() if a is not self.host() and a is not self.first()]

    def host(self) -> subprocess.Popen[bytes]:
        """The agent that hosts the store of the world: with c10d the first that was started, else that of rank 0."""
        return self.agents[0] if self.way.backend == "c10d" else self.first()

    def first(self) -> subprocess.Popen[bytes]:
        """The agent of rank 0."""
        newest = max((line for line in self.lines() if line.rank == 0), key=lambda line: line.at)
        return next(a for a in self.alive() if newest.pid in self.below(a))

    def kill(self, agent: subprocess.Popen[bytes]) -> float:
        """As a power cut would; when. Stopped first, so that it starts nothing meanwhile."""
        os.kill(agent.pid, signal.SIGSTOP)
        below = self.below(agent)
        at = time.monotonic()
        for pid in (agent.pid, *below):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()
        return at

    def kill_process(self, agent: subprocess.Popen[bytes]) -> float:
        """SIGKILL its training process; when."""
        pid = self.trainer(agent)
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at

    def stop(self, agent: subprocess.Popen[bytes]) -> float:
        """SIGSTOP it and what it started; when."""
        at = time.monotonic()
        for pid in (agent.pid, *self.below(agent)):
            os.kill(pid, signal.SIGSTOP)
        return at

    def wake(self, agent: subprocess.Popen[bytes]) -> float:
        """SIGCONT to all that was stopped; when."""
        at = time.monotonic()
        for pid in (agent.pid, *self.below(agent)):
            os.kill(pid, signal.SIGCONT)
        return at

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                self.kill(agent)

    def lines(self) -> list[Line]:
        """What the training processes wrote in the last minutes."""
        oldest = time.monotonic() - REMEMBERED
        return self._lines_since(oldest)

    def all_lines(self) -> list[Line]:
        """What they wrote since the job began."""
        self._read.clear()
        return self._lines_since(0.0)

    def _lines_since(self, oldest: float) -> list[Line]:
        for path in self.folder.glob("*.steps"):
            at, told = self._read.get(path, (0, []))
            if path.stat().st_size > at:
                with path.open("rb") as file:
                    file.seek(at)
                    whole, end, _ = file.read().rpartition(b"\n")
                for row in whole.decode().splitlines():
                    *numbers, when = row.split()
                    pid, rank, world, step, checksum = map(int, numbers)
                    told.append(Line(pid, rank, world, step, checksum, float(when)))
                at += len(whole) + len(end)
            if told and told[0].at < oldest - REMEMBERED:
                told = [line for line in told if line.at >= oldest]
            self._read[path] = (at, told)
        return [line for _, told in self._read.values() for line in told]

    def world(
        self,
        size: int,
        since: float,
        limit: float,
        of: Iterable[subprocess.Popen[bytes]] = (),
        *,
        or_more: bool = False,
        above: int = -1,
    ) -> dict[int, Line]:
        """Wait until every rank of a world of `size` has made a step after `since`; the first of each. The processes
        are those of the agents `of`, if they are given, and the steps above `above`. Raises NeverError."""
        agents = list(of)

        def found() -> dict[int, Line] | None:
            below = {pid for a in agents for pid in self.below(a)} if agents else None
            worlds: dict[int, dict[int, Line]] = {}
            for line in sorted((line for line in self.lines() if line.at > since), key=lambda line: line.at):
                if line.step > above and (below is None or line.pid in below):
                    firsts = worlds.setdefault(line.world, {})
                    firsts.setdefault(line.rank, line)
                    if len(firsts) == line.world and (line.world == size or (or_more and line.world > size)):
                        return firsts
            return None

        return self._until(found, limit, f"a world of {size}")

    def parts(self, line: Line, since: float) -> Parts:
        """How the process of `line` came from a fault at `since` to that step."""
        rows = (self.folder / f"{line.pid}.rounds").read_text().splitlines()
        came = [tuple(map(float, row.split())) for row in rows]
        began, formed, restored = max(row for row in came if row[2] <= line.at)
        return Parts(began - since, formed - began, restored - formed, line.at - restored)

    def lost_steps(self, firsts: dict[int, Line]) -> int:
        """How many of the steps that somebody had completed before these were taken again."""
        began = min(line.at for line in firsts.values())
        before = max(line.step for line in self.lines() if line.at < began)
        return max(0, before + 1 - min(line.step for line in firsts.values()))

    def differing(self, firsts: dict[int, Line]) -> int:
        """After how many steps since then members of one world had different parameters."""
        began = min(line.at for line in firsts.values())
        found: dict[tuple[int, int], set[int]] = {}
        for line in self.lines():
            if line.at >= began:
                found.setdefault((line.world, line.step), set()).add(line.checksum)
        return sum(len(checksums) > 1 for checksums in found.values())

    def longest_pause(self, pids: Iterable[int], since: float) -> float:
        """The longest time between two steps of one of these processes."""
        longest = 0.0
        for pid in pids:
            at = sorted(line.at for line in self.lines() if line.pid == pid and line.at > since)
            longest = max([longest, *(b - a for a, b in pairwise(at))])
        return longest

    def _until(self, found: Callable[[], T | None], limit: float, what: str) -> T:
        deadline = time.monotonic() + limit
        while (value := found()) is None:
            if time.monotonic() > deadline:
                raise NeverError(f"{self.way.name}: not {what} in {limit:g} s")
            if all(a.poll() is not None for a in self.agents):
                raise NeverError(f"{self.way.name}: all agents ended, and there was not {what}")
            time.sleep(0.005)
        return value


def children(pid: int) -> list[int]:
    """The processes that a process started, and that have not ended."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(one) for one in task.read_text().split()]
    return found
