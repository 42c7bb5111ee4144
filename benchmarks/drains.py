"""Measures a drain: how long the training stands still, and how many steps are repeated, when a worker has to leave.

    python benchmarks/drains.py [--quick] [--json PATH] [--trials N] [--workers N]

`everstep run` runs a small DDP script with the session, of a fixed number of workers. In each trial a worker has to
leave: a person moves it (`everstep migrate`), its pod is deleted with its grace period, as an eviction does it, or its
pod dies at once. `pause` is the longest time from a step of the full world to the next of all ranks, from the moment
that the worker has to leave until its place is taken; `repeated` is how many steps a rank has made twice.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "recovery_parts")]
from figures import Better, Figure, finish, parser, quantile
from spares import SETTLED, Run

GOAL = 0.3  # seconds


# The words of `everstep`, before the pod.
WAYS = {"migrated": ("migrate", "--no-wait"), "evicted": ("kill", "--delete"), "killed": ("kill",)}


def all_pods(run: Run, without: str = "") -> list[str]:
    """The pods of the workers that train; none if some are missing, or this one is there."""
    rows = run.view().get("workers", ())
    found = sorted(row["pod"] for row in rows if row["rank"] is not None and row["pid"])
    return found if len(found) == run.workers and without not in found else []


def trial(run: Run, way: str, number: int) -> tuple[float, int]:
    """Seconds of the longest pause, and the number of repeated steps."""
    since = time.monotonic()
    run.until(partial(run.full, since), "all ranks train")
    time.sleep(SETTLED)
    before = run.until(partial(all_pods, run), "all workers have processes")
    pod = before[number % len(before)]
    began = time.monotonic()
    command = [sys.executable, "-m", "everstep.cli.main", *WAYS[way], pod]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    run.until(partial(all_pods, run, pod), f"another has the place of {pod}")
    after = time.monotonic()
    run.until(partial(run.full, after), "all ranks train")
    return pause(run, began - 1.0), repeated(run, began - 1.0)


def pause(run: Run, since: float) -> float:
    """The longest time from one step of the full world to the next. A step is made when its last rank has made it."""
    made: dict[int, float] = {}
    for _, _, step, at in steps(run, since):
        made[step] = max(made.get(step, at), at)
    return max(later - before for before, later in pairwise(sorted(made.values())))


def repeated(run: Run, since: float) -> int:
    """How many more steps the ranks have made than there are."""
    made = [(rank, step) for _, rank, step, _ in steps(run, since)]
    return len(made) - len(set(made))


def steps(run: Run, since: float) -> Iterator[tuple[int, int, int, float]]:
    """Process, rank, step and time of each step of a full world after `since`."""
    for path in run.steps.glob("*.steps"):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 6 and int(words[2]) == run.workers and float(words[5]) > since:
                yield int(words[0]), int(words[1]), int(words[3]), float(words[5])


def measure(workers: int, way: str, trials: int) -> tuple[list[float], int]:
    pauses, lost = [], 0
    folder = tempfile.TemporaryDirectory(prefix=f"everstep-{way}-")
    with folder as name, Run(Path(name), workers, 0, fixed=True) as run:
        for number in range(trials):
            took, again = trial(run, way, number)
            pauses.append(took)
            lost += again
            print(f"{way}, trial {number}: pause {took:.2f} s, {again} steps repeated", file=sys.stderr)
    return pauses, lost


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--trials", type=int, default=10)
    p.add_argument("--workers", type=int, default=3)
    args = p.parse_args()
    trials = 1 if args.quick else args.trials
    figures = []
    for way in WAYS:
        pauses, lost = measure(args.workers, way, trials)
        moves = way != "killed"
        goal = GOAL if moves else None
        figures.append(Figure(f"{way}.pause.p50", quantile(pauses, 0.5), "s", Better.LOWER, trials, goal))
        figures.append(Figure(f"{way}.pause.max", max(pauses), "s", Better.LOWER, trials))
        figures.append(Figure(f"{way}.repeated", lost, "steps", Better.LOWER, trials, 0 if moves else None))
    return finish(figures, args)


if __name__ == "__main__":
    sys.exit(main())
