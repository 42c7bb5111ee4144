"""What elastic data costs: the computed permutation beside stored ones, the loader beside torch's own.

    python benchmarks/data.py [--quick] [--json PATH]

Figures:
- `permutation.*`: nanoseconds of processor time an index, for a whole epoch's order, and the memory that it takes
  beyond what the process had. `best` and `worst` are the sizes at which the network fits exactly and at which it is
  twice too large. numpy and torch store the whole order, each rank of it; ours stores nothing.
- `first_index.*`: time until the first local batch's indices of an epoch of many samples are known: an epoch's start,
  and what a resume in the middle of it costs too.
- `batch.*`: processor time of the training process a batch, the least of all rounds, with free samples, beside
  `DataLoader(sampler=DistributedSampler)` on the same tensors. `seeded` is the default, with a random seed for each
  sample (with workers, they pay for it); `plain` is without. `added` is ours plain - torch's.
- `reshard`: from the call to the next batch, with two workers that have prefetched.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]
from figures import Better, Figure, finish, parser, spread

from everstep.data import ElasticLoader, Permutation
from everstep.data.plan.order import Shuffled, order_of

MIB = 2**20
BATCH = 64  # samples of a local batch


def memory(name: str) -> int:
    """VmHWM or VmRSS of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def in_child(work: Callable[[], Any]) -> tuple[float, float]:
    """Processor seconds and peak extra bytes of `work` in a process of its own."""
    receive, send = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before, began = memory("VmRSS"), time.process_time()
        work()
        send.send((time.process_time() - began, float(memory("VmHWM") - before)))
        os._exit(0)
    found: tuple[float, float] = receive.recv()
    os.waitpid(pid, 0)
    return found


def in_pieces(n: int) -> None:
    """The whole order of an epoch as a loader asks for it: some thousand indices at a time, none of them kept."""
    order = Permutation(n, b"benchmark")
    for start in range(0, n, 4096):
        order.take(np.arange(start, min(start + 4096, n)))


def in_one(n: int) -> None:
    """The same in larger calls, as a tool that lists a whole epoch would ask."""
    order = Permutation(n, b"benchmark")
    for start in range(0, n, MIB):
        order.take(np.arange(start, min(start + MIB, n)))


def permutations(power: int, rounds: int) -> Iterator[Figure]:
    best, worst = 2**power, 2**power + 1
    cases: dict[str, tuple[int, Callable[[], Any]]] = {
        "everstep_best": (best, lambda: in_one(best)),
        "everstep_worst": (worst, lambda: in_one(worst)),
        "everstep_as_read": (best, lambda: in_pieces(best)),
        "numpy": (best, lambda: np.random.permutation(best)),
        "torch": (best, lambda: torch.randperm(best)),
    }
    for name, (n, work) in cases.items():
        samples = [in_child(work) for _ in range(rounds)]
        nanoseconds, extra = median(s[0] for s in samples) / n * 1e9, median(s[1] for s in samples)
        yield Figure(f"permutation.{name}", nanoseconds, "ns/index", Better.LOWER, rounds)
        goal = 32.0 if name.startswith("everstep") else None  # whatever n is
        yield Figure(f"permutation_memory.{name}", extra / MIB, "MiB", Better.LOWER, rounds, goal)


def first_index(n: int, rounds: int) -> Iterator[Figure]:
    def ours() -> None:
        order_of(Shuffled(), n, 0, 0).take(np.arange(n // 2, n // 2 + BATCH))

    def torchs() -> None:
        torch.randperm(n)[n // 2 : n // 2 + BATCH].tolist()

    yield Figure("first_index.everstep", median(timed(ours, rounds)) * 1e3, "ms", Better.LOWER, rounds, 5.0)
    yield Figure("first_index.torch", median(timed(torchs, rounds)) * 1e3, "ms", Better.LOWER, rounds)


def timed(work: Callable[[], Any], rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found


def per_batch(batches: Iterable[Any], count: int) -> float:
    """Processor time of this process a batch, in microseconds; the first batches start workers and are left out."""
    loop = iter(batches)
    for _ in range(8):
        next(loop)
    began = time.process_time()
    for _ in range(count):
        next(loop)
    return (time.process_time() - began) / count * 1e6


def batches(count: int, rounds: int) -> Iterator[Figure]:
    data = TensorDataset(torch.zeros((count + 64) * BATCH * 2, 8))
    for workers in (0, 2):
        context = {"multiprocessing_context": "fork"} if workers else {}

        def torchs(workers: int = workers, context: dict[str, str] = context) -> Iterable[Any]:
            sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0)
            return DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=workers, **context)  # type: ignore[arg-type]

        def ours(seeded: bool, workers: int = workers) -> Iterable[Any]:
            return ElasticLoader(
                data, global_batch=2 * BATCH, rank=0, world_size=2, num_workers=workers, seed_samples=seeded
            )

        found: dict[str, list[float]] = {"torch": [], "plain": [], "seeded": []}
        for _ in range(rounds):  # interleaved: what disturbs the machine disturbs all of them
            found["torch"].append(per_batch(torchs(), count))
            found["plain"].append(per_batch(ours(False), count))
            found["seeded"].append(per_batch(ours(True), count))
        for name, samples in found.items():
            yield Figure(f"batch.{workers}_workers.{name}", min(samples), "µs", Better.LOWER, rounds)
        added = min(found["plain"]) - min(found["torch"])
        yield Figure(f"batch.{workers}_workers.added", added, "µs", Better.LOWER, rounds, 50.0)


def reshard(rounds: int) -> Iterator[Figure]:
    data = TensorDataset(torch.zeros(1_000_000, 8))
    loader = ElasticLoader(data, global_batch=8 * BATCH, rank=0, world_size=8, num_workers=2)
    loop = iter(loader)
    found = []
    for number in range(rounds):
        for _ in range(4):
            next(loop)
        loader.acknowledge()
        time.sleep(0.05)  # the workers fill their queues, as they do beside a training step
        began = time.perf_counter()
        loader.reshard(0, 7 + number % 2)
        next(loop)
        found.append((time.perf_counter() - began) * 1e3)
    loader.close()
    yield from spread("reshard", found, "ms")


def main() -> int:
    args = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    quick = args.quick
    figures = [
        *permutations(power=20 if quick else 26, rounds=1 if quick else 3),
        *first_index(10**6 if quick else 10**7, rounds=3 if quick else 5),
        *batches(count=50 if quick else 1000, rounds=1 if quick else 8),
        *reshard(rounds=4 if quick else 40),
    ]
    return finish(figures, args)


if __name__ == "__main__":
    sys.exit(main())
