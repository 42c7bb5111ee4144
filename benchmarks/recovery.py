"""Fault -> next optimizer step, for stock torchrun and for each way of ours, by the same faults in the same run.

    python benchmarks/recovery.py [--quick] [--json PATH] [--ways NAME,NAME] [--trials N] [--default-trials N]

Three agents with one process each on this machine, minimum two. A trial kills a training process; kills an agent with
its process and starts a new one; does the same to the agent that hosts the store of the world (that of rank 0); stops
an agent (SIGSTOP). After each fault it waits until all ranks of the world that is left have made a step ("survivors"),
and until there are three again ("all").
`regrow` is the longest pause between two steps of a survivor while the new agent comes in. What does not happen within
its limit counts as a failure, and ends the trial; the figure `recovered` says how many did not.
The store of ours is a real etcd. `recovery_kind.py` measures on Kubernetes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE), str(HERE / "recovery_parts"), str(TESTS / "rendezvous"), str(TESTS / "cluster"), str(TESTS)]
from etcd_server import EtcdCluster
from figures import Better, Figure, FigureError, finish, parser, quantile
from job import START, Job, NeverError, Way

TUNED = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)
TUNED_CONF = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"
OURS = "last_call=30,ttl=2"
TORCHRUN, AGENT = "torch.distributed.run", "everstep.agent.main"
WAYS = (
    Way("stock_default", TORCHRUN, "c10d"),
    Way("stock_tuned", TORCHRUN, "c10d", TUNED_CONF, environ=TUNED),
    Way("torchrun_etcd", TORCHRUN, "etcd-v3", "last_call=5,ttl=2"),
    Way("everstep_run", AGENT, "etcd-v3", OURS),
    Way("session", AGENT, "etcd-v3", OURS, session=True),
)
LIMITS = {"stock_default": 130.0, "stock_tuned": 75.0}
LIMIT = 60.0
GOALS = {
    ("session", "process.survivors"): 0.3,
    ("session", "agent.survivors"): 1.0,
    ("session", "host.survivors"): 1.0,
    ("session", "regrow.pause"): 0.3,
    ("session", "stop.survivors"): 5.0,
}
Samples = dict[tuple[str, str], list[float]]


class Trials:
    """Faults on one job after the other; a job that was lost to a fault is replaced."""

    def __init__(self, way: Way, etcd: str, samples: Samples) -> None:
        self._way, self._etcd, self._samples = way, etcd, samples
        self._limit = LIMITS.get(way.name, LIMIT)
        self._job: Job | None = None
        self.failed = 0
        self.faults = 0

    def run(self, faults: tuple[str, ...]) -> None:
        for fault in faults:
            self.faults += 1
            try:
                self._one(fault)
            except NeverError as e:
                self.failed += 1
                print(f"{self._way.name} {fault}: {e}", file=sys.stderr)
                self.close()

    def close(self) -> None:
        if self._job is not None:
            self._job.close()
            shutil.rmtree(self._job.folder)
            self._job = None

    def _one(self, fault: str) -> None:
        job = self._whole()
        agents = [a for a in job.agents if a.poll() is None]
        host, first = job.host(), job.first()
        other = next(a for a in agents if a is not first and a is not host)
        limit = self._limit
        if fault == "process":
            pid = job.trainer(other)
            at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            if self._way.session:
                self._note("process.survivors", job.world(2, at, limit))
            self._note("process.all", job.world(3, at, limit))
            return
        victim = host if fault == "host" else other
        survivors = [a for a in agents if a is not victim]
        at = job.stop(victim) if fault == "stop" else job.kill(victim)
        self._note(f"{fault}.survivors", job.world(2, at, limit, survivors))
        if fault == "stop":
            job.kill(victim)
        pids = [job.trainer(a) for a in survivors]
        began = time.monotonic()
        job.start()
        self._note("regrow.all", job.world(3, began, limit))
        if self._way.session:
            self._note("regrow.pause", job.longest_pause(pids, began))

    def _whole(self) -> Job:
        """A job of three that trains."""
        if self._job is None:
            self._job = Job(Path(tempfile.mkdtemp(prefix="everstep-recovery-")), self._way, self._etcd)
            self._job.start(3)
        self._job.world(3, time.monotonic() - 0.001, START)
        return self._job

    def _note(self, name: str, seconds: float) -> None:
        self._samples[(self._way.name, name)].append(seconds)


def measure(ways: list[Way], trials: dict[str, int], faults: tuple[str, ...], deadline: float) -> list[Figure]:
    samples: Samples = defaultdict(list)
    figures = []
    folder = Path(tempfile.mkdtemp(prefix="everstep-recovery-etcd-"))
    etcd = EtcdCluster(folder, 1)
    etcd.start()
    try:
        for way in ways:
            runs = Trials(way, etcd.urls[0].removeprefix("http://"), samples)
            try:
                for _ in range(trials[way.name]):
                    if time.monotonic() < deadline:
                        runs.run(faults)
            finally:
                runs.close()
            if runs.faults:
                done = runs.faults - runs.failed
                goal = 1.0 if way.module == AGENT else None
                figures.append(
                    Figure(f"recovered.{way.name}", done / runs.faults, "", Better.HIGHER, runs.faults, goal)
                )
    finally:
        etcd.stop()
        shutil.rmtree(folder)
    for (way, name), seconds in samples.items():
        n = len(seconds)
        goal = GOALS.get((way, name))
        figures.append(Figure(f"{name}.{way}.p50", quantile(seconds, 0.5), "s", Better.LOWER, n))
        if n >= 100:
            figures.append(Figure(f"{name}.{way}.p99", quantile(seconds, 0.99), "s", Better.LOWER, n, goal))
            goal = None
        figures.append(Figure(f"{name}.{way}.max", max(seconds), "s", Better.LOWER, n, goal))
    if not figures:
        raise FigureError("nothing was measured")
    return figures


def main() -> int:
    p = parser(__doc__)
    p.add_argument(
        "--ways", default=",".join(w.name for w in WAYS), help="columns, of " + ", ".join(w.name for w in WAYS)
    )
    p.add_argument("--trials", type=int, default=100, help="of each way of ours; the tuned stock one has a tenth")
    p.add_argument("--default-trials", type=int, default=5, help="of stock torchrun with its defaults")
    p.add_argument("--faults", default="process,agent,host,stop")
    args = p.parse_args()
    names = args.ways.split(",")
    ways = [w for w in WAYS if w.name in names]
    trials = {w.name: args.trials for w in ways} | {
        "stock_default": args.default_trials, "stock_tuned": max(1, args.trials // 10),
        "torchrun_etcd": max(1, args.trials // 5), "everstep_run": max(1, args.trials // 2),
    }  # fmt: skip
    faults, deadline = tuple(args.faults.split(",")), float("inf")
    if args.quick:  # what needs 45 s for one fault is left to the full run
        ways = [w for w in ways if w.name in ("stock_tuned", "session")]
        trials = {"stock_tuned": 1, "session": 2}
        faults, deadline = ("process",), time.monotonic() + 45
    return finish(measure(ways, trials, faults, deadline), args)


if __name__ == "__main__":
    sys.exit(main())
