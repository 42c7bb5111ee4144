"""What a training process starts ends with it, unless it was set free: real helpers, which ignore SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.agent.started import FAST, gone, write
from support.processes.children import children, stat

pytestmark = pytest.mark.timeout(120)
LIMIT = 60.0

# A helper writes its pid when it no longer hears SIGTERM. Its name is that of its file.
START = '''
import os, signal, subprocess, sys, time
HELPER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""

def start(name, **how):
    subprocess.Popen([sys.executable, "-S", "-E", "-c", HELPER, name], **how)
    while not os.path.exists(name):
        time.sleep(0.01)

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)

'''


class Run:
    """An agent with the script, in a folder of its own."""

    def __init__(self, folder: Path, body: str, *flags: str) -> None:
        self.folder = folder
        script = write(folder / "train.py", START + body)
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "everstep.agent.main", *flags, str(script)],
            stdout=self._log, stderr=self._log, start_new_session=True, cwd=folder, env={**os.environ, **FAST},
        )  # fmt: skip

    def until(self, name: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not (self.folder / name).exists():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, f"no {name}\n{self.log()}"
            time.sleep(0.01)

    def helper(self, name: str = "helper") -> int:
        self.until(name)
        return int((self.folder / name).read_text())

    def end(self) -> int:
        return self.process.wait(LIMIT)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(LIMIT)
        for name in ("helper", "free"):
            if (path := self.folder / name).exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(path.read_text()), signal.SIGKILL)
        self._log.close()


Begin = Callable[..., Run]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    runs: list[Run] = []

    def make(body: str, *flags: str) -> Run:
        runs.append(Run(tmp_path, body, *flags))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def lives(pid: int) -> bool:
    return stat(pid)[0] != "Z"


@pytest.mark.long_but("killed")
@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"], ids=["killed", "failed"])
def test_a_helper_of_a_process_that_died_is_gone_before_the_next_one_begins(ends: str, begin: Begin) -> None:
    """No trace of it is left, not even as a process that nobody reaps."""
    run = begin(
        f"""
if not os.path.exists("helper"):
    start("helper")
    start("free", start_new_session=True)
    {ends}
there = os.path.exists("/proc/" + open("helper").read())
open("next", "w").write(str(there))
""",
        "--max-restarts=1",
    )
    assert run.end() == 0, run.log()
    assert (run.folder / "next").read_text() == "False", run.log()
    assert "did not end within 2 s of SIGTERM and is killed" in run.log()
    assert lives(run.helper("free")), "a process in a session of its own was set free on purpose"


@pytest.mark.long
def test_a_helper_of_a_process_that_succeeded_ends_with_the_job_and_is_named(begin: Begin) -> None:
    run = begin(
        """
if os.environ["LOCAL_RANK"] == "0":
    start("helper")
    start("free", start_new_session=True)
else:
    wait_for("go")
""",
        "--nproc-per-node=2",
    )
    helper, free = run.helper(), run.helper("free")
    (warm,) = children(run.process.pid)
    deadline = time.monotonic() + LIMIT
    while helper not in children(warm):  # its own process has ended
        assert time.monotonic() < deadline, run.log()
        time.sleep(0.01)
    time.sleep(0.5)  # for which it would have to live on in any case
    assert lives(helper), "it may finish its work while the job goes on"
    (run.folder / "go").touch()
    assert run.end() == 0, run.log()
    assert not lives(helper)
    assert lives(free)
    assert f"pid {helper}: " in run.log()
    assert "start_new_session=True" in run.log()


@pytest.mark.long
def test_helpers_end_when_the_agent_is_asked_to_stop(begin: Begin) -> None:
    run = begin("start('helper')\ntime.sleep(600)\n")
    helper = run.helper()
    run.process.terminate()
    assert run.end() == 128 + signal.SIGTERM, run.log()
    assert not lives(helper)


def test_helpers_end_when_the_agent_is_killed(begin: Begin) -> None:
    run = begin("start('helper')\ntime.sleep(600)\n")
    helper = run.helper()
    (warm,) = children(run.process.pid)
    below = [warm, *children(warm), helper]
    run.process.kill()
    assert gone(below)


def test_helpers_end_when_the_fork_server_is_killed(begin: Begin) -> None:
    run = begin("start('helper') if not os.path.exists('helper') else open('next', 'w')\ntime.sleep(600)\n")
    helper = run.helper()
    (warm,) = children(run.process.pid)
    os.kill(warm, signal.SIGKILL)
    assert gone([warm, helper])


@pytest.mark.long
def test_orphans_of_a_process_are_reaped(begin: Begin) -> None:
    """In a container the agent may be the first process, and what nobody reaps fills the table of processes."""
    run = begin(
        """
read, write = os.pipe()
for _ in range(20):
    if (middle := os.fork()) == 0:
        if os.fork() == 0:
            os.write(write, f"{os.getppid()} {os.getpid()}\\n".encode())
            os._exit(0)
        os._exit(0)
    os.waitpid(middle, 0)
orphans = [line.split()[1] for line in os.read(read, 4096).splitlines()]
while any(os.path.exists(b"/proc/" + pid) for pid in orphans):
    time.sleep(0.01)
assert orphans
helper = os.fork()
if helper == 0:
    if os.fork() == 0:
        time.sleep(0.2)
        open("parent", "w").write(str(os.getppid()))
    os._exit(0)
os.waitpid(helper, 0)
wait_for("parent")
time.sleep(0.2)
assert int(open("parent").read()) == os.getppid(), "the fork server reaps it"
"""
    )
    assert run.end() == 0, run.log()
