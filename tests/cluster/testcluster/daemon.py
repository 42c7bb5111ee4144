"""A server process that a test owns: started until it answers, stopped, killed, paused, started again.

Invariant: it does not outlive the process that started it, however that one ends.
"""

import contextlib
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from testcluster.proc import ClusterError

START_LIMIT = 30.0  # seconds until a server answers
STOP_LIMIT = 10.0  # seconds for a polite end
PORTS = 15_000  # to choose from


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback that nothing listens on now, and that the kernel gives to no connection: a client that
    asks again and again for a server which is away could be given its very port, and it could not come back."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            _bind(one, range(max(1024, lowest - PORTS), lowest))
        return [int(one.getsockname()[1]) for one in sockets]


def _bind(one: socket.socket, ports: range) -> None:
    for port in random.SystemRandom().sample(ports, len(ports)):
        with contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return
    one.bind(("127.0.0.1", 0))


class Daemon:
    """One program with its arguments; `answers` says whether it is ready and may raise `OSError` while it is not."""

    def __init__(
        self, argv: list[str], log: Path, answers: Callable[[], bool], env: Mapping[str, str] | None = None
    ) -> None:
        self.argv, self.log, self.env = argv, log, env
        self._answers = answers
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ClusterError(f"{self.argv[0]} is not started")
        return self._process.pid

    def start(self, wait: bool = True) -> None:
        """Start it and wait until it answers. Raises `ClusterError` with the end of its log."""
        if self._process is not None:
            raise ClusterError(f"{self.argv[0]} runs already")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.env)
        # The guard's input ends when this process does, even by SIGKILL.
        self._guard = subprocess.Popen(
            ["sh", "-c", 'read -r _; kill -KILL "$0"', str(self._process.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until it answers. Raises `ClusterError` if it ends before, or takes longer than `START_LIMIT`."""
        deadline = time.monotonic() + START_LIMIT
        while True:
            with contextlib.suppress(OSError):
                if self._answers():
                    return
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                raise ClusterError(f"{self.argv[0]} {'ended' if ended else 'does not answer'}, see {self.log}:\n{tail}")
            time.sleep(0.05)

    def _end(self, how: signal.Signals) -> None:
        process, guard = self._process, self._guard
        self._process = self._guard = None
        if guard is not None:
            guard.kill()
            guard.wait()
            if guard.stdin is not None:
                guard.stdin.close()
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGCONT)  # a paused process takes no other signal but SIGKILL
        process.send_signal(how)
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """End it politely; nothing happens if it does not run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a power cut would."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stop it from running (SIGSTOP): its connections stay open and nothing answers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
