"""Kill of a rank -> next optimizer step, for scripts of Trainer, Lightning and Accelerate, beside stock torchrun.

    python benchmarks/adapters.py [--quick] [--json PATH] [--trials N] [--libraries NAME,NAME]

Three processes of one agent, a new job for each kill: rank 1 kills itself in its fifth step, before the optimizer's.
`survivors`: until the last of the two others has made a step, in its process; `all`: until all three ranks have, the
new process among them. Nothing says what to import ahead: `everstep-run` reads it in the script. Under stock torchrun
all processes end and are started again, and import their libraries; the same script begins anew there, without a
checkpoint to load. In turns, so both meet the same machine. `recovered`: of the jobs, those that went on to their end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from figures import Better, Figure, FigureError, finish, parser, quantile

SCRIPTS = {"trainer": "trainer.py", "lightning": "fit.py", "accelerate": "loop.py"}
LAUNCHERS = {"everstep": "everstep.agent.main", "stock": "torch.distributed.run"}
SIZE = 3
SECONDS = 300  # for a job
GOALS = {"survivors": 0.5, "all": 6.8}  # seconds; that with EVERSTEP_PRELOAD where each process imported it took 35.8


def play(library: str, way: str, folder: Path) -> dict[str, float]:
    """Seconds from the kill, of one job. Raises `FigureError` if it did not go on."""
    ours = ("EVERSTEP_", "PET_", "RANK", "WORLD_SIZE", "ACCELERATE_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    job = [sys.executable, "-m", LAUNCHERS[way], "--standalone", f"--nproc-per-node={SIZE}", "--max-restarts=1"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*job, str(HERE / "adapters_parts" / SCRIPTS[library]), str(folder), way], stdout=log, stderr=log,
            env={**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            start_new_session=True, cwd=folder,
        )  # fmt: skip
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun's processes are in sessions of their own, and it ends them
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
    if code != 0 or not (folder / "killed").exists():
        raise FigureError(f"{library} {way} ended with {code}: {(folder / 'log').read_text()[-2000:]}")
    killed = float((folder / "killed").read_text())
    lines = [line.split() for line in (folder / "steps").read_text().splitlines()]
    steps = [(float(at), int(rank), int(pid)) for at, rank, pid in lines]
    before = {pid for at, rank, pid in steps if at < killed and rank != 1}
    first: dict[int, float] = {}
    for at, rank, _ in steps:
        if at > killed:
            first.setdefault(rank, at - killed)
    found = {"all": max(first.values())}
    if len(first) != SIZE:
        raise FigureError(f"{library} {way}: ranks {sorted(first)} have made a step after the kill")
    if way == "everstep":
        own = {pid: at - killed for at, _, pid in reversed(steps) if at > killed and pid in before}
        if len(own) != SIZE - 1:
            raise FigureError(f"{library}: {len(own)} of {SIZE - 1} survivors went on in their processes")
        found["survivors"] = max(own.values())
    return found


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--trials", type=int, default=5)
    p.add_argument("--libraries", default=",".join(SCRIPTS))
    p.add_argument("--ways", default=",".join(LAUNCHERS))
    args = p.parse_args()
    libraries = ["accelerate"] if args.quick else args.libraries.split(",")
    ways = ["everstep"] if args.quick else args.ways.split(",")
    trials = 1 if args.quick else args.trials
    samples: dict[tuple[str, str, str], list[float]] = {}
    recovered: dict[tuple[str, str], int] = {(library, way): 0 for library in libraries for way in ways}
    for _ in range(trials):
        for library in libraries:
            for way in ways:
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        found = play(library, way, Path(folder))
                    except FigureError as e:
                        print(e, file=sys.stderr)
                        continue
                    recovered[library, way] += 1
                    for part, seconds in found.items():
                        samples.setdefault((library, part, way), []).append(seconds)
    figures = []
    for (library, way), count in recovered.items():
        goal = 1.0 if way == "everstep" else None
        figures.append(Figure(f"adapters.{library}.recovered.{way}", count / trials, "", Better.HIGHER, trials, goal))
    for (library, part, way), values in samples.items():
        goal = GOALS[part] if way == "everstep" else None
        name = f"adapters.{library}.{part}.{way}"
        figures.append(Figure(f"{name}.p50", quantile(values, 0.5), "s", Better.LOWER, len(values)))
        figures.append(Figure(f"{name}.max", max(values), "s", Better.LOWER, len(values), goal))
    return finish(figures, args)


if __name__ == "__main__":
    sys.exit(main())
