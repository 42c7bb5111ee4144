"""The kubelet's own death: whatever ends it, nothing that it started goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep_local.kubelet.processes.root import Root
from support.local import kubelet_world

# A run of local mode with two pods, each of which has processes in other sessions that ignore SIGTERM.
PROGRAM = """
import asyncio, signal, sys
from pathlib import Path
from everstep_local.apiserver.cluster import MemoryCluster
from everstep_local.kubelet.sources import PODS
from everstep_local.nodes.pool import LocalNodes
from everstep_operator.runtime.clock import SystemClock

FAMILY = '''
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(2):
    if os.fork():
        break
    os.setsid()
open(os.environ["PIDS"], "a").write(f"{os.getpid()}\\\\n")
time.sleep(600)
'''

async def main():
    folder = Path(sys.argv[1])
    clock = SystemClock()
    cluster = MemoryCluster(clock)
    nodes = LocalNodes(cluster.client(), cluster.issue_token, clock=clock, temporary=folder)
    source = {"serviceAccountToken": {"audience": "a", "path": "token"}}
    for name in ("a", "b"):
        worker = {"name": "worker", "image": "x", "command": ["python", "-c", FAMILY]}
        worker["env"] = [{"name": "PIDS", "value": str(folder / "pids")}]
        spec = {"restartPolicy": "Never", "containers": [worker]}
        spec["volumes"] = [{"name": "t", "projected": {"sources": [source]}}]
        await cluster.client().create(PODS, "default", {"metadata": {"name": name}, "spec": spec})
    task = asyncio.create_task(nodes.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    await asyncio.gather(task, return_exceptions=True)

asyncio.run(main())
"""


def until(what: str, holds: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def tokens(folder: Path) -> int:
    """How many tokens lie below `folder`, while guards are removing folders."""
    return sum(files.count("token") for _, _, files in os.walk(folder))


@pytest.mark.long_but("9")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_survives_a_kubelet_that_dies(number: signal.Signals, tmp_path: Path) -> None:
    kubelet = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], start_new_session=True)
    pids: list[int] = []
    try:

        def all_there() -> bool:
            pids[:] = [int(p) for p in (tmp_path / "pids").read_text().split()] if (tmp_path / "pids").exists() else []
            return len(pids) == 6

        until("six processes", all_there, 30)
        assert all(kubelet_world.alive(pid) for pid in pids)
        assert tokens(tmp_path) == 2
        os.kill(kubelet.pid, number)
        kubelet.wait(10)
        until("all are dead", lambda: not any(kubelet_world.alive(pid) for pid in pids), 20)
        until("the tokens are gone", lambda: tokens(tmp_path) == 0, 20)
    finally:
        kubelet.kill()
        kubelet.wait(10)
        for pid in filter(kubelet_world.alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_next_run_removes_what_one_that_was_killed_at_its_start_has_left(tmp_path: Path) -> None:
    kubelet = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], start_new_session=True)
    try:
        until("its first token is there", lambda: tokens(tmp_path), 30)
    finally:
        kubelet.kill()
        kubelet.wait(10)

    def removed() -> bool:
        with Root(tmp_path) as root:  # more than once, if a guard is still writing
            return list(tmp_path.glob("everstep-*")) == [root.path]

    until("the folder is removed", removed, 20)


def test_main_processes_die_even_with_guard_and_kubelet_helpless(tmp_path: Path) -> None:
    kubelet = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], start_new_session=True)
    pids: list[int] = []
    try:
        pids_file = tmp_path / "pids"
        until("six processes", lambda: pids_file.exists() and len(pids_file.read_text().split()) == 6, 30)
        pids = [int(p) for p in pids_file.read_text().split()]
        guards = kubelet_world.children_of(kubelet.pid)
        mains = [pid for guard in guards for pid in kubelet_world.children_of(guard)]
        assert len(mains) == 2
        os.kill(kubelet.pid, signal.SIGSTOP)
        for guard in guards:
            os.kill(guard, signal.SIGKILL)
        until("the main processes are dead", lambda: not any(kubelet_world.alive(pid) for pid in mains), 20)
        os.kill(kubelet.pid, signal.SIGCONT)  # it finds the rest by their mark
        until("all are dead", lambda: not any(kubelet_world.alive(pid) for pid in pids), 20)
    finally:
        kubelet.kill()
        kubelet.wait(10)
        for pid in filter(kubelet_world.alive, pids):
            os.kill(pid, signal.SIGKILL)
