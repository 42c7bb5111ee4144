"""Plays the agents of a job: starts training processes from a fork server, kills them, announces rounds."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from support.processes.standstill import go_on, stand_still
from support.recovery.recovery_script import main

LIMIT = 60.0
SCRIPTS = ("support.recovery.recovery_script", "support.recovery.sharded_script")
CONTEXT = multiprocessing.get_context("forkserver")
# Optimizers and DDP import torch._dynamo when first used, which takes longer than torch itself.
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", *SCRIPTS])


@dataclass(eq=False)
class Process:
    """One training process."""

    number: int
    process: Any
    pid: int = 0
    connection: socket.socket | None = None
    heard: list[dict[str, Any]] = field(default_factory=list)
    _told: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    def events(self, folder: Path) -> list[dict[str, Any]]:
        """What it has written by now."""
        path = folder / f"{self.pid}.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                whole, _, _ = file.read().rpartition(b"\n")
            if whole:
                self._read += len(whole) + 1
                self._told += [json.loads(line) for line in whole.splitlines()]
        return self._told


class Agents:
    """`seed` decides every random thing; `rendezvous` is what counts the rounds (default: nobody else's). Use as a
    context manager."""

    def __init__(
        self,
        folder: Path,
        wanted: Any,
        seed: int = 0,
        script: Callable[..., None] = main,
        rendezvous: str | None = None,
    ) -> None:
        self.folder = folder
        wanted.out = str(folder)
        self.wanted = wanted
        self.script = script
        self.random = random.Random(seed)
        self.members: list[Process] = []
        self.round = 0
        self.rendezvous = folder.name if rendezvous is None else rendezvous
        self.job: dict[str, str] = {}  # variables of a TrainingJob
        self.all: list[Process] = []
        self._stores: list[Any] = []
        self._changed = threading.Condition()
        self._path = str(folder / "s")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(self._path)
        self._listening.listen(32)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for p in self.all:
            if p.process.is_alive():
                p.process.kill()
            p.process.join()
        # The thread that accepts ends here; of a socket that is only closed it would wait for the next of that number.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def spawn(self, rank: int = 0, *, told: int | None = None) -> Process:
        """A new process, which builds its objects. `rank` is the one that it may expect; `told`: the round that its
        agent is in when it starts the process."""
        environ = {
            "EVERSTEP_AGENT_SOCKET": self._path,
            "GLOO_SOCKET_IFNAME": "lo",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "EVERSTEP_WORKER_INDEX": str(rank),
            **self.job,
        }
        if told is not None:
            environ |= {"EVERSTEP_ROUND": str(told), "EVERSTEP_RENDEZVOUS": self.rendezvous}
        process = CONTEXT.Process(target=self.script, args=(self.wanted, environ))
        process.start()
        assert process.pid is not None, "it has been started"
        found = Process(len(self.all), process, process.pid)
        self.all.append(found)
        return found

    def begin(self, count: int) -> None:
        """Start `count` processes and their first round."""
        self.announce(self.get_ready(count))

    def get_ready(self, count: int) -> list[Process]:
        """Start `count` processes; nothing is trained yet."""
        started = [self.spawn(rank) for rank in range(count)]
        self.wait(lambda: all(self.said(p, "ready") for p in started), "processes did not get ready")
        return started

    def stand_when(self, true: Callable[[], bool]) -> bool:
        """All members stand still while this is true; if it is not, all go on."""
        pids = [p.pid for p in self.members]
        stand_still(pids)
        if true():
            return True
        go_on(pids)
        return False

    def hurry(self) -> None:
        """The test has done what it had to do before the last step."""
        (self.folder / "go").touch()

    def announce(self, members: Iterable[Process], *, whole: bool = False) -> float:
        """Begin a round with these members; when. `whole`: at the end of a step; former members leave there."""
        former, self.members = self.members, list(members)
        for p in former if whole else ():
            if p not in self.members:
                self._send(p, {"kind": "leave"})
        self.round += 1
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT))
        self._stores = [*self._stores[-1:], store]
        at = time.monotonic()
        for rank, p in enumerate(self.members):
            message = {"kind": "round", "round": self.round, "rank": rank, "world_size": len(self.members),
                       "store": ["127.0.0.1", store.port], "rendezvous": self.rendezvous,
                       "whole": whole}  # fmt: skip
            self._send(p, message)
        return at

    def _send(self, p: Process, message: dict[str, Any]) -> None:
        assert p.connection is not None
        with contextlib.suppress(OSError):  # it died a moment ago, and will be found dead
            p.connection.sendall(json.dumps(message).encode() + b"\n")

    def kill(self, victim: Process) -> float:
        """SIGKILL, seen by its agent as soon as the kernel tells; when it was sent. The survivors get a round."""
        at = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        wait_for([victim.process.sentinel], LIMIT)
        self.announce([p for p in self.members if p is not victim])
        return at

    def over(self, p: Process, reason: str) -> None:
        """Tell a process that there is no further round for it."""
        assert p.connection is not None
        p.connection.sendall(json.dumps({"kind": "over", "reason": reason}).encode() + b"\n")

    def said(self, p: Process, kind: str, **fields: Any) -> bool:
        return any(m["kind"] == kind and all(m.get(k) == v for k, v in fields.items()) for m in p.heard)

    def steps(self, p: Process) -> list[dict[str, Any]]:
        return [e for e in p.events(self.folder) if e["kind"] == "step"]

    def last(self, p: Process, count: int) -> list[dict[str, Any]]:
        """Its newest steps, at most so many."""
        return [e for e in p.events(self.folder)[-count:] if e["kind"] == "step"]

    def trained(self, members: Iterable[Process], since: float, count: int = 1) -> bool:
        """Whether each of these has made `count` steps after that moment."""
        return all(sum(e["at"] > since for e in self.last(p, 50)) >= count for p in members)

    def joined(self) -> bool:
        """Whether all members are in the newest round."""
        return all(self.said(p, "joined", round=self.round) for p in self.members)

    def wait(self, true: Callable[[], bool], problem: str, seconds: float = LIMIT) -> None:
        until = time.monotonic() + seconds
        while not true():
            dead = [p for p in self.members if not p.process.is_alive() and p.process.exitcode]
            if dead or time.monotonic() > until:
                for p in self.members:
                    if p.process.is_alive():
                        os.kill(p.pid, signal.SIGUSR1)
                time.sleep(0.5)
                logs = "\n".join(self.log(p) for p in self.members)
                raise AssertionError(f"{problem}; dead: {[p.number for p in dead]}; round {self.round}\n{logs}")
            time.sleep(0.002)

    def log(self, p: Process) -> str:
        path = self.folder / f"{p.pid}.log"
        return f"--- process {p.number}\n{path.read_text()[-3000:] if path.exists() else ''}"

    def differing(self) -> dict[int, set[str]]:
        """Steps after which two processes had different parameters, or different shards of the same number. What a
        killed one did last may be lost with it."""
        found: dict[tuple[int, int], set[str]] = {}
        for p in self.all:
            steps = self.steps(p)
            for e in steps if p in self.members else steps[:-1]:
                found.setdefault((e["step"], e.get("shard", 0)), set()).add(e["digest"])
        return {step: digests for (step, _), digests in found.items() if len(digests) > 1}

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _started(self, pid: int) -> Process:
        """Who says hello may be known here a moment later: when the fork server has told its pid."""
        until = time.monotonic() + LIMIT
        while (found := next((p for p in self.all if p.pid == pid), None)) is None:
            assert time.monotonic() < until, f"process {pid} says hello, and nobody started it"
            time.sleep(0.002)
        return found

    def _read(self, connection: socket.socket) -> None:
        mine: Process | None = None
        try:
            for line in connection.makefile("rb"):
                message = json.loads(line) | {"at": time.monotonic()}
                if message["kind"] == "hello":
                    mine = self._started(message["pid"])
                    mine.connection = connection
                if mine is not None:
                    mine.heard.append(message)
        except OSError:
            pass
