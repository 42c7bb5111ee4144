"""A process that ends because it was asked to is not ended by another SIGTERM, and what it starts meanwhile is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from everstep.reporting.stop_signal import StopSignal

ENDS = """
import atexit, os, signal, subprocess
from everstep.contract import env
from everstep.reporting.stop_signal import StopSignal

ask = os.kill

class Last:
    def __del__(self):
        ask(os.getpid(), signal.SIGTERM)  # Python is being taken apart
        print("the end", flush=True)

last = Last()
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
with StopSignal({env.AGENT_SOCKET: "/"}) as stop:
    stop.answered()
os.kill(os.getpid(), signal.SIGTERM)
with subprocess.Popen(["sleep", "600"]) as child:
    child.terminate()
    print("child", child.wait(120))
"""


def test_what_a_process_starts_at_its_end_can_be_terminated_and_it_cannot() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=180, check=False)
    assert done.stdout.splitlines() == ["child -15", "the end"], done
    assert done.returncode == 0, done.stderr


def test_context_that_ends_late_takes_no_handler_from_a_later_one() -> None:
    """A loop that was left open is closed when Python collects it: the next run was told that its script had set a
    handler of its own, and would not have heard that it is to stop."""
    usual = signal.getsignal(signal.SIGTERM)
    earlier, later = StopSignal({}), StopSignal({})
    earlier.__enter__()
    later.__enter__()
    earlier.__exit__(None, None, None)
    assert not later.replaced
    os.kill(os.getpid(), signal.SIGTERM)
    assert later.requested
    assert not earlier.requested
    later.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) == usual, "not that of a context that is over"
