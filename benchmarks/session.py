"""What the session costs a training step when nothing happens, and what `import everstep` costs.

    python benchmarks/session.py [--quick] [--json PATH]

Two ranks (gloo) train under stock torchrun in one process group, in turns: a plain loop over torch's DataLoader with a
DistributedSampler, and the session's loop over its own loader. What the session does between two steps (report, agree
on stop and save, the data's position) is also timed by itself, inside: the difference of two loops on a shared machine
is mostly noise, its own time is not. A step takes about 25 ms, most of it computation.

Then what all of it costs where peers may be lost: steps of 10 and of 100 ms (`session_parts/step_script.py`) under
torchrun without Everstep, and under `everstep-run` with everything tracked and a place for commits, in turns; of two
replicas, and of one that the script divides over both processes (`run.mesh(model=2)`). The cost is the difference of
the medians; the mean also has the steps 64, 128, … in which the whole state is looked at.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from figures import Better, Figure, finish, parser, quantile

import everstep
from everstep.recovery.state.randomness import Randomness
from everstep.train.coordination.step_coordinator import StepCoordinator

STEPS, TURNS = 100, 6
SCRIPT = ROOT / "benchmarks" / "session_parts" / "step_script.py"
LENGTHS = (10, 100)  # milliseconds
FIRST = 40  # steps that are left out: processes warm up, and the state is looked at in the 1st, 2nd, 4th, …
GOAL = 1.0  # per cent of a step
RANDOM_GOAL = 20.0  # microseconds that a step's random numbers may take
IMPORTS, IMPORT_GOAL = 20, 30.0  # samples, milliseconds


def timed(method: Callable[..., Any], own: list[float]) -> Callable[..., Any]:
    """The method, with the seconds of each call added to `own`."""

    def call(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            own.append(time.perf_counter() - began)

    return call


def measure(steps: int, turns: int) -> None:
    """In a training process: seconds a step of each loop, and of the session's own part, to standard output."""
    torch.set_num_threads(1)
    run = everstep.start()
    torch.manual_seed(0)  # the same data on both ranks
    data = TensorDataset(torch.randn(32 * 2 * steps, 256), torch.randn(32 * 2 * steps, 1))
    net = torch.nn.Sequential(torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    heavy = torch.randn(600, 600)

    def step(x: Any, y: Any) -> Any:
        torch.mm(heavy, heavy)
        loss = torch.nn.functional.mse_loss(model(x), y)
        return loss

    own: list[float] = []
    seeding: list[float] = []
    for owner, name, spent in (
        (StepCoordinator, "count", own),
        (StepCoordinator, "agree", own),
        (Randomness, "begin", seeding),
    ):
        setattr(owner, name, timed(getattr(owner, name), spent))
    plain: list[float] = []
    ours: list[float] = []
    for turn in range(turns):
        sampler: Any = DistributedSampler(data, seed=turn)
        dist.barrier()
        began = time.perf_counter()
        for x, y in DataLoader(data, batch_size=32, sampler=sampler):
            step(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        plain.append((time.perf_counter() - began) / steps)
        one = everstep.Run(run.process, StepCoordinator(None, run._coordinator._reporter), None, rng=True)
        loader = one.loader(data, global_batch=64, seed=turn, seed_samples=False)
        dist.barrier()
        began = time.perf_counter()
        for taken in one.steps(loader, until=steps):
            with taken as batch:
                loss = step(*batch.data)
                batch.scale(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                one.log(loss=loss)
        ours.append((time.perf_counter() - began) / steps)
    if run.rank == 0:
        own += seeding
        print(json.dumps({"plain": plain, "ours": ours, "own": sum(own) / (steps * turns), "seeding": seeding}))
    run.close()


def started(code: str) -> float:
    """Seconds that an interpreter takes for `code`."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    return time.perf_counter() - began


def imports(samples: int) -> list[float]:
    """Seconds that `import everstep` adds to an interpreter's start, in turns with a bare one."""
    return [started("import everstep") - started("pass") for _ in range(samples)]


def steps_of(kind: str, length: int, steps: int, folder: Path) -> list[float]:
    """Seconds of each step but the first, of two processes under a launcher."""
    launcher = Path(sys.executable).with_name("torchrun" if kind.startswith("plain") else "everstep-run")
    out = folder / f"{kind}-{length}.json"
    shutil.rmtree(out.with_name("store"), ignore_errors=True)
    arguments = [kind, str(length), str(steps + FIRST + 1), str(out)]
    subprocess.run(
        [str(launcher), "--standalone", "--nproc-per-node=2", str(SCRIPT), *arguments],
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    return list(json.loads(out.read_text()))[FIRST:]


def costs(steps: dict[int, int], turns: int, divided: str = "") -> list[Figure]:
    """The time that the session adds to a step of each length. `divided`: "-model" for one replica of two processes."""
    figures = []
    what = f"{divided.removeprefix('-')}_step" if divided else "step"
    for length in LENGTHS:
        taken: dict[str, list[float]] = {"plain": [], "session": []}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(turns):
                for kind in taken:
                    taken[kind] += steps_of(kind + divided, length, steps[length], Path(folder))
        plain, ours = (quantile(taken[kind], 0.5) for kind in ("plain", "session"))
        mean = statistics.fmean(taken["session"]) - statistics.fmean(taken["plain"])
        n, goal = len(taken["session"]), GOAL if length == 100 and not divided else None
        figures += [
            Figure(f"{what}_of_{length}_ms.plain", 1000 * plain, "ms", Better.LOWER, n),
            Figure(f"{what}_of_{length}_ms.cost", 1e6 * (ours - plain), "us", Better.LOWER, n),
            Figure(f"{what}_of_{length}_ms.cost_mean", 1e6 * mean, "us", Better.LOWER, n),
            Figure(f"{what}_of_{length}_ms.share", 100 * (ours - plain) / plain, "%", Better.LOWER, n, goal),
        ]
    return figures


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--measure", nargs=2, type=int, help="used by the script itself")
    args = command.parse_args()
    if args.measure:
        measure(*args.measure)
        return 0
    steps, turns = (40, 3) if args.quick else (STEPS, TURNS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with tempfile.TemporaryFile("w+") as output:
        subprocess.run(
            [*launcher, str(Path(__file__)), "--measure", str(steps), str(turns)],
            stdout=output,
            check=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        output.seek(0)
        seen = json.loads(output.read().strip().splitlines()[-1])
    added = imports(IMPORTS)
    counts, rounds = ({10: 150, 100: 20}, 1) if args.quick else ({10: 1000, 100: 200}, 3)
    plain, ours = quantile(seen["plain"], 0.5), quantile(seen["ours"], 0.5)
    figures = [
        Figure("plain_step", 1000 * plain, "ms", Better.LOWER, turns),
        Figure("session_step", 1000 * ours, "ms", Better.LOWER, turns),
        Figure("session_between_steps", 1e6 * seen["own"], "us", Better.LOWER, steps * turns),
        Figure(
            "session_random_numbers",
            1e6 * quantile(seen["seeding"], 0.5),
            "us",
            Better.LOWER,
            steps * turns,
            RANDOM_GOAL,
        ),
        Figure("import_everstep", 1000 * quantile(added, 0.5), "ms", Better.LOWER, len(added), IMPORT_GOAL),
        Figure("session_share_of_a_step", 100 * seen["own"] / plain, "%", Better.LOWER, steps * turns, GOAL),
        *costs(counts, rounds),
        *costs(counts, rounds, "-model"),
    ]
    return finish(figures, args)


if __name__ == "__main__":
    sys.exit(main())
