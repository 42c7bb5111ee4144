"""What a checkpoint costs: ours beside `torch.save`, DCP and the bare reads, writes and copies of the same bytes.

    python benchmarks/checkpoint.py [--quick] [--json PATH] [--store disk|tmpfs|s3] [--ranks N] [--gib N] [--rounds N]

Every cell (store, ranks, GiB of replicated state) measures all subjects in one run, interleaved; figures are medians.
The state is a decoder's parameters and Adam's moments (`checkpoint_parts/model.py`). The S3 server is versitygw on a
tmpfs, on the same cores as its clients. On files every row is durable: synced before it counts as done.

Figures, by cell:
- `blocked`: the time that `save` keeps the training loop ÷ a warm `memmove` of the same bytes. The first save, which
  makes its buffers, is apart (`first_blocked`, seconds).
- `save`: our throughput until the commit is durable ÷ the better of two bare concurrent writes of the same bytes, one
  through the page cache and synced, one around it (O_DIRECT); on S3 ÷ a bare multipart upload, parts at once.
- `load`: DCP's `load` into existing tensors ÷ our `restore`, both in a new process as after a restart, from a warm page
  cache; ours verifies checksums, DCP has none. On S3: bare concurrent ranged GETs ÷ our `restore`, both without the
  time that making a client takes. `load_over_raw`: bare concurrent reads without any check ÷ our `restore`.
- `upload_cpu`: CPU seconds of s3fs's `pipe_file` ÷ those of one of our saves, staging and checksums included.
- `memory`: peak resident memory of two saves beyond what was there before the Checkpointer ÷ the bytes staged.
- `comparing`: milliseconds of CPU that one rank spends on comparing its state with the others' before a save
  (`checkpoint_parts/comparing.py`): the Checkpointer's `samples` and `bytes`, and the session's comparison.
- `--once` is for a state that is larger than the memory for two of it, or than the disk for two checkpoints. `save` is
  of the first save then, which makes its buffers, and `memory` is its peak.
- `training_cost`, `steps_slower`: what a save takes from the steps beside it; see `checkpoint_parts/training.py`. One
  rank, files only: an S3 server on the same cores would take them from the steps itself. The first size only: it takes
  as many steps as the slowest save lasts, many times.

Goals that are missed on the machine of the table in docs/operations/checkpoint-speed.md (2 cores), and why:
- `load` on files: five times DCP's rate is more than bare reads reach there without any check.
- `steps_slower`: what writes and what multiplies share memory and caches, and on a virtual machine more than those;
  DCP's async save beside it tells how quiet the machine was.
- `save`: the copy to staging counts, the bare write needs none; on tmpfs a rank's one file takes one writer at a time.
- `training_cost` on tmpfs: the bare write is nothing but a copy, ours copies, hashes and looks for NaN besides.
- `load` on S3: the log's small requests and the checksums.
- `blocked` with several ranks: the slowest rank counts, and they share two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks")]

from checkpoint_parts import comparing
from checkpoint_parts.cell import Cell, Measured, Place, TrainingCost, measure, measure_once, seconds, train
from checkpoint_parts.meter import Joint, middle
from checkpoint_parts.world import World
from figures import Better, Figure, finish, parser

GIB = 2**30
QUICK_SIZE = 2**27
ROUNDS = 3
SHM = Path("/dev/shm")


def arguments() -> argparse.Namespace:
    p = parser(__doc__)
    p.add_argument("--store", action="append", choices=["disk", "tmpfs", "s3"], help="default: all; quick: disk, s3")
    p.add_argument("--ranks", action="append", type=int, help="default: 1, 2 and 4; quick: 1")
    p.add_argument("--gib", action="append", type=float, help="default: 1 and 4; quick: 0.125")
    p.add_argument("--rounds", type=int, help=f"default: {ROUNDS}; quick: 1")
    p.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk to measure")
    p.add_argument("--only-training", action="store_true", help="only what a save takes from the steps beside it")
    p.add_argument("--once", action="store_true", help="one rank, disk, one save each; the state maps one block")
    p.add_argument("--samples", type=Path, metavar="PATH", help="write every wall time there, as JSON")
    args = p.parse_args()
    args.store = args.store or (["disk", "s3"] if args.quick else ["disk", "tmpfs", "s3"])
    args.ranks = args.ranks or ([1] if args.quick else [1, 2, 4])
    args.gib = args.gib or ([QUICK_SIZE / GIB] if args.quick else [1, 4])
    args.rounds = args.rounds or (1 if args.quick else ROUNDS)
    return args


@contextlib.contextmanager
def place(name: str, disk: Path) -> Iterator[tuple[Place, dict[str, str]]]:
    """The store and the environment that its clients need; what it holds is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-bench-", dir=disk if name == "disk" else SHM))
    try:
        if name != "s3":
            yield Place(name, folder), {}
            return
        from testcluster.s3 import S3Server  # noqa: PLC0415  builds the server where it is not cached

        server = S3Server(folder)
        server.start()
        try:
            yield Place(name, server.data, server.bucket("bench")), server.env
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


