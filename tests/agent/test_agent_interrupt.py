"""Ctrl-C at `everstep-run`, with one agent and real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.contract import exit_codes
from support.agent.started import LIMIT, Started, gone
from support.processes.children import children
from support.processes.commits import commits

pytestmark = pytest.mark.timeout(120)
SESSION = Path(__file__).with_name("session_script.py")
INTERRUPTED = 128 + signal.SIGINT
# A shell that starts the tests in the background ignores Ctrl-C, and so does each Python below it.
HEARS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "scripts" / "train.py"


def start(log: Path, *argv: str) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-c", HEARS, "-m", "everstep.agent.main", *argv], stdout=out, stderr=out, env=environ
        )


def until(true: Callable[[], object], log: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.02)


def steps(folder: Path) -> list[int]:
    """The newest step of each process that has made one."""
    told = (path.read_text().rpartition("\n")[0].splitlines() for path in folder.glob("*.jsonl"))
    found = [[event["step"] for line in lines if (event := json.loads(line))["kind"] == "step"] for lines in told]
    return [one[-1] for one in found if one]


@pytest.mark.long
def test_ctrl_c_saves_the_step_that_all_ranks_have_made(tmp_path: Path) -> None:
    log, wanted = tmp_path / "log", {"out": str(tmp_path), "pause": 0.01, "url": str(tmp_path / "commits")}
    agent = start(log, "--nproc-per-node=3", str(SESSION), json.dumps(wanted))
    try:
        until(lambda: len(made := steps(tmp_path)) == 3 and min(made) >= 2, log)
        agent.send_signal(signal.SIGINT)
        assert agent.wait(LIMIT) == exit_codes.PREEMPTED, log.read_text()
    finally:
        agent.kill()
        agent.wait()
    newest = steps(tmp_path)
    assert commits(tmp_path) == [max(newest)]
    assert len(set(newest)) == 1
    assert "the processes finish their step, save and stop" in log.read_text()
    assert "KeyboardInterrupt" not in log.read_text()


@pytest.mark.long
def test_a_rank_that_ignores_ctrl_c_is_killed_long_before_the_shutdown_timeout(script: Path) -> None:
    ignores = "if os.environ['RANK'] == '1':\n    signal.signal(signal.SIGINT, signal.SIG_IGN)"
    started = Started(script, ignores, "--shutdown-timeout=600")
    below = started.below()
    started.process.send_signal(signal.SIGINT)
    assert started.end()[0] == INTERRUPTED
    assert gone(below)


@pytest.mark.long
def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    """In a step that does not end, so that nothing can be saved."""
    log, wanted = tmp_path / "log", {"out": str(tmp_path), "hold_at": 3, "url": str(tmp_path / "commits")}
    agent = start(log, "--nproc-per-node=2", "--shutdown-timeout=600", str(SESSION), json.dumps(wanted))
    try:
        until(lambda: steps(tmp_path) == [3, 3], log)
        below = [pid for warm in children(agent.pid) for pid in [warm, *children(warm)]]
        agent.send_signal(signal.SIGINT)
        until(lambda: "Press Ctrl-C again" in log.read_text(), log)
        assert agent.poll() is None

        def pressed_again() -> bool:
            agent.send_signal(signal.SIGINT)
            return "again: all processes are killed" in log.read_text()

        until(pressed_again, log)
        assert agent.wait(LIMIT) == INTERRUPTED
    finally:
        agent.kill()
        agent.wait()
    assert gone(below)
    assert commits(tmp_path) == []


def test_ctrl_c_before_there_are_processes_leaves_nothing_behind_and_no_traceback(script: Path) -> None:
    script.parent.mkdir()
    script.write_text("")
    log = script.with_name("log")
    # Of two agents the other never comes.
    agent = start(log, "--nnodes=2", "--rdzv-backend=etcd-v3", "--rdzv-endpoint=127.0.0.1:9", str(script))
    until(lambda: children(agent.pid), log)
    below = children(agent.pid)
    agent.send_signal(signal.SIGINT)
    assert agent.wait(LIMIT) == INTERRUPTED, log.read_text()
    assert gone(below)
    assert "Traceback" not in log.read_text()
