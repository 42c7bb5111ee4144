"""Measures a warm spare: the seconds from a worker's death until all ranks train again, with a spare and without.

    python benchmarks/spares.py [--quick] [--json PATH] [--trials N] [--workers N]

`everstep run` runs a small DDP script with the session, once without spares and once with one. In each trial a worker
that trains is killed as a power cut would do it: its agent with all of its processes. `all` is the time from there to
the first step of the last rank of a full world. The next trial begins when the world is full and, with a spare, when
the new spare waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "recovery_parts")]
from figures import Better, Figure, finish, parser, quantile
from job import children

SCRIPT = HERE / "recovery_parts" / "train.py"
LIMIT = 180.0  # seconds that any wait may take
SETTLED = 2.0  # seconds that a full world trains before the next worker is killed
GOAL = 1.0  # seconds

T = TypeVar("T")


class Run:
    """A job of `everstep run`, and the lines of its processes: pid, rank, world, step, checksum, time."""

    def __init__(self, folder: Path, workers: int, spares: int, *, fixed: bool = False) -> None:
        self.folder, self.workers, self.spares = folder, workers, spares
        self.name = f"{folder.name}-{spares}".lower().replace("_", "-")
        sizes = ["--elastic", f"{workers if fixed else 1}:{workers}", "--spares", str(spares)]
        self.steps = folder / "steps"
        self.steps.mkdir(parents=True)
        command = [
            sys.executable, "-m", "everstep.cli.main", "run", str(SCRIPT), "--plain", "--name", self.name,
            "--workers", str(workers), *sizes,
            "--out", str(folder / "out"), "--", str(self.steps), "--session",
        ]  # fmt: skip
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._log = (folder / "run.log").open("wb")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environ)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self._log.close()

    def lines(self, since: float) -> Iterator[tuple[int, int, float]]:
        """Pid, rank and time of each step of a full world after `since`."""
        for path in self.steps.glob("*.steps"):
            if path.stat().st_mtime < time.time() - (time.monotonic() - since):
                continue
            for line in path.read_text().splitlines():
                words = line.split()
                if len(words) == 6 and int(words[2]) == self.workers and float(words[5]) > since:
                    yield int(words[0]), int(words[1]), float(words[5])

    def full(self, since: float) -> dict[int, tuple[float, int]]:
        """Of each rank its first step in a full world after `since`, and its process; empty until all have made one."""
        first: dict[int, tuple[float, int]] = {}
        for pid, rank, at in self.lines(since):
            first[rank] = min(first.get(rank, (at, pid)), (at, pid))
        return first if len(first) == self.workers else {}

    def waiting(self) -> bool:
        """Whether all spares wait, by the status that the run keeps."""
        return self.spares == 0 or self.view().get("raw_status", {}).get("spares", {}).get("ready") == self.spares

    def view(self) -> Any:
        """What `everstep status` says; empty while the run does not answer."""
        told = subprocess.run(
            [sys.executable, "-m", "everstep.cli.main", "status", self.name, "-o", "json"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return json.loads(told.stdout) if told.returncode == 0 else {}

    def until(self, true: Callable[[], T], what: str) -> T:
        deadline = time.monotonic() + LIMIT
        while not (value := true()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                log = (self.folder / "run.log").read_text()[-4000:]
                raise RuntimeError(f"not within {LIMIT:g} s: {what}\n{log}")
            time.sleep(0.02)
        return value


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def cut(trainer: int) -> float:
    """Kill the agent of this process with all that it started; when that was done."""
    fork_server = parent(trainer)
    agent = parent(fork_server)
    os.kill(agent, signal.SIGSTOP)  # so that it starts nothing meanwhile
    pids = [agent, *(pid for one in children(agent) for pid in (one, *children(one)))]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def measure(workers: int, spares: int, trials: int) -> list[float]:
    """Seconds of each trial until all ranks train again."""
    taken = []
    with tempfile.TemporaryDirectory(prefix="everstep-spares-") as name, Run(Path(name), workers, spares) as run:
        since = time.monotonic()
        for trial in range(trials):
            run.until(partial(run.full, since), "all ranks train")
            run.until(run.waiting, "the spare waits")
            time.sleep(SETTLED)
            now = time.monotonic()
            ranks = run.until(partial(run.full, now), "all ranks train")
            since = cut(ranks[trial % workers][1])
            again = run.until(partial(run.full, since), "all ranks train again")
            taken.append(max(at for at, _ in again.values()) - since)
            print(f"{spares} spares, rank {trial % workers} killed: {taken[-1]:.2f} s", file=sys.stderr)
    return taken


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--trials", type=int, default=10)
    p.add_argument("--workers", type=int, default=2)
    args = p.parse_args()
    trials = 2 if args.quick else args.trials
    figures = []
    for spares in (0, 1):
        seconds = measure(args.workers, spares, trials)
        goal = GOAL if spares else None
        figures.append(Figure(f"spares_{spares}.all.p50", quantile(seconds, 0.5), "s", Better.LOWER, trials, goal))
        figures.append(Figure(f"spares_{spares}.all.max", max(seconds), "s", Better.LOWER, trials))
    return finish(figures, args)


if __name__ == "__main__":
    sys.exit(main())
