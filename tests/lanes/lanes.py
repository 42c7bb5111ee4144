"""The lanes of tests: `lanes.py LANE…` runs them one after another, and ends with the tests that had to be repeated.

A lane that fails is the last one that runs. What its tests start is made sure of first (`testcluster/packages.py`). Of
the tests that take turns (`turns.py`), those of the present commit run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass

from support import ROOT
from support.lanes.repeats import Repeated, play, report
from support.lanes.turns import TURN, of_commit
from testcluster import packages
from testcluster.proc import ClusterError

STATE = ROOT / ".everstep" / "lanes"
REPEATED = ROOT / ".everstep" / "repeated-tests.txt"


@dataclass(frozen=True, slots=True)
class Lane:
    """`chosen` selects its tests; `workers` run it side by side, so that a crash costs one test and not the lane."""

    folders: tuple[str, ...]
    chosen: tuple[str, ...]
    workers: int
    spread: tuple[str, ...]

    def arguments(self) -> list[str]:
        return [*self.chosen, *(f"tests/{folder}" for folder in self.folders)]

    def parallel(self) -> list[str]:
        return ["-n", str(self.workers), *self.spread, f"--durations={SLOWEST}"]

    def programs(self) -> set[str]:
        """Docker is not among them: the cluster asks for it where none answers."""
        return {program for folder in self.folders for program in packages.of(folder)}


SLOWEST = 15  # tests whose seconds are told at the end of a lane: what has to leave when it takes too long
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
BY_TEST = ("--dist", "worksteal")
# Fast ones first, so that a mistake shows within a minute; then servers; then nodes.
LANES = {
    "unit": Lane(("unit",), (), 2, BY_FILE),
    "servers": Lane(
        ("run", "train", "adapters", "compat", "agent", "rendezvous", "recovery", "worker", "checkpoint", "storage",
         "apiserver", "conformance", "data", "model", "local", "cluster"),
        ("-m", "not kind and not long"), 3, BY_FILE,
    ),
    "ordinary": Lane(("ordinary", "rehearse"), ("-m", "not long"), 2, BY_TEST),
    "recipes": Lane(("recipes",), ("-m", "not long"), 2, BY_TEST),
    "nodes": Lane(("cluster", "e2e"), ("-m", "kind and not alone and not long"), 3, BY_TEST),
    "alone": Lane(("cluster", "e2e"), ("-m", "alone and not long"), 1, ()),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lane", nargs="+", choices=sorted(LANES))
    names = parser.parse_args().lane
    os.chdir(ROOT)  # the names of tests count from here
    turn = os.environ.setdefault(TURN, str(of_commit(ROOT)))
    print(f"##### of tests that take turns, those of {TURN}={turn}\n", flush=True)
    repeated: list[Repeated] = []
    problem, began = "", time.monotonic()
    for name in names:
        lane = LANES[name]
        try:
            packages.ensure(lane.programs(), f"lane {name}")
        except ClusterError as e:
            problem = str(e)
            break
        outcome = play(name, lane.arguments(), lane.parallel(), STATE, before=len(repeated))
        repeated += outcome.repeated
        problem = outcome.problem
        print(f"##### lane {name}: {time.monotonic() - began:.0f} s since the first began\n", flush=True)
        if problem:
            break
    print(report(repeated, REPEATED))
    if problem:
        print(f"##### FAILED: {problem}")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
