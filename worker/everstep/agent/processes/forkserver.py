"""The fork server: imports what training needs once, and forks training processes on command.

    python -m everstep.agent.processes.forkserver FD PARENT MODULE,MODULE

Commands and answers are JSON lines on the socket FD. Invariants: it has one thread and no context of a GPU, so a fork
is whole (a module that brings one is imported in the processes instead, and named); it dies with the agent, and what it
forked dies with it; every end of a child is told once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

MAX_LINE = 1024 * 1024
PR_SET_PDEATHSIG = 1
# Sent to the whole group of the agent by a terminal or a supervisor: the agent decides what they mean.
FOR_THE_AGENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# jemalloc's, which pyarrow brings, and with it Hugging Face's datasets: jemalloc holds its locks while a process is
# forked, and does without the thread in the child.
FORKS_WELL = ("jemalloc_bg_thd",)


def main(argv: list[str]) -> None:
    if len(argv) != 4 or not (argv[1].isdecimal() and argv[2].isdecimal()):
        asked = argv[1:] in (["-h"], ["--help"])
        (sys.stdout if asked else sys.stderr).write(
            "usage: forkserver FD PARENT MODULE,MODULE; everstep-run starts it\n"
        )
        sys.exit(0 if asked else 2)
    descriptor, parent, modules = int(argv[1]), int(argv[2]), [m for m in argv[3].split(",") if m]
    die_with(parent)
    for number in FOR_THE_AGENT:
        signal.signal(number, signal.SIG_IGN)
    commands = socket.socket(fileno=descriptor)
    gc.disable()  # of 3.4 s of a processor for torch's modules the collector takes 0.8, and frees 6 MB
    for module in modules:
        _import(module)
        if (why := unfit_to_fork()) is not None:
            sys.stderr.write(
                f"everstep-run: EVERSTEP_PRELOAD: {module} {why} when it is imported, and a process that has that "
                "cannot be forked: it is imported in each process instead, which takes longer\n"
            )
            sys.stderr.flush()
            left = ",".join(m for m in modules if m != module)
            again = ["-m", "everstep.agent.processes.forkserver", argv[1], argv[2], left]
            os.execv(sys.executable, [sys.executable, *again])  # noqa: S606
    # Else a child walks, and so copies, all that was imported here: when it collects garbage, and when it ends.
    gc.freeze()
    gc.enable()
    program = Parent(commands).serve()
    if program is not None:
        # In a child, and outside of all that the parent had on its stack.
        from everstep.agent.processes import program as run  # noqa: PLC0415 - the parent has no use for it

        run.main(program)


class Parent:
    """Serves until the agent is gone; in a child, returns what it is to run."""

    def __init__(self, commands: socket.socket) -> None:
        self._commands = commands
        self._pid = os.getpid()
        # A handler in Python runs between two of its instructions: one whose signal comes just before a system call
        # that waits would run when that call is over. What the kernel's own handler writes here ends the wait.
        self._woken, self._wake = os.pipe()

    def serve(self) -> Mapping[str, Any] | None:
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        waiting = select.poll()
        waiting.register(self._commands, select.POLLIN)
        waiting.register(self._woken, select.POLLIN)
        self._tell(warm=True)
        read = b""
        while True:
            ready = {descriptor for descriptor, _ in waiting.poll()}
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 65536)
                self._reap()
            if self._commands.fileno() not in ready:
                continue
            data = self._commands.recv(65536)
            if not data:
                return None
            *lines, read = (read + data).split(b"\n")
            for line in lines:
                program = self._fork(json.loads(line))
                if program is not None:
                    return program
            if len(read) > MAX_LINE:
                raise ValueError(f"a command of more than {MAX_LINE} bytes")

    def _fork(self, command: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Told before its end is, however soon that comes: ends are looked for between two commands."""
        try:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                os.close(self._woken)
                os.close(self._wake)
                self._commands.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in FOR_THE_AGENT:
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.setpgid(0, 0)
                die_with(self._pid)
                return command
            # Here too: a signal to its group may come before it runs.
            with contextlib.suppress(OSError):  # it has ended, or become another program
                os.setpgid(pid, pid)
            self._tell(forked=command["id"], pid=pid)
        except OSError as e:
            self._tell(forked=command["id"], error=str(e))
        return None

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._tell(exited=pid, code=os.waitstatus_to_exitcode(status))

    def _tell(self, **message: Any) -> None:
        try:
            self._commands.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            os._exit(1)  # the agent is gone


def unfit_to_fork(root: str = "/proc/self") -> str | None:
    """Why this process cannot be forked, if so: what it has done, as a verb and its object."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "makes a CUDA context"
    for name in os.listdir(f"{root}/fd") if os.path.isdir(f"{root}/fd") else ():
        try:
            opened = os.readlink(f"{root}/fd/{name}")
        except OSError:
            continue  # the one with which the folder was listed
        if opened.startswith("/dev/nvidia"):
            return f"opens {opened}"
    # A library's pool of threads ends before a fork, and comes back when it is used (OpenBLAS, which numpy brings).
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = [name for name in _threads(root) if name not in FORKS_WELL]
    return f"starts {len(threads) - 1} threads that go on" if len(threads) > 1 else None


def _threads(root: str) -> list[str]:
    """The names of this process's threads, the main one's too."""
    found: list[str] = []
    for number in os.listdir(f"{root}/task") if os.path.isdir(f"{root}/task") else ():
        with contextlib.suppress(OSError), open(f"{root}/task/{number}/comm") as file:  # it may have ended
            found.append(file.read().strip())
    return found


def die_with(parent: int) -> None:
    """End this process when its parent ends, as the kernel sees to it. Where there is no such call (not Linux), it
    lives on."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def _import(module: str) -> None:
    """Or, as "module:name", what a library of slow parts imports when it is asked for the name."""
    module, _, name = module.partition(":")
    try:
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except Exception as e:  # the program says it again, if it needs the module
        sys.stderr.write(f"everstep-run: EVERSTEP_PRELOAD {module}: {type(e).__name__}: {e}\n")


if __name__ == "__main__":
    main(sys.argv)
