"""A round whose store's host dies is told in one line, without torch's C++ frames; other warnings are shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from everstep.membership.torch_log import warnings_off
from everstep.recovery.announcements import AnnouncedRound
from everstep.recovery.forming import forming

HOST = """
import sys, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that hosts a store, and its port."""
    made = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    yield made, int(made.stdout.readline())
    made.kill()
    made.wait()


def kill_when_asked_for(key: str, made: subprocess.Popen[str], port: int) -> None:
    """End the host once somebody has written this key: it then waits for another's."""
    client = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    client.get(key)
    os.kill(made.pid, signal.SIGKILL)


def test_a_round_whose_host_dies_while_it_forms_leaves_no_frames(
    host: tuple[subprocess.Popen[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    made, port = host
    with warnings_off():  # the killer's own client hears of it, too
        killer = threading.Thread(target=kill_when_asked_for, args=("round-3/link/0", made, port))
        killer.start()
    with pytest.raises(forming.FormingFailed, match="round 3: ") as found:
        forming.form(AnnouncedRound(3, 0, 2, ("127.0.0.1", port)), lambda: False, 60.0)
    killer.join()
    assert "\n" not in str(found.value)
    assert "frame #" not in capfd.readouterr().err


@pytest.mark.long
def test_warnings_are_shown_again_afterwards(
    host: tuple[subprocess.Popen[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    made, port = host
    client = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    with warnings_off(), warnings_off():
        pass
    made.kill()
    made.wait()
    with warnings_off(), pytest.raises(RuntimeError):
        client.get("x")
    assert "frame #" not in capfd.readouterr().err
    with pytest.raises(RuntimeError):
        client.get("x")
    assert "[c10d]" in capfd.readouterr().err


def test_without_torch_nothing_happens() -> None:
    code = "from everstep.membership.torch_log import warnings_off\nwith warnings_off():\n    print('here')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("here\n", "")
