"""Whose fault the end of a process was. Reads the error file and the kernel's count of processes ended for memory."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from everstep.agent.events import Fault
from everstep.contract import exit_codes

MAX_ERROR_FILE = 1024 * 1024
MAX_WHY = 180
MAX_STACKS = 16 * 1024

# What torch, gloo and NCCL say when a peer is gone. A program can print the same for another reason, so such an end is
# charged after all if nobody else was lost.
_PEER = re.compile(
    r"Connection (?:closed|reset|refused|timed out)|[Bb]roken pipe|PeerLost|RoundsOver|remote process (?:exited|has)|"
    r"DistNetworkError|DistStoreError|DistBackendError|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|"
    r"Timed out waiting|wait timeout|Socket closed|failed to recv|failed to connect|unhandled system error"
)
_KILLED = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def judge(code: int, error_file: Path, out_of_memory: bool) -> tuple[Fault, str]:
    """The fault, and one line that says what happened. `code`: 0 to 255, or minus the signal."""
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        if out_of_memory and code == -signal.SIGKILL:
            return Fault.PROGRAM, f"{name}: out of memory"
        return (Fault.OUTSIDE if -code in _KILLED else Fault.PROGRAM), name
    if code == exit_codes.NOT_RECOVERED:
        return Fault.OUTSIDE, f"exit code {code}: it lost its peers and could not go on from what it held"
    said = _error(error_file)
    why = f"exit code {code}" + (f": {said}" if said else "")
    return (Fault.PEER if _PEER.search(said) else Fault.PROGRAM), why[:MAX_WHY]


def _error(path: Path) -> str:
    """The message of an error file that torch's `record` or our program wrote, in one line."""
    try:
        with path.open("rb") as file:
            message = json.loads(file.read(MAX_ERROR_FILE))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if isinstance(message, dict):
        message = message.get("message", "")
    return " ".join(str(message).split())


def read_stacks(path: Path, script: str) -> tuple[str, str]:
    """What the threads of a process were doing, and where in the script: ` at train.py:31 in forward`, or nothing."""
    try:
        text = path.read_text(errors="replace")[-MAX_STACKS:]
    except OSError:
        return "", ""
    found = re.search(rf'File "([^"]*{re.escape(Path(script).name)})", line (\d+) in (\S+)', text)
    return text, f" at {Path(found[1]).name}:{found[2]} in {found[3]}" if found else ""


def memory_kills(root: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes of this container the kernel has ended for want of memory (cgroup v2, else v1)."""
    for path in (root / "memory.events", root / "memory" / "memory.oom_control"):
        try:
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        except (OSError, ValueError):
            continue
    return 0
