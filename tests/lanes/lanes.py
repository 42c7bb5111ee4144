"""The lanes of tests: `lanes.py LANE…` runs them one after another, and ends with the tests that had to be repeated.

A lane that fails is the last one that runs. What the lanes need is built beside the first ones (`background.py`); a
lane waits for what it needs itself. What its tests start is made sure of first (`testcluster/packages.py`). With
`--whole` a lane that fails does not end the run. With `--go-on` what an earlier run on the same commit passed is not
played again.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support import ROOT
from support.lanes import durations, ledger, results
from support.lanes.background import Background
from support.lanes.repeats import MOST, WHOLE_MOST, Outcome, Record, Repeated, play, report
from testcluster import builds, packages
from testcluster.proc import ClusterError

STATE = ROOT / ".everstep" / "lanes"
REPEATED = ROOT / ".everstep" / "repeated-tests.txt"
LEDGER = ROOT / ".everstep" / "repeated.jsonl"
BUDGET = "EVERSTEP_BUDGET"  # 1: a lane over its budget fails the run
EARLIER = ".earlier"  # the end of the name of what earlier runs on this commit recorded
LIMIT, WHOLE_LIMIT = 3600.0, 6 * 3600.0  # seconds for a lane


@dataclass(frozen=True, slots=True)
class Lane:
    """`chosen` selects its tests; `workers` run it side by side, so that a crash costs one test and not the lane."""

    folders: tuple[str, ...]
    chosen: tuple[str, ...]
    workers: int
    spread: tuple[str, ...]
    budget: float  # seconds on two cores, without its builds
    builds: tuple[str, ...] = ()  # of `testcluster/builds.py`

    def arguments(self) -> list[str]:
        return [*self.chosen, *(f"tests/{folder}" for folder in self.folders)]

    def parallel(self) -> list[str]:
        return ["-n", str(self.workers), *self.spread, durations.OPTION, f"--durations={SLOWEST}"]

    def programs(self) -> set[str]:
        """Docker is not among them: the cluster asks for it where none answers."""
        return {program for folder in self.folders for program in packages.of(folder)}


SLOWEST = 15  # tests whose seconds are told at the end of a lane: what has to leave when it takes too long
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
BY_TEST = ("--dist", "worksteal")
SERVERS = ("control plane", "etcd", "helm", "versitygw", "fake-gcs-server", "azurite", "monitoring kinds", "kueue")
NODES = ("helm", "versitygw", "node programs", "node file systems")
OF_SERVERS = (
    "run", "train", "adapters", "compat", "agent", "rendezvous", "recovery", "worker", "checkpoint", "storage",
    "apiserver", "conformance", "data", "model", "local", "cluster",
)  # fmt: skip
# Their budgets are fifteen minutes together. Fast ones first, so that a mistake shows within a minute; then those that
# need few builds, beside which the others' builds run; then servers; then nodes.
LANES = {
    "unit": Lane(("unit",), ("-m", "not long"), 3, BY_FILE, 110),
    "ordinary": Lane(("ordinary", "rehearse"), ("-m", "not long"), 2, BY_TEST, 75, ("etcd",)),
    "recipes": Lane(("recipes",), ("-m", "not long"), 2, BY_TEST, 65, ("etcd",)),
    "servers": Lane(OF_SERVERS, ("-m", "not kind and not long"), 4, BY_FILE, 425, SERVERS),
    "nodes": Lane(("cluster", "e2e"), ("-m", "kind and not alone and not long"), 3, BY_TEST, 75, NODES),
    "alone": Lane(("cluster", "e2e"), ("-m", "alone and not long"), 1, (), 150, NODES),
    # `make nightly` alone has these.
    "long": Lane(
        ("unit", "ordinary", "rehearse", "recipes", *OF_SERVERS), ("-m", "long and not kind"), 2, BY_TEST, WHOLE_LIMIT,
        (*SERVERS, "prometheus", "s3rver", "oldest API server", "newest API server"),
    ),
    "long-nodes": Lane(("cluster", "e2e"), ("-m", "long and kind and not alone"), 2, BY_TEST, WHOLE_LIMIT, NODES),
    "long-alone": Lane(
        ("cluster", "e2e"), ("-m", "long and kind and alone"), 1, (), WHOLE_LIMIT, (*NODES, "monitoring kinds", "kueue")
    ),
}  # fmt: skip


@dataclass(slots=True)
class Run:
    """What the lanes of one run came to. `commit` is that at its beginning."""

    commit: str
    repeated: list[Repeated] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    results: list[dict[str, object]] = field(default_factory=list)

    def enter(self, name: str, outcome: Outcome, seconds: float) -> None:
        budget = LANES[name].budget
        _say(f"lane {name}: {seconds:.0f} s, its budget is {budget:.0f} s\n")
        if seconds > budget:
            self.slow.append(f"lane {name} took {seconds:.0f} s, its budget is {budget:.0f} s")
        self.repeated += outcome.repeated
        self.problems += [outcome.problem] if outcome.problem else []
        self.measured |= {test: outcome.record.seconds[test] for test in outcome.record.passed}
        self.results += results.of_lane(name, outcome, self.commit)
        tests = [test for one in outcome.repeated for test in one.failure.tests]
        often = ledger.enter(LEDGER, name, tests, self.commit)
        if often:
            self.problems.append(
                f"lane {name}: repeated in more than {ledger.MOST} of its last {ledger.RUNS} runs: {', '.join(often)}: "
                f"mend it, then delete {LEDGER}"
            )


def _say(text: str) -> None:
    print(f"##### {text}", flush=True)


def _play(run: Run, background: Background, arguments: argparse.Namespace) -> None:
    """The lanes one after another, until one fails; with `--whole` all of them."""
    whole = arguments.whole
    for name in arguments.lane:
        lane = LANES[name]
        problem = background.wait(lane.builds, lambda text: _say(f"waiting: {text}"))
        try:
            packages.ensure(lane.programs(), f"lane {name}")
        except ClusterError as e:
            problem = problem or str(e)
        if problem:
            run.problems.append(f"lane {name}: {problem}")
        else:
            began = time.monotonic()
            before = 0 if whole else len(run.repeated)
            limit = WHOLE_LIMIT if whole else LIMIT
            most = WHOLE_MOST if whole else MOST
            earlier = _earlier(name) if arguments.go_on else None
            outcome = play(
                name, lane.arguments(), lane.parallel(), STATE, most=most, before=before, limit=limit, earlier=earlier
            )
            run.enter(name, outcome, time.monotonic() - began)
            if arguments.results:
                results.write(run.results, arguments.results)
        if run.problems and not whole:
            return


def _take_up(commit: str, go_on: bool) -> None:
    """Forget what runs on another commit passed; without `go_on`, also those on this one."""
    path = STATE / "commit"
    STATE.mkdir(parents=True, exist_ok=True)
    same = path.exists() and path.read_text() == commit and not commit.endswith("-dirty")
    if not (go_on and same):
        for old in (*STATE.glob(f"*{EARLIER}"), *STATE.glob("*.jsonl")):
            old.unlink()
    path.write_text(commit)


def _earlier(name: str) -> Record | None:
    """What the runs on this commit have of a lane so far: the last one's record is added to those before it."""
    kept, last = STATE / f"{name}{EARLIER}", STATE / f"{name}.jsonl"
    if last.exists():
        with kept.open("a") as record:
            record.write(last.read_text())
        last.unlink()
    return Record.read(kept, 0) if kept.exists() else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lane", nargs="+", choices=sorted(LANES))
    parser.add_argument("--lint", action="store_true", help="`make lint docs` first, while the builds begin")
    parser.add_argument("--whole", action="store_true", help="a lane that fails does not end the run")
    parser.add_argument("--go-on", action="store_true", help="leave out what an earlier run on this commit passed")
    parser.add_argument("--record", action="store_true", help=f"keep the tests' seconds in {durations.FILE.name}")
    parser.add_argument("--results", type=Path, help="a file for each test's outcome, seconds and commit, as JSON")
    return parser.parse_args()


