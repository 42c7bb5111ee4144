"""Judges whose fault the end of a process was, and finds the first error.

It reads the error files, and the kernel's count of processes that it killed for lack of memory."""

from __future__ import annotations

import json
import logging
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.agent.decide.events import Fault
from everstep.contract import exit_codes, process_end, redact, termination

log = logging.getLogger(__name__)

MAX_ERROR_FILE = 1024 * 1024
MAX_WHY = 1500  # characters; of a longer refusal the beginning, and the end with the line to write instead

# The messages of torch, gloo and NCCL when a peer is gone. A program can fail with the same words for another reason.
# So such an end is charged later if no peer was lost.
_PEER = re.compile(
    r"Connection (?:closed|reset|refused|timed out)|[Bb]roken pipe|PeerLost|RoundsOver|remote process (?:exited|has)|"
    r"DistNetworkError|DistStoreError|DistBackendError|ncclRemoteError|ncclSystemError|NCCL communicator was aborted|"
    r"Timed out waiting|wait timeout|Socket closed|failed to recv|failed to connect|unhandled system error"
)


def judge(code: int, error_file: Path, out_of_memory: bool) -> tuple[Fault, str]:
    """The fault, and one line of explanation. `code`: 0 to 255, or minus the signal."""
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        if out_of_memory and code == -signal.SIGKILL:
            return Fault.PROGRAM, name + process_end.OUT_OF_MEMORY
        return (Fault.OUTSIDE if -code in process_end.FROM_OUTSIDE else Fault.PROGRAM), name
    if code == exit_codes.NOT_RECOVERED:
        return Fault.OUTSIDE, f"exit code {code}: it lost its peers and could not go on from what it held"
    content = _read(error_file) or {}
    error = _error(content)
    why = f"exit code {code}" + (f": {error}" if error else "")
    if code == 1 and _refused_early(content):
        return Fault.REFUSED, redact.ends(why, MAX_WHY)
    return (Fault.PEER if _PEER.search(error) else Fault.PROGRAM), redact.ends(why, MAX_WHY)


def _refused_early(content: Mapping[str, Any]) -> bool:
    """Whether the session has refused the script in one of its first steps, or before."""
    try:
        return termination.is_early(content["message"]["extraInfo"]["refusedAfter"])
    except (KeyError, TypeError):
        return False


def _error(content: Mapping[str, Any]) -> str:
    """The message of an error file, in one line. torch's `record` or our `program` module wrote the file."""
    message = content.get("message", "")
    if isinstance(message, dict):
        message = message.get("message", "")
    return " ".join(str(message).split())


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_ERROR_FILE))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


class FirstError:
    """The first process that failed in the newest round. The agent's parent gets its error file, as with torchrun."""

    def __init__(self) -> None:
        self._first: tuple[int, int, int, dict[str, Any]] | None = None

    def note(self, round_: int, error_file: Path, code: int, why: str) -> None:
        """A process of the round failed."""
        content = _read(error_file) or _content(why)
        when = _when(content)
        if self._first is None or self._first[0] < round_ or when < self._first[1]:
            self._first = (round_, when, code, content)

    def write(self, path: str, code: int, why: str) -> None:
        """Write the first error to `path`; if no process failed, the reason for the agent's end."""
        content = _content(why)
        if self._first is not None:
            _, _, code, content = self._first
        if isinstance(content.get("message"), dict):
            content["message"]["errorCode"] = code
        try:
            Path(path).write_text(json.dumps(content))
        except OSError as e:
            log.warning("%s: the first error cannot be written: %s", path, e)


def _content(why: str) -> dict[str, Any]:
    """The content of an error file for a process that wrote none."""
    return {"message": {"message": why, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}}


def _when(content: dict[str, Any]) -> int:
    """The time of the error in seconds since the epoch; now, if the file does not say."""
    try:
        return int(content["message"]["extraInfo"]["timestamp"])
    except (KeyError, TypeError, ValueError):
        return int(time.time())


def memory_kills() -> int:
    """How many processes of this container the kernel has killed for lack of memory (cgroup v2, else v1)."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            for line in Path(path).read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        except (OSError, ValueError):
            continue
    return 0
