"""What the threads of processes were doing, kept in files that outlive the processes and the agent.

    <log dir>/<run id>_<random>/stacks/round-3-step-17-rank-1.txt

Without a log dir they are below the machine's temporary folder, where they stay, and where others may write too.
Invariants: at most `KEPT` files of at most `MAX_BYTES` each, the newest; no link that somebody put there is followed.
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
SECONDS = 1.0  # in which a process writes what its threads do
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Stacks:
    """`at`: ` at train.py:31 in forward`, or nothing. `path`: where the text is; None if it could not be kept."""

    text: str
    at: str
    path: Path | None


def folder_of(run: str, log_folder: Path | None) -> Path:
    """Where the stacks of a run go. `log_folder`: the run's own, below the log dir that was asked for."""
    if log_folder is not None:
        return log_folder / "stacks"
    try:
        shared = private.folder("stacks")
    except OSError as e:
        shared = Path(tempfile.mkdtemp(prefix="everstep-stacks-"))
        log.warning("stacks are kept in %s: %s", shared, e)
    # Never `.` or `..`, which an id may be.
    return shared / ("run-" + re.sub(r"[^A-Za-z0-9._-]", "_", run)[:100])


async def written(path: Path, since: int, seconds: float = SECONDS) -> str:
    """What was added to a file after its first `since` bytes, once nothing more is."""
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


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def tail(path: Path, since: int = 0) -> str:
    """The last of what was added after `since` bytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(since, size_of(path) - MAX_BYTES))
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def place(text: str, script: str) -> str:
    """Where in the script a process is: ` at train.py:31 in forward`; nothing if it is not in it."""
    found = re.search(rf'File "([^"]*{re.escape(Path(script).name)})", line (\d+) in (\S+)', text)
    return f" at {Path(found[1]).name}:{found[2]} in {found[3]}" if found else ""


def keep(folder: Path, name: str, text: str) -> Path | None:
    """Write a text into the folder, and take the oldest away if there are too many."""
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
