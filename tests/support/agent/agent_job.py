"""`everstep-run` agents on the loopback, each a process of its own, and what their training processes wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import TESTS
from support.processes import warm_agent
from support.processes.children import children, stat
from support.processes.warm_python import Process, warm

HERE = TESTS / "agent"  # where the scripts of the jobs are
LIMIT = 90.0  # seconds that any wait may take, on a machine that does much else
# A lease outlasts the seconds for which such a machine leaves an agent without a processor; but where it is to expire.
CONF = "last_call=20,ttl=10"
EXPIRING = "last_call=20,ttl=3"


@dataclass(eq=False)
class Agent:
    number: int
    process: subprocess.Popen[bytes] | Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self) -> int:
        """Its exit code."""
        code = self.process.poll()
        assert code is not None, f"agent {self.number} still runs"
        return code

    def fork_servers(self) -> list[int]:
        return children(self.pid)

    def trainers(self) -> list[int]:
        """The pids of its training processes: what the fork server forked first hosts stores."""
        return [pid for one in self.fork_servers() for pid in children(one)[1:]]


class Job:
    """Agents of one job; `script` and its arguments are theirs. Use as a context manager.

    They begin warm, because most of what they do otherwise is to import torch; if `cold`, as for users.
    """

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        *argv: str,
        nodes: str = "2:3",
        flags: Iterable[str] = (),
        environ: Mapping[str, str] | None = None,
        cold: bool = False,
    ) -> None:
        self.folder, self._endpoint, self._argv, self._nodes = folder, endpoint, argv, nodes
        self._cold = cold
        self._flags, self._environ = tuple(flags), dict(environ or {})
        self._job = uuid.uuid4().hex
        self.agents: list[Agent] = []
        self._read: dict[Path, tuple[int, list[dict[str, Any]]]] = {}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            if agent.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    self.kill(agent)

    def start(self, count: int = 1, conf: str = CONF, flags: Iterable[str] = ()) -> list[Agent]:
        made = []
        for _ in range(count):
            argv = [
                f"--nnodes={self._nodes}", "--rdzv-backend=etcd-v3", f"--rdzv-endpoint={self._endpoint}",
                f"--rdzv-id={self._job}", f"--rdzv-conf={conf}", *self._flags, *flags, *self._argv,
            ]  # fmt: skip
            log = self.folder / f"agent-{len(self.agents)}.log"
            variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **self._environ}
            with log.open("wb") as out:
                process = self._begin(argv, stdout=out, stderr=out, start_new_session=True, env=variables)
            made.append(Agent(len(self.agents), process, log))
            self.agents.append(made[-1])
        return made

    def _begin(self, argv: list[str], **options: Any) -> subprocess.Popen[bytes] | Process:
        if self._cold:
            return subprocess.Popen([sys.executable, "-m", "everstep.agent.main", *argv], **options)
        return warm().popen(warm_agent.__file__, *argv, **options)

    def kill(self, agent: Agent) -> float:
        """End an agent as a power cut would, with all that it started; when that was done."""
        os.kill(agent.pid, signal.SIGSTOP)  # so that it starts no other meanwhile
        pids = [agent.pid, *agent.fork_servers(), *(pid for one in agent.fork_servers() for pid in children(one))]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        at = time.monotonic()
        agent.process.wait()
        return at

    def strike(self, pid: int) -> float:
        """Kill a process; when it was dead. A step of later needs another in its place, but for the one that the others
        were about to complete."""
        os.kill(pid, signal.SIGKILL)
        self.until(lambda: stat(pid)[0] == "Z", "a killed process does not end")
        return time.monotonic()

    # --- what the session script says

    def events(self, pid: int) -> list[dict[str, Any]]:
        path = self.folder / f"{pid}.jsonl"
        at, told = self._read.get(path, (0, []))
        if path.exists():
            with path.open("rb") as file:
                file.seek(at)
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                told = told + [json.loads(line) for line in whole.splitlines()]
                self._read[path] = (at + len(whole) + 1, told)
        return told

    def steps(self, pid: int) -> list[dict[str, Any]]:
        return [event for event in self.events(pid) if event["kind"] == "step"]

    def trains(self, pids: Iterable[int], since: float, size: int, count: int = 2) -> list[dict[str, Any]]:
        """The first step of each of these after that moment in a world of that size; empty while one has not made
        `count` of them."""
        found = []
        for pid in pids:
            fresh = [e for e in self.steps(pid)[-500:] if e["at"] > since and e["world"] == size]
            if len(fresh) < count:
                return []
            found.append(fresh[0])
        return found

    def world(self, agents: Iterable[Agent], since: float, count: int = 2) -> list[dict[str, Any]]:
        """Wait until the processes of these agents, and no others, train together; their first steps."""
        agents = list(agents)

        def found() -> list[dict[str, Any]]:
            pids = [pid for agent in agents for pid in agent.trainers()]
            return self.trains(pids, since, len(pids), count) if len(pids) >= len(agents) else []

        world: list[dict[str, Any]] = self.until(found, f"no world of agents {[a.number for a in agents]}")
        return world

    def differing(self) -> dict[int, set[str]]:
        """Steps after which two processes had different parameters. What a killed one did last may be lost with it."""
        alive = {pid for agent in self.agents for pid in agent.trainers() if agent.process.poll() is None}
        found: dict[int, set[str]] = {}
        for path in self.folder.glob("*.jsonl"):
            steps = self.steps(int(path.stem))
            for e in steps if int(path.stem) in alive else steps[:-1]:
                found.setdefault(e["step"], set()).add(e["digest"])
        return {step: digests for step, digests in found.items() if len(digests) > 1}

    # ---

    def until(self, true: Callable[[], Any], problem: str, seconds: float = LIMIT) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := true()):
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- agent {a.number}\n{a.log.read_text()[-4000:]}" for a in self.agents)
                raise AssertionError(f"{problem}\n{logs}")
            time.sleep(0.02)
        return value

    def codes(self) -> list[int]:
        """Wait for all agents; their exit codes."""
        self.until(lambda: all(a.process.poll() is not None for a in self.agents), "an agent does not end")
        return [a.ended() for a in self.agents]

    def left_behind(self) -> list[int]:
        """Processes that are still there and were started by an agent of this job: each has a session of its own."""
        sessions = {str(agent.pid) for agent in self.agents}
        pids = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
        return [pid for pid in pids if (found := stat(pid))[0] != "Z" and found[3] in sessions]


SESSION = HERE / "session_script.py"
PLAIN = HERE / "plain_script.py"


def session(folder: Path, **wanted: Any) -> tuple[Path, str]:
    return SESSION, json.dumps({"out": str(folder), **wanted})


def regroup(job: Job, agents: list[Agent], since: float) -> float:
    """Wait until exactly these train; seconds from then until the last of them has made its first step."""
    return max(float(step["at"]) for step in job.world(agents, since)) - since
