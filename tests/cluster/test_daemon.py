"""A test's server never outlives the test run, and a failure to start shows the server's own words."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from testcluster.daemon import Daemon, free_ports
from testcluster.proc import ClusterError

OWNER = """
import sys, time
from pathlib import Path
from testcluster.daemon import Daemon
daemon = Daemon(["sleep", "1000"], Path(sys.argv[1]), lambda: True)
daemon.start()
print(daemon.pid, flush=True)
time.sleep(1000)
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_owner_killed_at_once_takes_its_server_along(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True, env=environment
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert alive(pid)
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, "the server outlived its owner"
        time.sleep(0.02)


def test_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    daemon = Daemon(["sh", "-c", "echo no such disk; exit 3"], tmp_path / "log", lambda: False)
    with pytest.raises(ClusterError, match="no such disk"):
        daemon.start()


def test_server_killed_and_started_answers_again(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/"

    def answers() -> bool:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)

    argv = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    daemon = Daemon(argv, tmp_path / "log", answers)
    daemon.start()
    try:
        first = daemon.pid
        daemon.kill()
        with pytest.raises(OSError, match="refused"):
            answers()
        daemon.start()
        assert answers()
        assert daemon.pid != first
    finally:
        daemon.stop()
