"""Keeps the stacks of processes' threads in files that outlive the processes and the agent.

    <log dir>/<run id>_<random>/stacks/round-3-step-17-rank-1.txt

Without a log dir they are below the machine's temporary folder. They stay there, and other users may write there too.
Invariants: at most the newest `KEPT` files stay, of at most `MAX_BYTES` each; foreign links are not followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from everstep.contract import private

log = logging.getLogger("everstep.agent")

MAX_BYTES = 64 * 1024
KEPT = 256
SECONDS = 1.0  # for a process to write its stacks
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Stacks:
    """`at`: ` at train.py:31 in forward`, or empty. `path`: the file with the text; None if it could not be written."""

    text: str
    at: str
    path: Path | None


def folder_of(run: str, log_folder: Path | None) -> Path:
    """The folder for the stacks of a run. `log_folder`: the run's own folder in the log dir, if the user gave one."""
    if log_folder is not None:
        return log_folder / "stacks"
    try:
        shared = private.folder("stacks")
    except OSError as e:
        shared = Path(tempfile.mkdtemp(prefix="everstep-stacks-"))
        log.warning("stacks are kept in %s: %s", shared, e)
    # The prefix matters: an id may be `.` or `..`.
    return shared / ("run-" + re.sub(r"[^A-Za-z0-9._-]", "_", run)[:100])


async def written(path: Path, since: int, seconds: float = SECONDS) -> str:
    """The text added to a file after its first `since` bytes, once it no longer grows."""
    clock = asyncio.get_running_loop().time
    until = clock() + seconds
    size = since
    while clock() < until:
        await asyncio.sleep(POLL_SECONDS)
        now = size_of(path)
        if now == size > since:
            break
        size = now
    return tail(path, since)


def handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal. A program that took an interpreter's place (`--no-python`, an
    `exec` of the script) has none, and the signal would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> number - 1 & 1)


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def tail(path: Path, since: int = 0) -> str:
    """The end of the text added after `since` bytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, size_of(path) - MAX_BYTES))
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def script_line(text: str, script: str) -> str:
    """Where the process is in the script: ` at train.py:31 in forward`; empty if it is not in the script."""
    frame = re.search(rf'File "([^"]*{re.escape(Path(script).name)})", line (\d+) in (\S+)', text)
    return f" at {Path(frame[1]).name}:{frame[2]} in {frame[3]}" if frame else ""


def keep(folder: Path, name: str, text: str) -> Path | None:
    """Write a text into the folder, and remove the oldest files if there are too many."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / name
        private.write(path, text.encode(errors="replace")[-MAX_BYTES:])
        files = sorted(folder.iterdir(), key=lambda p: p.stat(follow_symlinks=False).st_mtime)
    except OSError:
        return None
    for old in files[:-KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()
    return path
