"""Runs a recipe whose processes have roles, without an operator: `python train.py` as often as there are workers.

A process that was killed is started again, as an operator would do it, but a lost worker only after the first process
was lost too: until then the others show what they do without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.recipes.recipes import EXAMPLES, SECONDS, Ended, RecipeFailed, loaded


@dataclass(slots=True)
class Player:
    """A place in the job; `starts` counts its processes."""

    index: int
    command: Sequence[str]
    folder: Path
    printed: Path
    starts: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}
        environment |= {"EVERSTEP_CHECKPOINT_URL": str(self.folder / "commits"), "OMP_NUM_THREADS": "1"}
        environment |= {"EVERSTEP_WORKER_INDEX": str(self.index), "EVERSTEP_INCARNATION": str(self.starts)}
        with self.printed.open("ab") as printed:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed
            )
        self.starts += 1

    def code(self) -> int | None:
        return self.process.poll() if self.process is not None else None


def played(
    name: str, folder: Path, arguments: Sequence[str], processes: int, through: Sequence[str | Path] = ()
) -> tuple[Ended, list[int]]:
    """The run, once all of its processes have succeeded, and how often each was started. `through`: a script of the
    test that runs the recipe's, and its first arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *map(str, through), str(EXAMPLES / name / "train.py"), *arguments]
    with tempfile.TemporaryDirectory() as logs:
        players = [Player(i, command, folder, Path(logs, f"{i}.txt")) for i in range(processes)]
        try:
            for player in players:
                player.start()
            _until_all_succeed(players)
        finally:
            for player in players:
                if player.code() is None and player.process is not None:
                    player.process.kill()
                    player.process.wait()
        return loaded(folder, _printed(players)), [player.starts for player in players]


def _until_all_succeed(players: Sequence[Player]) -> None:
    deadline = time.monotonic() + SECONDS
    while any(player.code() != 0 for player in players):
        for player in players:
            match player.code():
                case None | 0:
                    pass
                case code if code == -signal.SIGKILL:
                    if player.index == 0 or players[0].starts > 1:
                        player.start()
                case code:
                    raise RecipeFailed(f"process {player.index} ended with {code}:\n{_printed(players)[-6000:]}")
        if time.monotonic() > deadline:
            codes = [player.code() for player in players]
            raise RecipeFailed(f"not over after {SECONDS} s; exit codes {codes}:\n{_printed(players)[-6000:]}")
        time.sleep(0.02)


def _printed(players: Sequence[Player]) -> str:
    return "\n".join(player.printed.read_text() for player in players if player.printed.exists())
