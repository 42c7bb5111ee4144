"""Directs the output of training processes to the console, log files, or both.

    <log dir>/<run id>_<random>/attempt_<n>/<local rank>/stdout.log, stderr.log, error.json, stacks.txt, calls
    <log dir>/<run id>_<random>/stacks/round-<n>-step-<n>-rank-<n>.txt    of ranks that hung or waited for one that did

A process writes its log file itself. Output that the console shows too is read from the file. So a slow console stops
no process, and a killed process loses no line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import IO, TextIO

from everstep.agent.arguments import Arguments, streams
from everstep.agent.processes.stacks import folder_of

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
PREFIX = "[${role_name}${local_rank}]:"


@dataclass(frozen=True, slots=True)
class Files:
    """Paths for one process; None: the console."""

    stdout: str | None
    stderr: str | None
    error: Path
    stacks: Path  # of its threads, written when a signal asks for it, or when it crashes
    calls: Path  # its newest collectives


class Output:
    """The log files of an agent's processes. `close` removes them unless the user asked for a log folder."""

    def __init__(self, arguments: Arguments, environ: Mapping[str, str]) -> None:
        self._arguments = arguments
        run = re.sub(r"[^A-Za-z0-9._-]", "_", arguments.run_id)[:100]
        self._kept = arguments.log_dir is not None
        base = Path(arguments.log_dir) if arguments.log_dir else Path(tempfile.mkdtemp(prefix="everstep-run-"))
        self.folder = base / f"{run}_{secrets.token_hex(4)}"
        self._base = base
        self._template = Template(environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or PREFIX)
        self._attempts: dict[int, int] = {}
        self._tails: dict[int, list[asyncio.Task[None]]] = {}
        self._ended: dict[int, asyncio.Event] = {}

    def stacks(self) -> Path:
        """The folder for the stacks of processes that do not go on; `close` does not remove it."""
        return folder_of(self._arguments.run_id, self.folder if self._kept else None)

    def open(self, slot: int, rank: int) -> Files:
        """The files for the next process of a local rank. The console shows its teed output from now on."""
        attempt = self._attempts.get(slot, -1) + 1
        self._attempts[slot] = attempt
        folder = self.folder / f"attempt_{attempt}" / str(slot)
        folder.mkdir(parents=True, exist_ok=True)
        a = self._arguments
        redirected, teed = streams(a.redirects, slot), streams(a.tee, slot)
        shown = a.filter is None or slot in a.filter
        prefix = self._template.safe_substitute(role_name=a.role, local_rank=slot, rank=rank)
        paths: list[str | None] = []
        ended = asyncio.Event()
        tails = []
        for i, (name, console) in enumerate((("stdout.log", sys.stdout), ("stderr.log", sys.stderr))):
            path = folder / name
            if redirected[i] or teed[i]:
                path.touch()
                paths.append(str(path))
                if teed[i] and shown:
                    tails.append(asyncio.create_task(_tail(path, console, prefix, ended)))
            else:
                paths.append(None if shown else os.devnull)
        self._tails[slot], self._ended[slot] = tails, ended
        return Files(paths[0], paths[1], folder / "error.json", folder / "stacks.txt", folder / "calls")

    async def ended(self, slot: int) -> None:
        """The process has ended: show the rest of its output."""
        if slot in self._ended:
            self._ended.pop(slot).set()
            for error in await asyncio.gather(*self._tails.pop(slot), return_exceptions=True):
                if error is not None:  # the console is gone, but the process's end must be reported all the same
                    log.warning("local rank %d: what it said is not shown: %s", slot, error)

    async def close(self) -> None:
        for slot in list(self._ended):
            await self.ended(slot)
        if not self._kept:
            shutil.rmtree(self._base, ignore_errors=True)


async def _tail(path: Path, console: TextIO, prefix: str, ended: asyncio.Event) -> None:
    with path.open("rb") as file:
        rest = b""
        while True:
            last = ended.is_set()
            try:
                rest = _copy(file, rest, console, prefix, last)
            except OSError:
                _give_up(console)
                raise
            if last:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), LOOK_SECONDS)


def _give_up(console: TextIO) -> None:
    """Discard buffered and further output. Otherwise Python would try to write it at its end, and exit with 120 in
    place of the agent's code."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, console.fileno())
    os.close(nowhere)


def _copy(file: IO[bytes], rest: bytes, console: TextIO, prefix: str, last: bool) -> bytes:
    data = rest + file.read()
    *lines, rest = data.split(b"\n")
    if last and rest:
        lines, rest = [*lines, rest], b""
    for line in lines:
        console.write(f"{prefix}{line.decode(errors='replace')}\n")
    if lines:
        console.flush()
    return rest
