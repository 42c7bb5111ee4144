"""Python processes that begin warm: forked from one that has imported what they need, in place of `python script.py`.

    python warm_python.py FD PARENT MODULE,MODULE        (the process that forks; `Warm` starts it)

Importing torch takes longer than most of what a test does in a process. Each process is one of its own: it has its own
pid, environment, arguments, `__main__` and random numbers, and can be killed. It ends as the interpreter does, but for
its last act: to take apart all that is imported. Two things are the forking process's: PYTHONHASHSEED, and the
environment that /proc shows. A test that is about starting, or about the end of Python, starts the real thing.

Invariants: the process that forks has one thread and no GPU; it dies with the tests, and what it forked dies with it;
every end is told once, to who started the process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

MOST_BYTES = 2**20  # of a command
IMPORTED = (
    "torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "torch.distributed.checkpoint",
    "torch.distributed.fsdp", "torch.distributed.run", "everstep.agent.main", "everstep.agent.processes.program",
    "everstep.agent.processes.stores", "everstep.checkpoint.checkpointer", "everstep.data.loader",
    "everstep.membership.torchrun.handler", "everstep.storage.backends.s3", "everstep.train.session",
    "everstep.cli.main", "everstep.cli.ckpt",
    "numpy", "safetensors.torch", "sklearn.datasets", "xxhash",
)  # fmt: skip
# What compares the variables of a script does not look into frames of files with such a name.
UNSEEN = "<frozen tests>"
BEGIN = f"import sys; exec(compile(open(sys.argv[1]).read(), {UNSEEN!r}, 'exec'), {{'__name__': '__main__'}})"


# --- the tests' side


class Process:
    """As `subprocess.Popen`, of a process that somebody else forked."""

    def __init__(self, argv: Sequence[str], told: socket.socket) -> None:
        self.args, self._told = list(argv), told
        self.returncode: int | None = None
        self.seconds = 0.0  # of a processor, when it has ended
        message = self._hear()
        assert message is not None, "the fork server has ended"
        self.pid = int(message["pid"])

    def _hear(self) -> dict[str, Any] | None:
        data = self._told.recv(4096)
        return json.loads(data) if data else None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            message = self._hear() or {"code": -signal.SIGKILL, "seconds": 0.0}  # the parent died, and it with it
            self.returncode, self.seconds = message["code"], message["seconds"]
            self._told.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            select.select([self._told], [], [], timeout)
        code = self.poll()
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """A process that has imported these modules, and forks. If `base` is given it was forked from that one, and imports
    nothing again that is there."""

    def __init__(self, modules: Sequence[str], base: Warm | None = None) -> None:
        self._commands, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Threads that a library makes when it is imported would not be there after a fork.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process: subprocess.Popen[bytes] | Process
        with theirs:
            if base is not None:
                argv = [__file__, 1, base._process.pid, ",".join(modules)]
                self._process = base.popen(*argv, stdout=theirs.fileno(), env=environ, start_new_session=True)
                return
            self._process = subprocess.Popen(
                [sys.executable, "-c", BEGIN, __file__, str(theirs.fileno()), str(os.getpid()), ",".join(modules)],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, env=environ,
            )  # fmt: skip

    def popen(
        self,
        *argv: object,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        env: Mapping[str, str] = os.environ,
        cwd: str | Path | None = None,
        start_new_session: bool = False,
    ) -> Process:
        """As `subprocess.Popen([sys.executable, *argv])`; `argv` begins with a script, `-m MODULE` or `-c TEXT`."""
        arguments = [str(one) for one in argv]
        out = _descriptor(stdout, 1)
        error = out if stderr == subprocess.STDOUT else _descriptor(stderr, 2)
        command = {"argv": arguments, "env": dict(env), "cwd": str(cwd or os.getcwd()), "session": start_new_session}
        ours, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with told:
            socket.send_fds(self._commands, [json.dumps(command).encode()], [out, error, told.fileno()])
        return Process(arguments, ours)

    def run(
        self, *argv: object, timeout: float, env: Mapping[str, str] = os.environ, cwd: str | Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([sys.executable, *argv], capture_output=True, text=True)`."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
            process = self.popen(*argv, stdout=out, stderr=error, env=env, cwd=cwd)
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
            for file in (out, error):
                file.seek(0)
            return subprocess.CompletedProcess(process.args, code, out.read(), error.read())

    def close(self) -> None:
        self._commands.close()
        self._process.wait(30)


@cache
def warm(*modules: str) -> Warm:
    """The one of this pytest process that has imported these too, until it ends."""
    found = Warm(modules, base=warm()) if modules else Warm(IMPORTED)
    atexit.register(found.close)
    return found


def _descriptor(file: IO[Any] | int | None, default: int) -> int:
    if file is None:
        return default
    return file if isinstance(file, int) else file.fileno()


# --- the side that forks


def main(argv: Sequence[str]) -> None:
    from everstep.agent.processes.forkserver import die_with, unfit_to_fork  # noqa: PLC0415 - the tests' side has no use for it

    die_with(int(argv[2]))
    commands = socket.socket(fileno=os.dup(int(argv[1])))
    os.dup2(2, 1)  # what a module prints is no message
    gc.disable()
    for module in filter(None, argv[3].split(",")):
        importlib.import_module(module)
    if (why := unfit_to_fork()) is not None:
        raise SystemExit(f"{argv[3]}: who imports them {why}, and cannot be forked")
    gc.freeze()
    gc.enable()
    us = os.getpid()
    command = serve(commands)
    if command is not None:
        die_with(us)
        end(_code_of(command))


def serve(commands: socket.socket) -> dict[str, Any] | None:
    """Fork until there are no tests any more; in a process that was forked, what it is to do."""
    children: dict[int, tuple[int, socket.socket]] = {}  # by what becomes readable when it ends
    while True:
        ready: int | socket.socket
        waited: list[int | socket.socket] = [commands, *children]
        for ready in select.select(waited, [], [])[0]:
            if isinstance(ready, int):
                pid, told = children.pop(ready)
                os.close(ready)
                _, status, used = os.wait4(pid, 0)
                _tell(told, code=os.waitstatus_to_exitcode(status), seconds=used.ru_utime + used.ru_stime)
                told.close()
                continue
            data, descriptors, _, _ = socket.recv_fds(commands, MOST_BYTES, 3)
            if not data:
                return None
            pid = os.fork()
            if pid == 0:
                for number, descriptor in enumerate(descriptors[:2], 1):
                    os.dup2(descriptor, number)
                for one in (commands, *(told for _, told in children.values())):
                    one.detach()
                os.closerange(3, 4096)
                return dict(json.loads(data))
            told = socket.socket(fileno=descriptors[2])
            for descriptor in descriptors[:2]:
                os.close(descriptor)
            children[os.pidfd_open(pid)] = (pid, told)
            _tell(told, pid=pid)


def _tell(told: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):  # nobody wants to know
        told.sendall(json.dumps(message).encode())


def _code_of(command: Mapping[str, Any]) -> int:
    """Become that; the exit code. What it raises is printed as the interpreter prints it."""
    try:
        become(command)
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except Exception as e:
        sys.last_type, sys.last_value, sys.last_traceback = type(e), e, e.__traceback__
        sys.excepthook(type(e), e, e.__traceback__)
        return 1
    return 0


def end(code: int) -> NoReturn:
    """Wait for threads, call what is registered, and write what is buffered. To take torch apart is left out: it takes
    0.4 s of a processor in each process, 0.02 s without."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it is closed
            file.flush()
    os._exit(code)


