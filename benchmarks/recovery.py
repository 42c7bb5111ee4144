"""Fault -> next optimizer step, for stock torchrun and for each way of ours, by the same faults in the same run.

    python benchmarks/recovery.py [--quick] [--json PATH] [--ways NAME,NAME] [--trials N] [--default-trials N]

Three agents with one process each on this machine, minimum two. A trial kills a training process; kills an agent with
its process and starts a new one; does the same to the agent that hosts the store of the world (that of rank 0); stops
an agent (SIGSTOP), and wakes one that the others went on without (SIGCONT). After each fault it waits until all ranks
of the world that is left have made a step ("survivors"), and until there are three again ("all").
`detect`, `rendezvous`, `restore` and `first_step` are the parts of the last member's way there: until it was started
anew or heard of the next round, until its process group had formed, until it had the state, until its step.
`slow` is the share of the killed after which the survivors took longer than 0.25 s: a second attempt at a dead peer.
`regrow` is the longest pause between two steps of a survivor while the new agent comes in; `woken` the same while a
woken one comes back, and `woken.all` the time from SIGCONT to the first step of all. `lost_steps` counts the
steps that were taken again, `equal` the faults after which all members had the same parameters, bit by bit, in every
step. What does not happen within its limit counts as a failure, and ends the trial; `recovered` says how many did not.
`session_rehearsed` is the session with the stamp of a rehearsal: a new process does not compute its first step twice.
torchft's columns are its nightly build, with its example's settings and with heartbeats that count as lost after 1 s.
The store of ours is a real etcd. Two more columns take the store away: `session_etcd3` the member of three that the
agents talk to, `session_operator` the operator, alone (`store.pause`: the longest time between two steps meanwhile, and
`store.pause_before` in as long a time before) and together with an agent (`store_agent`: from its death, or where there
is no other store from the moment that it is back). `recovery_kind.py` measures on Kubernetes.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "recovery_parts")]
from figures import Better, Figure, FigureError, finish, parser, quantile
from job import AGENT, OURS, START, TORCHRUN, TUNED, TUNED_CONF, Job, Line, NeverError, Way
from stores import STORES, Store
from torchft_peer import NIGHTLY

WAYS = (
    Way("stock_default", TORCHRUN, "c10d"),
    Way("stock_tuned", TORCHRUN, "c10d", TUNED_CONF, environ=TUNED),
    Way("torchft", TORCHRUN, "static", store="lighthouse", peer=NIGHTLY),
    Way("torchft_1s", TORCHRUN, "static", store="lighthouse_1s", peer=NIGHTLY),  # heartbeats of 1 s
    Way("torchrun_etcd", TORCHRUN, "etcd-v3", "last_call=5"),
    Way("everstep_run", AGENT, "etcd-v3", OURS),
    Way("session", AGENT, "etcd-v3", OURS, session=True),
    Way("session_rehearsed", AGENT, "etcd-v3", OURS, session=True, rehearsed=True),
    Way("session_etcd3", AGENT, "etcd-v3", OURS, session=True, store="etcd3"),
    Way("session_operator", AGENT, "everstep", OURS, session=True, store="operator"),
)
STORED = ("etcd3", "operator")  # whose stores die
SLOW = 0.25  # seconds
KILLS = ("process.survivors", "agent.survivors", "host.survivors")
STORE_DOWN = 3.0  # seconds that a store is away while nothing else happens
LIMITS = {"stock_default": 130.0, "stock_tuned": 75.0}
LIMIT = 60.0
GOALS = {
    ("session", "process.survivors"): 0.3,
    ("session", "agent.survivors"): 1.0,
    ("session", "host.survivors"): 1.0,
    ("session", "regrow.pause"): 0.05,  # torchft's, nightly of 2026-10
    ("session_rehearsed", "regrow.pause"): 0.08,
    ("session", "woken.all"): 0.11,  # the same
    ("session", "stop.survivors"): 5.0,
    ("session_etcd3", "store_agent.survivors"): 3.0,
    ("session_operator", "store_agent.survivors"): 1.0,
} | {("session", f"{fault}.lost_steps"): 1.0 for fault in ("process", "agent", "host", "stop")}
Samples = dict[tuple[str, str], list[float]]


class Trials:
    """Faults on one job after the other; a job that was lost to a fault is replaced."""

    def __init__(self, way: Way, store: Store, samples: Samples) -> None:
        self._way, self._store, self._samples = way, store, samples
        self._limit = LIMITS.get(way.name, LIMIT)
        self._job: Job | None = None
        self.failed = 0
        self.faults = 0
        self.equal = 0

    def run(self, faults: tuple[str, ...]) -> None:
        for fault in faults:
            if (fault == "store") != (self._way.store in STORED):
                continue
            self.faults += 1
            try:
                self._one(fault)
            except NeverError as e:
                self.failed += 1
                kept = f"; its logs are in {self._job.folder}" if self._job is not None else ""
                print(f"{self._way.name} {fault}: {e}{kept}", file=sys.stderr)
                self._give_up()

    def close(self) -> None:
        if (job := self._give_up()) is not None:
            shutil.rmtree(job.folder)

    def _give_up(self) -> Job | None:
        job, self._job = self._job, None
        if job is not None:
            job.close()
        return job

    def _one(self, fault: str) -> None:
        job = self._whole()
        match fault:
            case "process":
                after = self._process(job)
            case "store":
                after = self._store_dies(job)
            case "woken":
                after = self._woken(job)
            case _:
                after = self._agent(job, fault)
        self.equal += not job.differing(after)

    # Each gives the first steps after its fault.

    def _process(self, job: Job) -> dict[int, Line]:
        at = job.kill_process(job.others()[0])
        if not self._way.survives:
            everybody = job.world(3, at, self._limit)
            self._came("process", job, everybody, at, "all")
            return everybody
        # If the store stood still for that long, the new process may be back before the others have gone on.
        left = job.world(2, at, self._limit, job.alive(), or_more=True)
        self._came("process", job, left, at)
        self._note("process.all", last(job.world(3, at, self._limit)).at - at)
        return left

    def _agent(self, job: Job, fault: str) -> dict[int, Line]:
        victim = job.host() if fault == "host" else job.others()[0]
        survivors = [a for a in job.alive() if a is not victim]
        at = job.stop(victim) if fault == "stop" else job.kill(victim)
        left = job.world(2, at, self._limit, survivors)
        self._came(fault, job, left, at)
        if fault == "stop":
            job.kill(victim)
        pids = [job.trainer(a) for a in survivors]
        began = time.monotonic()
        job.start()
        everybody = job.world(3, began, self._limit)
        self._note("regrow.all", last(everybody).at - began)
        if self._way.survives:
            self._note("regrow.pause", job.longest_pause(pids, began))
            self._note("regrow.lost_steps", job.lost_steps(everybody))
        return left

    def _woken(self, job: Job) -> dict[int, Line]:
        victim = job.others()[0]
        survivors = [a for a in job.alive() if a is not victim]
        at = job.stop(victim)
        left = job.world(2, at, self._limit, survivors)
        self._came("stop", job, left, at)
        pids = [job.trainer(a) for a in survivors]
        newest = max(line.step for line in job.lines())
        began = job.wake(victim)
        everybody = job.world(3, began, self._limit, above=newest)  # it may end the step that it was stopped in
        self._note("woken.all", last(everybody).at - began)
        self._note("woken.pause", job.longest_pause(pids, began))
        self._note("woken.lost_steps", job.lost_steps(everybody))
        return left

    def _store_dies(self, job: Job) -> dict[int, Line]:
        pids = [job.trainer(a) for a in job.alive()]
        before = time.monotonic()
        time.sleep(STORE_DOWN)
        self._note("store.pause_before", job.longest_pause(pids, before))
        at = time.monotonic()
        self._store.down()
        time.sleep(STORE_DOWN)
        self._note("store.pause", job.longest_pause(pids, at))
        self._store.back()
        self._whole()
        victim = job.others()[0]
        survivors = [a for a in job.alive() if a is not victim]
        self._store.down()
        at = job.kill(victim)
        back = self._store.back() if self._way.store == "operator" else at
        left = job.world(2, at, self._limit, survivors)
        self._note("store_agent.survivors", max(0.0, last(left).at - back))
        self._note("store_agent.lost_steps", job.lost_steps(left))
        if self._way.store != "operator":
            self._store.back()
        began = time.monotonic()
        job.start()
        job.world(3, began, self._limit)
        return left

    def _whole(self) -> Job:
        """A job of three that trains."""
        if self._job is None:
            self._job = Job(Path(tempfile.mkdtemp(prefix="everstep-recovery-")), self._way, self._store)
            self._job.start(3)
        self._job.world(3, time.monotonic() - 0.001, START)
        return self._job

    def _came(self, fault: str, job: Job, firsts: dict[int, Line], at: float, whom: str = "survivors") -> None:
        """A fault at `at` is over for these: the last of them counts."""
        line = last(firsts)
        self._note(f"{fault}.{whom}", line.at - at)
        self._note(f"{fault}.lost_steps", job.lost_steps(firsts))
        if self._way.peer:
            return  # of whose way the parts are not told
        for part, seconds in dataclasses.asdict(job.parts(line, at)).items():
            self._note(f"{fault}.{whom}.{part}", seconds)

    def _note(self, name: str, value: float) -> None:
        self._samples[(self._way.name, name)].append(value)


def last(firsts: dict[int, Line]) -> Line:
    """The line of the member that came last."""
    return max(firsts.values(), key=lambda line: line.at)


def measure(ways: list[Way], trials: dict[str, int], faults: tuple[str, ...], deadline: float) -> list[Figure]:
    samples: Samples = defaultdict(list)
    figures = []
    ways_by_name = {way.name: way for way in ways}
    for way in ways:
        store = STORES[way.store]()
        runs = Trials(way, store, samples)
        try:
            for _ in range(trials[way.name]):
                if time.monotonic() < deadline:
                    runs.run(faults)
        finally:
            runs.close()
            store.stop()
        if runs.faults:
            goal = 1.0 if way.module == AGENT else None
            for name, good in (("recovered", runs.faults - runs.failed), ("equal", runs.equal)):
                figures.append(Figure(f"{name}.{way.name}", good / runs.faults, "", Better.HIGHER, runs.faults, goal))
    for (way_name, name), values in samples.items():
        figures += distribution(way_name, name, values)
        if name in KILLS and ways_by_name[way_name].module == AGENT:
            share = sum(value > SLOW for value in values) / len(values)
            goal = 0.02 if ways_by_name[way_name].session else None
            figures.append(Figure(f"{name}.slow.{way_name}", share, "", Better.LOWER, len(values), goal))
    if not figures:
        raise FigureError("nothing was measured")
    return figures


def distribution(way: str, name: str, values: list[float]) -> list[Figure]:
    """The middle and the end: p99 where there are enough for one, else the worst."""
    n, goal, unit = len(values), GOALS.get((way, name)), "steps" if name.endswith("lost_steps") else "s"
    found = [Figure(f"{name}.{way}.p50", quantile(values, 0.5), unit, Better.LOWER, n)]
    if n >= 100 and unit == "s":
        found.append(Figure(f"{name}.{way}.p99", quantile(values, 0.99), unit, Better.LOWER, n, goal))
        goal = None
    return [*found, Figure(f"{name}.{way}.max", max(values), unit, Better.LOWER, n, goal)]


def main() -> int:
    p = parser(__doc__)
    p.add_argument(
        "--ways", default=",".join(w.name for w in WAYS), help="columns, of " + ", ".join(w.name for w in WAYS)
    )
    p.add_argument("--trials", type=int, default=100, help="of each way of ours; the tuned stock one has a tenth")
    p.add_argument("--default-trials", type=int, default=5, help="of stock torchrun with its defaults")
    p.add_argument("--faults", default="process,agent,host,stop,woken,store")
    args = p.parse_args()
    names = args.ways.split(",")
    ways = [w for w in WAYS if w.name in names]
    trials = {w.name: args.trials for w in ways} | {
        "stock_default": args.default_trials, "stock_tuned": max(1, args.trials // 10),
        "torchft": max(1, args.trials // 5), "torchft_1s": max(1, args.trials // 5),
        "torchrun_etcd": max(1, args.trials // 5), "everstep_run": max(1, args.trials // 2),
        "session_rehearsed": args.trials if names == ["session", "session_rehearsed"] else max(1, args.trials // 5),
        "session_etcd3": max(1, args.trials // 5), "session_operator": max(1, args.trials // 5),
    }  # fmt: skip
    faults, deadline = tuple(args.faults.split(",")), float("inf")
    if args.quick:  # what needs 45 s for one fault is left to the full run
        ways = [w for w in ways if w.name in ("stock_tuned", "session", "session_operator")]
        trials = {"stock_tuned": 1, "session": 2, "session_operator": 1}
        faults, deadline = ("process", "store"), time.monotonic() + 40
    return finish(measure(ways, trials, faults, deadline), args)


if __name__ == "__main__":
    sys.exit(main())
