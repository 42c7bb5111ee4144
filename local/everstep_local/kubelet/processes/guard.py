"""The parent of one container's processes: `python -S -E guard.py <spec file> <status fd>`.

It ensures that no process outlives the kubelet. Standard input is a pipe whose other end only the kubelet holds. When
the kubelet ends, by Ctrl-C or kill -9, the pipe closes and all processes below the guard are killed. As a child
subreaper the guard inherits the orphans of its descendants, so torchrun's own sessions die too. As with PID 1 of a
container, the end of the main process ends all of them. The guard does not know Kubernetes. It uses few modules, of the
standard library only, because it starts with every container.

Commands on standard input, a byte each: `T` SIGTERM to the main process group, `K` SIGKILL to everything.
Reports on the status fd, a JSON line each: {"started": pid}, {"refused": errno}, {"exit": code}; 128 + n for signal n.
Invariant: it reports an exit only when no process is left below it, or after KILL_SECONDS of trying.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time

KILL_SECONDS = 10.0
MAX_LINE = 16 * 1024  # as container runtimes cut lines
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LINUX = sys.platform.startswith("linux")


class Log:
    """Lines in the CRI's format, `<time> <stream> <F|P> <text>`, in at most `limit` bytes: half here, half in `.1`."""

    def __init__(self, path: str, limit: int) -> None:
        self._path = path
        self._half = max(limit // 2, 2 * MAX_LINE)
        self._rest = {"stdout": b"", "stderr": b""}
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the process runs
        self._size = self._file.tell()

    def feed(self, stream: str, data: bytes) -> None:
        *lines, rest = (self._rest[stream] + data).split(b"\n")
        out = [part for line in lines for part in _cut(line, b"F")]
        while len(rest) > MAX_LINE:
            out.append((b"P", rest[:MAX_LINE]))
            rest = rest[MAX_LINE:]
        self._rest[stream] = rest
        self._write(stream, out)

    def finish(self) -> None:
        """Write what came without an end of line."""
        for stream, rest in self._rest.items():
            self._write(stream, list(_cut(rest, b"F")) if rest else [])
            self._rest[stream] = b""

    def _write(self, stream: str, parts: list[tuple[bytes, bytes]]) -> None:
        now = time.time_ns()
        head = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 10**9)) + f".{now % 10**9:09d}Z {stream} "
        block = b"".join(head.encode() + tag + b" " + text + b"\n" for tag, text in parts)
        # A full disk must not stop the program that logs.
        with contextlib.suppress(OSError):
            if self._size + len(block) > self._half and self._size:
                self._file.close()
                os.replace(self._path, self._path + ".1")
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
                self._size = 0
            self._size += self._file.write(block) or 0


def _cut(line: bytes, tag: bytes) -> list[tuple[bytes, bytes]]:
    parts = [line[i : i + MAX_LINE] for i in range(0, len(line), MAX_LINE)] or [b""]
    return [*((b"P", part) for part in parts[:-1]), (tag, parts[-1])]


