"""One GPT, one seeded plan of faults, and each way to train through it.

    python benchmarks/peers.py [--quick] [--json PATH] [--svg PATH] [--seed N] [--steps N] [--arms NAME,NAME]

Three agents with one process each on this machine. Each arm trains the same small GPT on the same text twice: first
undisturbed, then with the faults of the plan: a training process gets SIGKILL, or an agent with its process does and a
new one starts after REPLACED seconds, as a cluster would start a pod. No fault takes the agent that hosts the store of
the rendezvous: of that stock torchrun never recovers (`recovery.py` measures it).

- `torchrun_dcp`: elastic torchrun, its settings as short as they can be, DCP every 20 steps; a careful script.
- `torchrun_dcp_default`: the same with torchrun's default settings.
- `torchft_nightly`, `torchft_release`: torchft's DDP example with its settings and its sampler.
- `everstep_torchrun`: the script of the first arm with `everstep.Checkpointer` and the etcd-v3 rendezvous.
- `everstep_session`: an elastic session under everstep-run; two go on where one of three is lost.
- `everstep_session_of_3`: the same, but three train or nobody does, so that each sum has the same three parts.

For each arm: `wall` seconds from the first step to the last (`calm` without faults), `pause` the longest time without a
new step, `repeated` steps that were taken again, `lost` and `doubled` pieces of the text in the steps that count, and
`equal`: 1 where the last parameters are those of the arm's undisturbed run, bit by bit. An arm that has not taken its
last step within LIMIT seconds has `ended` 0, and its other figures are those until then.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "recovery_parts")]
from figures import Better, Figure, FigureError, finish, parser
from job import AGENT, OURS, START, TORCHRUN, TUNED, TUNED_CONF, Job, Line, NeverError, Way
from peers_parts import plot
from stores import STORES, Store
from torchft_peer import NIGHTLY, RELEASE

PARTS = HERE / "peers_parts"
DCP, SESSION, TORCHFT = PARTS / "torchrun_dcp.py", PARTS / "with_session.py", PARTS / "torchft_ddp.py"
ARMS = (
    Way("torchrun_dcp_default", TORCHRUN, "c10d", script=DCP),
    Way("torchrun_dcp", TORCHRUN, "c10d", TUNED_CONF, environ=TUNED, script=DCP),
    Way("torchft_release", TORCHRUN, "static", store="lighthouse_release", peer=RELEASE, script=TORCHFT),
    Way("torchft_nightly", TORCHRUN, "static", store="lighthouse", peer=NIGHTLY, script=TORCHFT),
    Way("everstep_torchrun", TORCHRUN, "etcd-v3", "last_call=5", script=PARTS / "with_checkpointer.py"),
    Way("everstep_session", AGENT, "etcd-v3", OURS, session=True, script=SESSION),
    Way("everstep_session_of_3", AGENT, "etcd-v3", OURS, session=True, script=SESSION, nodes="3"),
)
SESSIONS = ("everstep_session", "everstep_session_of_3")
LABELS = {
    "torchrun_dcp_default": "torchrun's defaults, DCP",
    "torchrun_dcp": "torchrun, tuned, DCP",
    "torchft_release": "torchft, release",
    "torchft_nightly": "torchft, nightly",
    "everstep_torchrun": "Everstep, torchrun",
    "everstep_session": "Everstep, session",
    "everstep_session_of_3": "the same, always 3 ranks",
}
BATCH = 24  # pieces; `peers_parts/gpt.py` has it too
REPLACED = 2.0  # seconds from the death of an agent to the start of the next
LIMIT = 420.0  # seconds for a run
ENDS = 5.0  # seconds from the first rank's last step to that of the others
FAULTS = 4


@dataclass(frozen=True)
class Fault:
    step: int  # it happens when a process has completed this step
    kind: str  # "process" or "agent"
    victim: int  # of the agents that host nothing


@dataclass(frozen=True)
class Outcome:
    """What the diaries of one run show. Times are seconds from its first step."""

    ended: bool
    wall: float
    pause: float
    repeated: int
    lost: int
    doubled: int
    checksum: int
    line: list[tuple[float, int]]  # the newest step at each time
    faults: list[float]


def plan(seed: int, steps: int, faults: int = FAULTS) -> list[Fault]:
    """As many faults of each kind, in random order, each in a part of the run of its own."""
    draw = random.Random(seed)
    kinds = [("process", "agent")[i % 2] for i in range(faults)]
    draw.shuffle(kinds)
    part = steps // (faults + 1)
    return [Fault((i + 1) * part + draw.randrange(part // 2), kind, draw.randrange(8)) for i, kind in enumerate(kinds)]


def play(way: Way, store: Store, steps: int, faults: Sequence[Fault], limit: float) -> Outcome:
    """One run from its start to its end, or until `limit` seconds have passed."""
    job = Job(Path(tempfile.mkdtemp(prefix="everstep-peers-")), way, store, (str(steps),))
    at: list[float] = []
    try:
        job.start(3)
        job.world(3, 0.0, START)
        try:
            _through(job, steps, faults, at, limit)
        except NeverError as e:
            print(f"{e}; its logs are in {job.folder}", file=sys.stderr)
        outcome = _outcome(job, steps, at)
    finally:
        job.close()
    if outcome.ended:
        shutil.rmtree(job.folder)
    return outcome


def _through(job: Job, steps: int, faults: Sequence[Fault], at: list[float], limit: float) -> None:
    """Until the last step is taken or the time is over; when the faults were is appended to `at`."""
    deadline = time.monotonic() + limit
    remaining = list(faults)
    while time.monotonic() < deadline:
        if remaining and _newest(job) >= remaining[0].step:
            fault = remaining.pop(0)
            victim = _victim(job, fault, deadline - time.monotonic())
            if fault.kind == "process":
                at.append(job.kill_process(victim))
            else:
                at.append(job.kill(victim))
                time.sleep(REPLACED)
                job.replace(victim)
        if not job.alive():
            return
        if _newest(job) >= steps:
            job.world(2, 0.0, ENDS, or_more=True, above=steps - 1)  # all ranks have taken it
            return
        time.sleep(0.01)


def _newest(job: Job) -> int:
    return max(line.step for line in job.lines())


def _victim(job: Job, fault: Fault, limit: float) -> subprocess.Popen[bytes]:
    """Once all three are in one world, so that each arm loses one of three."""
    job.world(3, time.monotonic() - 0.5, limit)
    victims = job.others()
    return victims[fault.victim % len(victims)]


def _outcome(job: Job, steps: int, at: list[float]) -> Outcome:
    lines = sorted(job.all_lines(), key=lambda line: line.at)
    began = lines[0].at
    newest, curve = 0, [(0.0, 0)]
    pause = 0.0
    for line in lines:
        if line.step > newest:
            pause = max(pause, line.at - began - curve[-1][0]) if newest else pause
            newest = line.step
            curve.append((line.at - began, newest))
    if newest < steps:
        pause = max(pause, lines[-1].at - began - curve[-1][0])
    counted = Counter(line.step for line in lines if line.rank == 0)
    pieces = _pieces(job, lines)
    return Outcome(
        newest >= steps,
        lines[-1].at - began,
        pause,
        sum(count - 1 for count in counted.values()),
        steps * BATCH - len(pieces),
        sum(count - 1 for count in pieces.values()),
        lines[-1].checksum,
        curve,
        [moment - began for moment in at],
    )


def _pieces(job: Job, lines: list[Line]) -> Counter[int]:
    """How often each piece was trained on, in the steps that count: where a step was taken again, the last time."""
    trained: dict[tuple[int, int], list[list[int]]] = defaultdict(list)  # by process and step
    for path in job.folder.glob("*.pieces"):
        for row in path.read_text().splitlines():
            step, *numbers = map(int, row.split())
            trained[int(path.stem), step].append(numbers)
    last: dict[int, dict[int, Line]] = {}
    for line in lines:
        of_step = last.setdefault(line.step, {})
        if any(line.world != other.world for other in of_step.values()) or line.rank in of_step:
            of_step.clear()  # it is taken again
        of_step[line.rank] = line
    return Counter(
        i for of_step in last.values() for line in of_step.values() for i in trained[line.pid, line.step][-1]
    )


def measure(
    arms: Sequence[Way], steps: int, faults: Sequence[Fault], limit: float
) -> tuple[list[Figure], dict[str, Outcome]]:
    figures: list[Figure] = []
    outcomes: dict[str, Outcome] = {}
    for arm in arms:
        store = STORES[arm.store]()
        try:
            calm = play(arm, store, steps, (), limit)
            outcomes[arm.name] = broken = play(arm, store, steps, faults, limit)
        except NeverError as e:
            print(f"{arm.name}: {e}", file=sys.stderr)
            figures.append(Figure(f"{arm.name}.ended", 0.0, "", Better.HIGHER, 1))
            continue
        finally:
            store.stop()
        figures += _figures(arm.name, calm, broken)
        print(f"{arm.name}: {broken.wall:.1f} s, {calm.wall:.1f} s undisturbed", file=sys.stderr)
    if not figures:
        raise FigureError("nothing was measured")
    return figures, outcomes


def _figures(arm: str, calm: Outcome, broken: Outcome) -> list[Figure]:
    ours = arm in SESSIONS
    equal = broken.ended and broken.checksum == calm.checksum
    values = (
        ("ended", float(broken.ended), "", Better.HIGHER, 1.0 if ours else None),
        ("wall", broken.wall, "s", Better.LOWER, None),
        ("wall.calm", calm.wall, "s", Better.LOWER, None),
        ("pause", broken.pause, "s", Better.LOWER, 1.0 if arm == "everstep_session" else None),
        ("repeated", float(broken.repeated), "steps", Better.LOWER, float(len(broken.faults)) if ours else None),
        ("lost", float(broken.lost), "pieces", Better.LOWER, 0.0 if arm.startswith("everstep") else None),
        ("doubled", float(broken.doubled), "pieces", Better.LOWER, 0.0 if arm.startswith("everstep") else None),
        ("lost.calm", float(calm.lost), "pieces", Better.LOWER, None),
        ("equal", float(equal), "", Better.HIGHER, 1.0 if arm == "everstep_session_of_3" else None),
    )
    return [Figure(f"{arm}.{name}", value, unit, better, 1, goal) for name, value, unit, better, goal in values]


def main() -> int:
    names = [arm.name for arm in ARMS]
    p = parser(__doc__)
    p.add_argument("--arms", default=",".join(names), help="of " + ", ".join(names))
    p.add_argument("--seed", type=int, default=1, help="of the plan of faults")
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--svg", type=Path, help="draw the steps of all arms over time")
    args = p.parse_args()
    if unknown := set(args.arms.split(",")) - set(names):
        p.error(f"--arms: {', '.join(sorted(unknown))}: not one of {', '.join(names)}")
    arms = [arm for arm in ARMS if arm.name in args.arms.split(",")]
    steps, faults, limit = args.steps, plan(args.seed, args.steps), LIMIT
    if args.quick:
        arms = [arm for arm in arms if arm.name in ("torchrun_dcp", "everstep_session")]
        steps, faults, limit = 60, plan(args.seed, 60, 1), 20.0
    figures, outcomes = measure(arms, steps, faults, limit)
    if args.svg is not None:
        curves = {LABELS[arm]: plot.Curve(of.line, of.faults, of.ended) for arm, of in outcomes.items()}
        args.svg.write_text(plot.draw(curves, steps), encoding="utf-8")
    return finish(figures, args)


if __name__ == "__main__":
    sys.exit(main())
