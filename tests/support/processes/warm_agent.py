"""`everstep-run` in a process that was forked warm, whose own fork server is warm too: this script and its flags.

The agent is everstep.agent.main, and its fork server everstep.agent.processes.forkserver. Only how the second begins is
ours: a child of the agent that was forked beforehand and waits for its command line, in place of a new interpreter that
imports torch again. A second one, after the first has died, begins as it does for users.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from everstep.agent import main as agent
from everstep.agent.processes import forkserver

MODULE = ("-m", "everstep.agent.processes.forkserver")


class Forked:
    """What of `asyncio.subprocess.Process` the agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = os.pidfd_open(pid)
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)

    async def wait(self) -> int:
        loop = asyncio.get_running_loop()
        if self.returncode is None:
            ended = asyncio.Event()
            loop.add_reader(self._ended, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(self._ended)
        if self.returncode is None:  # else somebody waited beside us
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])  # noqa: ASYNC222 - it has
        return self.returncode


def main(run: Callable[[], object] = agent.main) -> None:
    """`run`: what this process does, and starts a fork server for."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        wait_for_orders(theirs)
        return
    theirs.close()
    waiting = [Forked(pid)]
    begin = asyncio.create_subprocess_exec

    async def create_subprocess_exec(
        program: str, *argv: str, pass_fds: tuple[int, ...] = (), env: Mapping[str, str] = os.environ, **other: Any
    ) -> Any:
        if argv[:2] != MODULE or not waiting:
            return await begin(program, *argv, pass_fds=pass_fds, env=env, **other)
        socket.send_fds(ours, [json.dumps([argv[3:], dict(env)]).encode()], list(pass_fds))
        ours.close()
        return waiting.pop()

    asyncio.create_subprocess_exec = create_subprocess_exec  # type: ignore[assignment]  # of its many options, what agents use
    try:
        run()
    except SystemExit as e:
        # An agent has imported no torch that Python would take apart at the end, for 0.4 s of a processor.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(e.code if isinstance(e.code, int) else int(e.code is not None))


def wait_for_orders(orders: socket.socket) -> None:
    """Become the fork server of the process that forked us, when it says so."""
    forkserver.die_with(os.getppid())
    data, descriptors, _, _ = socket.recv_fds(orders, 2**20, 1)
    orders.close()
    if not data:
        os._exit(0)
    arguments, environ = json.loads(data)
    os.set_inheritable(descriptors[0], True)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [forkserver.__file__, str(descriptors[0]), *arguments]
    forkserver.main(sys.argv)


if __name__ == "__main__":
    main()