def descendants(root: int) -> list[int]:
    """Living processes below `root`, in any session or group; parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    pids, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        pids += below
        todo += below
    return pids


def _parents() -> list[tuple[int, int]]:
    if not _LINUX:
        with os.popen("ps -A -o pid= -o ppid= -o state=") as listing:  # noqa: S605 - a constant; no /proc there
            rows = [line.split() for line in listing]
        return [(int(row[0]), int(row[1])) for row in rows if len(row) == 3 and not row[2].startswith("Z")]
    pairs = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                # The name may contain blanks and brackets. The fields begin after the last bracket.
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    pairs.append((int(name), int(parent)))
    return pairs


class Guard:
    def __init__(self, spec: dict[str, object], status: int) -> None:
        self._status = status
        self._log = Log(str(spec["log"]), int(str(spec["log_limit"])))
        self._main = 0
        self._code: int | None = None
        self._orphaned = False
        self._spec = spec

    def run(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wake, woken = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # A signal to the guard is meant for the container. The guard's death alone would only lose the exit report.
            signal.signal(number, lambda *_: self._kill(wake))
        outputs = self._start()
        self._serve(wake, outputs)
        self._kill(wake)
        for fd, stream in outputs.items():
            self._drain(fd, stream)
        self._log.finish()
        if self._orphaned:
            self._remove_folder()
        self._report({"exit": 137 if self._code is None else self._code})

    def _start(self) -> dict[int, str]:
        argv, env = self._spec["argv"], self._spec["env"]
        assert isinstance(argv, list)
        assert isinstance(env, dict)
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        failed, failed_end = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                if _LINUX:
                    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() != parent:
                        os._exit(137)
                # Python ignores these signals, and an ignored signal stays ignored in the executed program.
                for number in (signal.SIGPIPE, signal.SIGXFSZ):
                    signal.signal(number, signal.SIG_DFL)
                null = os.open(os.devnull, os.O_RDONLY)
                for fd, target in ((null, 0), (out_end, 1), (err_end, 2)):
                    os.dup2(fd, target)
                os.chdir(str(self._spec["cwd"]))
                os.execvpe(argv[0], argv, env)  # noqa: S606 - without a shell is the point
            except OSError as e:
                os.write(failed_end, str(e.errno or 1).encode())
            finally:
                os._exit(128)
        for fd in (out_end, err_end, failed_end):
            os.close(fd)
        refusal = os.read(failed, 16)
        os.close(failed)
        self._main = pid
        self._report({"refused": int(refusal)} if refusal else {"started": pid})
        for fd in (out, err):
            os.set_blocking(fd, False)
        return {out: "stdout", err: "stderr"}

    def _serve(self, wake: int, outputs: dict[int, str]) -> None:
        """Serve until the main process or the kubelet has ended."""
        waiting = {0, wake, *outputs}
        kubelet = int(str(self._spec["kubelet"]))
        while True:
            # The clock is checked too: a process that the kubelet forked could keep the pipe open after its death.
            ready, _, _ = select.select(list(waiting), [], [], 1.0)
            if os.getppid() != kubelet:
                self._orphaned = True
                return
            for fd in ready:
                if fd == 0:
                    command = os.read(0, 1)
                    if command in (b"", b"K"):
                        self._orphaned = command == b""
                        return
                    if command == b"T":
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(self._main, signal.SIGTERM)
                elif fd == wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 512)
                elif not self._drain(fd, outputs[fd], once=True):
                    waiting.discard(fd)
            self._reap()
            if self._code is not None:
                return

    def _drain(self, fd: int, stream: str, once: bool = False) -> bool:
        """Log the available output; False at its end."""
        # The pipe's content bounds this: either no writer is left, or the loop continues.
        while True:
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._log.feed(stream, data)
            if once:
                return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._main:
                code = os.waitstatus_to_exitcode(status)
                self._code = 128 - code if code < 0 else code

    def _kill(self, wake: int) -> None:
        """Kill until nothing is left. Orphans become our children, so each pass finds those of the last one."""
        deadline = time.monotonic() + KILL_SECONDS
        while time.monotonic() < deadline:
            self._reap()
            victims = descendants(os.getpid())
            if not victims:
                return
            for pid in victims:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            select.select([wake], [], [], 0.02)
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 512)

    def _remove_folder(self) -> None:
        """Remove the folder, because it contains tokens and secrets, and no other process will."""
        import shutil  # noqa: PLC0415 - only now, see the module's docstring

        shutil.rmtree(str(self._spec["folder"]), ignore_errors=True)

    def _report(self, what: dict[str, int]) -> None:
        with contextlib.suppress(OSError):
            os.write(self._status, json.dumps(what).encode() + b"\n")


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def main() -> None:
    # The arguments are parsed by hand: argparse would cost each container a tenth of its start.
    if len(sys.argv) != 3 or not sys.argv[2].isdecimal():
        help_requested = sys.argv[1:] in (["-h"], ["--help"])
        print(
            "usage: guard.py SPEC_FILE STATUS_FD; a local run starts it",
            file=sys.stdout if help_requested else sys.stderr,
        )
        sys.exit(0 if help_requested else 2)
    path, status = sys.argv[1], int(sys.argv[2])
    os.set_inheritable(status, False)
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    os.unlink(path)  # it may hold secrets
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    Guard(spec, status).run()


if __name__ == "__main__":
    main()