def become(command: Mapping[str, Any]) -> None:
    """What `python argv…` does, in this process. Raises what it raises."""
    if command["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(command["env"])
    time.tzset()
    tempfile.tempdir = None  # it is remembered, and the environment decides it
    os.chdir(command["cwd"])
    random.seed()  # else all would begin with the parent's
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    first, *rest = command["argv"]
    if first == "-m":
        sys.argv = rest
        sys.path[0] = os.getcwd()
        sys.modules.pop(rest[0], None)  # a new interpreter would not have it
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    # As the interpreter does: `__main__` stays what it is until the process ends.
    script = ModuleType("__main__")
    sys.modules["__main__"] = script
    if first == "-c":
        text, name, sys.argv, sys.path[0] = rest[0].encode(), "<string>", ["-c", *rest[1:]], ""
    else:
        text, name, sys.argv, sys.path[0] = Path(first).read_bytes(), first, [first, *rest], str(Path(first).parent)
        script.__dict__["__file__"] = first
        if Path(first).parts[-3:-1] == ("support", "processes"):
            name = UNSEEN
    exec(compile(text, name, "exec", dont_inherit=True), script.__dict__)


def unseen(path: str) -> dict[str, Any]:
    """What a module of ours defines, in frames that are not taken for a script's."""
    names: dict[str, Any] = {"__name__": "tests", "__file__": path}
    exec(compile(Path(path).read_bytes(), UNSEEN, "exec", dont_inherit=True), names)
    return names


if __name__ == "__main__":
    main(sys.argv[-4:])
