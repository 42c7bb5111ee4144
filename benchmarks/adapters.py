"""Kill of a rank -> next optimizer step, for scripts of Trainer, Lightning and Accelerate, beside stock torchrun.

    python benchmarks/adapters.py [--quick] [--json PATH] [--trials N] [--libraries NAME,NAME]

Three processes of one agent, a new job for each kill: rank 1 kills itself in its fifth step, between its gradients and
the optimizer's step. The others may have made that step by then, and make the next one only in the world that is formed
anew. So `next_step` is the time until all three ranks, the new process among them, have made the sixth. Nothing says
what to import ahead: `everstep-run` reads it in the script. Under stock torchrun all processes end and are started
again, and import their libraries; the same script begins anew there, without a checkpoint to load: until all three have
made a step. `stock` has torchrun's defaults, `stock_tuned` `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`: without it the new
processes of torch 2.13 find the addresses of the dead ones in the agent's store. In turns, so that all meet the same
machine. `recovered`: of the jobs, those that went on to their end.
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
LAUNCHERS = {
    "everstep": "everstep.agent.main",
    "stock": "torch.distributed.run",
    "stock_tuned": "torch.distributed.run",
}
SURROUNDINGS = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
TUNED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SIZE = 3
NEXT = 6  # the first step that nobody makes without a world that is formed anew
SECONDS = 300  # for a job
GOAL = 0.5  # seconds


def play(library: str, way: str, folder: Path) -> float:
    """Seconds from the kill, of one job. Raises `FigureError` if it did not go on."""
    ours = ("EVERSTEP_", "PET_", "RANK", "WORLD_SIZE", "ACCELERATE_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    job = [sys.executable, "-m", LAUNCHERS[way], "--standalone", f"--nproc-per-node={SIZE}", "--max-restarts=1"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*job, str(HERE / "adapters_parts" / SCRIPTS[library]), str(folder), way.partition("_")[0]],
            env={**clean, **SURROUNDINGS, **(TUNED if way == "stock_tuned" else {})},
            stdout=log, stderr=log, start_new_session=True, cwd=folder,
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
    steps = [(float(at) - killed, int(pid), int(number)) for at, pid, number in lines]
    last: dict[int, float] = {}  # by process, of the step that is waited for
    ended = {pid for at, pid, _ in steps if at < 0} if way != "everstep" else set()
    for at, pid, number in steps:
        if at > 0 and pid not in ended and number == (NEXT if way == "everstep" else 1):
            last[pid] = at
    if len(last) != SIZE:
        raise FigureError(f"{library} {way}: {len(last)} of {SIZE} ranks have made the step after the kill")
    return max(last.values())


def main() -> int:
    p = parser(__doc__)
    p.add_argument("--trials", type=int, default=5)
    p.add_argument("--libraries", default=",".join(SCRIPTS))
    p.add_argument("--ways", default=",".join(LAUNCHERS))
    args = p.parse_args()
    libraries = ["accelerate"] if args.quick else args.libraries.split(",")
    ways = ["everstep"] if args.quick else args.ways.split(",")
    trials = 1 if args.quick else args.trials
    samples: dict[tuple[str, str], list[float]] = {}
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
                    samples.setdefault((library, way), []).append(found)
    figures = []
    for (library, way), count in recovered.items():
        goal = 1.0 if way == "everstep" else None
        figures.append(Figure(f"adapters.{library}.recovered.{way}", count / trials, "", Better.HIGHER, trials, goal))
    for (library, way), values in samples.items():
        name = f"adapters.{library}.next_step.{way}"
        figures.append(Figure(f"{name}.p50", quantile(values, 0.5), "s", Better.LOWER, len(values)))
        goal = GOAL if way == "everstep" else None
        figures.append(Figure(f"{name}.max", max(values), "s", Better.LOWER, len(values), goal))
    return finish(figures, args)


if __name__ == "__main__":
    sys.exit(main())