def _needed(names: Sequence[str]) -> list[str]:
    """The builds of these lanes, those of the first lane first, and of each lane the longest first."""
    return list(dict.fromkeys(build for name in names for build in builds.in_order(LANES[name].builds)))


def _lint() -> str:
    done = subprocess.run(["make", "-s", "lint", "docs"], check=False)
    return "" if done.returncode == 0 else "lint, or the site of the documents: the errors are above"


def _end(run: Run, arguments: argparse.Namespace) -> int:
    """Write what is to be kept, and print what a person has to know; the exit status."""
    if arguments.record:
        durations.write(durations.merge(durations.read(), run.measured))
    if arguments.results and ledger.commit_of(ROOT) != run.commit:
        run.problems.append(f"the tests began on {run.commit}, and {ledger.commit_of(ROOT)} is checked out now")
    if run.slow and os.environ.get(BUDGET) == "1":
        run.problems += run.slow
    print(report(run.repeated, REPEATED))
    for line in run.slow:
        _say(f"over budget: {line}")
    for problem in run.problems:
        _say(f"FAILED: {problem}")
    return 1 if run.problems else 0


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does, it ends pytest and its servers
    os.chdir(ROOT)  # the names of tests count from here
    run = Run(ledger.commit_of(ROOT))
    _take_up(run.commit, arguments.go_on)
    background = Background(_needed(arguments.lane), STATE)
    try:
        problem = _lint() if arguments.lint else ""
        if problem:
            run.problems.append(problem)
        else:
            _play(run, background, arguments)
    finally:
        background.stop()
    return _end(run, arguments)


if __name__ == "__main__":
    sys.exit(main())
