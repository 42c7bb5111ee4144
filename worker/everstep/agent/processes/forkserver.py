"""The fork server: imports what training needs once, and forks training processes on command.

    python -m everstep.agent.processes.forkserver FD PARENT MODULE,MODULE

Commands and answers are JSON lines on the socket FD. Invariants: the fork server has one thread and no GPU context, so
a forked process is complete. A module that starts a thread or a context is named in the log, and each process imports
it instead. The end of each child is reported once. Its children die with it. When the agent is gone, it ends what the
children have started (`leftovers`), and then itself.
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
from collections import deque
from collections.abc import Mapping
from typing import Any

from everstep.agent.processes.leftovers import LOOK_SECONDS, Leftovers

MAX_LINE = 1024 * 1024
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# A terminal sends these to the agent's whole process group, Slurm and systemd to all of its descendants. Only the agent
# handles them.
FOR_THE_AGENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# A training process is in the background of a terminal. By default these stop it for ever when it reads there (`input`,
# `breakpoint()`) or sets the terminal up. While they are ignored, a read is an error with a traceback.
OF_A_TERMINAL = (signal.SIGTTIN, signal.SIGTTOU)
# Threads that survive a fork well. This one is jemalloc's, which pyarrow loads, and so Hugging Face's datasets.
# jemalloc holds its locks during a fork, and works without the thread in the child.
FORKS_WELL = ("jemalloc_bg_thd",)


def main(argv: list[str]) -> None:
    if len(argv) != 4 or not (argv[1].isdecimal() and argv[2].isdecimal()):
        wanted = argv[1:] in (["-h"], ["--help"])
        (sys.stdout if wanted else sys.stderr).write(
            "usage: forkserver FD PARENT MODULE,MODULE; everstep-run starts it\n"
        )
        sys.exit(0 if wanted else 2)
    descriptor, parent, modules = int(argv[1]), int(argv[2]), [m for m in argv[3].split(",") if m]
    die_with(parent)
    for number in FOR_THE_AGENT:
        signal.signal(number, signal.SIG_IGN)
    commands = socket.socket(fileno=descriptor)
    gc.disable()  # importing torch takes 3.4 s of processor time, of which the collector takes 0.8 s, to free 6 MB
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
    # Otherwise a child's garbage collector would touch, and so copy, all imported objects.
    gc.freeze()
    gc.enable()
    program = Parent(commands).serve()
    if program is not None:
        # This runs in a child, after it has left the parent's stack frames.
        from everstep.agent.processes import program as run  # noqa: PLC0415 - the parent has no use for it

        run.main(program)
    else:
        os._exit(0)  # nothing is left to do; to take torch apart would take a while


class Parent:
    """Serves until the agent is gone. In a child, `serve` returns the command that the child must run."""

    def __init__(self, commands: socket.socket) -> None:
        self._commands = commands
        self._pid = os.getpid()
        # Python runs a signal handler between two of its instructions. If a signal comes just before a blocking system
        # call, the handler would run only after that call. So the C-level handler writes to this pipe, which ends the
        # wait.
        self._woken, self._wake = os.pipe()
        self._leftovers = Leftovers()
        self._todo: deque[Mapping[str, Any]] = deque()  # commands that wait until the leftovers have ended
        self._agent_is_gone = False

    def serve(self) -> Mapping[str, Any] | None:
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        waiting = select.poll()
        waiting.register(self._commands, select.POLLIN)
        waiting.register(self._woken, select.POLLIN)
        # From here on the socket tells of the agent's end, and there is something to do then. Orphans of the children
        # become children of this process: nobody else would reap them where the agent is a container's first process.
        _prctl(PR_SET_PDEATHSIG, 0)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._tell(warm=True)
        read = b""
        while not self._agent_is_gone:
            pause = LOOK_SECONDS * 1000 if self._leftovers.are_ending else None
            ready = {descriptor for descriptor, _ in waiting.poll(pause)}
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 65536)
                self._reap()
            self._leftovers.look()
            if self._commands.fileno() in ready:
                try:
                    data = self._commands.recv(65536)
                except ConnectionError:
                    data = b""
                if not data:
                    break
                *lines, read = (read + data).split(b"\n")
                self._todo += map(json.loads, lines)
                if len(read) > MAX_LINE:
                    raise ValueError(f"a command of more than {MAX_LINE} bytes")
            # A new process may need what a leftover of the old one holds: a port, a file, a device's memory.
            while self._todo and not self._leftovers.must_end_before(self._todo[0].get("slot")):
                program = self._fork(self._todo.popleft())
                if program is not None:
                    return program
        self._leftovers.end_all(self._reap)
        return None

    def _fork(self, command: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Fork a child and report it. Ends are collected between two commands, so a child's end is reported after its
        fork, however soon it ends."""
        try:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                os.close(self._woken)
                os.close(self._wake)
                self._commands.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if command["kind"] != "stores":  # the process that hosts stores ends with the agent
                    for number in FOR_THE_AGENT:
                        signal.signal(number, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                for number in OF_A_TERMINAL:
                    signal.signal(number, signal.SIG_IGN)
                os.setpgid(0, 0)
                die_with(self._pid)
                return command
            # The child sets its group itself; the parent does it too, because a signal to the group may come before the
            # child runs.
            with contextlib.suppress(OSError):  # the child has ended, or has become another program
                os.setpgid(pid, pid)
            self._leftovers.started(pid, command.get("slot"))
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
            if self._leftovers.ended(pid, os.waitstatus_to_exitcode(status)):  # else it is an orphan of a child
                self._tell(exited=pid, code=os.waitstatus_to_exitcode(status))

    def _tell(self, **message: Any) -> None:
        try:
            self._commands.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._agent_is_gone = True


def unfit_to_fork(root: str = "/proc/self") -> str | None:
    """Why this process cannot be forked, as a verb and its object; None if it can."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "makes a CUDA context"
    for name in os.listdir(f"{root}/fd") if os.path.isdir(f"{root}/fd") else ():
        try:
            opened = os.readlink(f"{root}/fd/{name}")
        except OSError:
            continue  # the descriptor with which the folder was listed
        if opened.startswith("/dev/nvidia"):
            return f"opens {opened}"
    # A library's thread pool may end before a fork and come back at its next use (OpenBLAS in numpy). So the threads
    # are counted after a trial fork.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = [name for name in _threads(root) if name not in FORKS_WELL]
    return f"starts {len(threads) - 1} threads that go on" if len(threads) > 1 else None


def _threads(root: str) -> list[str]:
    """The names of this process's threads, including the main one."""
    names: list[str] = []
    for number in os.listdir(f"{root}/task") if os.path.isdir(f"{root}/task") else ():
        with contextlib.suppress(OSError), open(f"{root}/task/{number}/comm") as file:  # the thread may have ended
            names.append(file.read().strip())
    return names


def die_with(parent: int) -> None:
    """Let the kernel end this process when its parent ends. Does nothing on systems without that call (not Linux)."""
    if _prctl(PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _prctl(option: int, value: int) -> bool:
    """Whether the system has the call."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        return False
    return True


def _import(module: str) -> None:
    """Import a module. For "module:name", also load the name, because some libraries import their slow parts then."""
    module, _, name = module.partition(":")
    try:
        imported = importlib.import_module(module)
        if name and not hasattr(imported, name):
            importlib.import_module(f"{module}.{name}")
    except Exception as e:  # the program raises it again if it needs the module
        sys.stderr.write(f"everstep-run: EVERSTEP_PRELOAD {module}: {type(e).__name__}: {e}\n")


if __name__ == "__main__":
    main(sys.argv)
