"""A process that ends because it was asked to is not ended by another SIGTERM, and what it starts meanwhile is."""

from __future__ import annotations

import subprocess
import sys

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