def free_memory() -> int:
    """Bytes of memory that programs can still have."""
    pages, page = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return next(
        (int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvail" in line),
        pages * page,
    )


def fits(name: str, ranks: int, size: int) -> bool:
    """Whether memory is there: each rank's process and state; what we stage and the memcpy beside it, or DCP's copies
    of every rank's state; and two checkpoints where files are memory."""
    return size * (ranks + max(2.3, ranks) + (0 if name == "disk" else 2)) + ranks * 2**29 < free_memory()


def fits_once(disk: Path, size: int) -> bool:
    """Whether the disk holds one checkpoint, and memory one staged copy and a process."""
    return 1.05 * size < shutil.disk_usage(disk).free and 1.05 * size + 2**30 < free_memory()


def figures_of(cell: str, m: Measured, s3: bool) -> list[Figure]:
    """The figures of one cell, its goals among them."""
    lower, higher = Better.LOWER, Better.HIGHER
    n = len(m.acts["everstep_save"])
    loads = len(m.acts["everstep_load"])
    wall = {act: middle(joints) for act, joints in m.acts.items()}
    raw = wall["raw_save"] if s3 else min(wall["raw_buffered"], wall["raw_direct"])
    load = wall["raw_load"] if s3 else wall["dcp_load"]

    def blocked(joint: Joint) -> float:
        return joint.blocked

    first, later = m.acts["everstep_first"], m.acts["everstep_save"]
    peak = max(j.extra for j in first + later) / m.bytes
    stuck = middle(later, blocked)
    found = [
        Figure(f"blocked.{cell}", stuck / wall["copy"], "x", lower, n, goal=1.1),
        Figure(f"save.{cell}", raw / wall["everstep_save"], "x", higher, n, goal=0.9),
        Figure(f"load.{cell}", load / wall["everstep_load"], "x", higher, loads, goal=0.9 if s3 else 5),
        Figure(f"load_over_raw.{cell}", wall["raw_load"] / wall["everstep_load"], "x", higher, loads),
        Figure(f"memory.{cell}", peak, "x", lower, n, goal=1.2),
        Figure(f"seconds.{cell}.everstep_blocked", stuck, "s", lower, n),
        Figure(f"seconds.{cell}.everstep_first_blocked", middle(first, blocked), "s", lower, len(first)),
        Figure(f"seconds.{cell}.dcp_async_blocked", middle(m.acts["dcp_async_save"], blocked), "s", lower, loads),
    ]
    if s3:
        cpu = middle(m.acts["s3fs_upload"], lambda j: j.cpu) / middle(later, lambda j: j.cpu)
        found.append(Figure(f"upload_cpu.{cell}", cpu, "x", higher, n, goal=3))
    found += [Figure(f"seconds.{cell}.{act}", wall[act], "s", lower, len(m.acts[act])) for act in sorted(wall)]
    return found


def once_figures(cell: str, m: Measured) -> list[Figure]:
    """The figures of a state of which one checkpoint at a time fits."""
    wall = {act: middle(joints) for act, joints in m.acts.items()}
    raw, save = min(wall["raw_buffered"], wall["raw_direct"]), m.acts["everstep_first"][0]
    return [
        Figure(f"save.{cell}", raw / save.wall, "x", Better.HIGHER, 1, goal=0.9),
        Figure(f"load.{cell}", wall["dcp_load"] / wall["everstep_load"], "x", Better.HIGHER, 1, goal=5),
        Figure(f"load_over_raw.{cell}", wall["raw_load"] / wall["everstep_load"], "x", Better.HIGHER, 1),
        Figure(f"memory.{cell}", save.extra / m.bytes, "x", Better.LOWER, 1, goal=1.2),
        Figure(f"seconds.{cell}.everstep_first_blocked", save.blocked, "s", Better.LOWER, 1),
        *(Figure(f"seconds.{cell}.{act}", wall[act], "s", Better.LOWER, 1) for act in sorted(wall)),
    ]


def training_figures(cell: str, t: TrainingCost, n: int) -> list[Figure]:
    """What a save takes from training, ours with its goals and DCP's beside it."""
    lower = Better.LOWER
    return [
        Figure(f"training_cost.{cell}", t.cost("everstep"), "x", lower, n, goal=1.2),
        Figure(f"training_cost.{cell}.dcp_async", t.cost("dcp"), "x", lower, n),
        Figure(f"steps_slower.{cell}", t.slower("everstep"), "%", lower, n, goal=5),
        Figure(f"steps_slower.{cell}.dcp_async", t.slower("dcp"), "%", lower, n),
        Figure(f"seconds.{cell}.bare_write_cpu", median(t.bare), "s", lower, n),
    ]


def main() -> int:
    args = arguments()
    samples: dict[str, object] = {}
    if args.once:
        gib = args.gib[0]
        if not fits_once(args.disk, int(gib * GIB)):
            sys.exit(f"{args.disk} has no room for a checkpoint of {gib:g} GiB, or memory none for a copy of the state")
        with place("disk", args.disk) as (where, env):
            start = partial(World, 1, int(gib * GIB), env, mapped=True)
            measured = measure_once(Cell(where, start, 1, full=False))
        return finish(once_figures(f"disk.1r.{gib:g}gib.once", measured), args)
    figures = [] if args.only_training else comparing.figures()
    for gib in args.gib:
        for ranks in args.ranks:
            for name in args.store:
                cell, size = f"{name}.{ranks}r.{gib:g}gib", int(gib * GIB)
                if not fits(name, ranks, size):
                    print(f"{cell}: left out, too little memory is free on this machine", file=sys.stderr)
                    continue
                with place(name, args.disk) as (where, env):
                    start = partial(World, ranks, size, env)
                    if not args.only_training:
                        measured = measure(Cell(where, start, args.rounds, full=not args.quick))
                        figures += figures_of(cell, measured, name == "s3")
                        samples[cell] = seconds(measured)
                    if ranks == 1 and name != "s3" and gib == args.gib[0]:
                        cost = train(Cell(where, start, args.rounds, full=not args.quick))
                        figures += training_figures(cell, cost, args.rounds)
    if args.samples:
        args.samples.write_text(json.dumps(samples, indent=1))
    return finish(figures, args)


if __name__ == "__main__":
    sys.exit(main())
