"""One cell of the benchmark: one store, one world size, one state size; every subject once a round, interleaved.

Each round writes, reads and deletes one subject's files before the next begins, so that the store never holds more
than two checkpoints, and what disturbs the machine for a while disturbs all subjects alike.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint_parts.meter import Joint
from checkpoint_parts.world import World, warm

SAVES = 4  # in one series of steps
REPEATED = 3  # saves and bare writes in one round: a virtual disk is faster one second than the next
ATTEMPTS = 6  # to give a save enough steps, each time twice as many


@dataclass(frozen=True, slots=True)
class Place:
    """A store: a folder, or a bucket of an S3 server together with the folder where that server keeps its objects."""

    name: str
    folder: Path
    bucket: str = ""

    def url(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}" if self.bucket else str(self.folder / prefix)

    def files(self, prefix: str) -> Path:
        return self.folder / self.bucket / prefix


@dataclass(slots=True)
class Measured:
    """The rounds of one cell, by act."""

    bytes: int = 0
    acts: dict[str, list[Joint]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True, slots=True)
class Cell:
    """Where and how large; `start` makes a new world of this cell's ranks."""

    place: Place
    start: Callable[[], World]
    rounds: int
    full: bool  # torch.save too, and enough saves beside training for a figure


def measure(cell: Cell) -> Measured:
    """All rounds of one cell. Saves run in a world that goes on, as training does; each load in a new one, as after a
    restart: a process that has just begun has touched no memory but its state's."""
    result = Measured()
    for _ in range(cell.rounds):
        for part in (_raw, _everstep, _dcp, _torch):
            if cell.full or part is not _torch:
                prefix = uuid.uuid4().hex
                part(cell, prefix, result)
                _drop(cell.place, prefix)
    return result


def measure_once(cell: Cell) -> Measured:
    """Each subject saves once and loads once, in worlds of their own: the store holds one checkpoint at a time."""
    result = Measured()
    for act, load in (("everstep_first", "everstep_load"), ("dcp_save", "dcp_load"), ("torch_save", "torch_load")):
        prefix = uuid.uuid4().hex
        url = cell.place.url(prefix)
        with cell.start() as world:
            if act == "everstep_first":
                world.time("everstep_open", url=url)
                result.acts[act].append(world.time("everstep_save"))
                world.time("everstep_close")
            else:
                result.acts[act].append(world.time(act, url=url))
        _load(cell, load, prefix, result)
        _drop(cell.place, prefix)
    _raw(cell, uuid.uuid4().hex, result)
    return result


def _raw(cell: Cell, prefix: str, result: Measured) -> None:
    place = cell.place
    with cell.start() as world:
        result.bytes = world.ask("size")[0]
        world.time("copy")  # touches the pages
        result.acts["copy"].append(world.time("copy"))
        if place.bucket:
            result.acts["raw_save"].append(world.time("raw_upload", bucket=place.bucket, prefix=prefix))
            result.acts["raw_load"].append(world.time("raw_download", bucket=place.bucket, prefix=prefix))
            result.acts["s3fs_upload"].append(world.time("s3fs_upload", url=f"{place.url(prefix)}/s3fs"))
            return
        for name, direct in (("raw_buffered", False), ("raw_direct", True)):
            folder = place.files(prefix) / name
            for _ in range(REPEATED if cell.full else 1):
                shutil.rmtree(folder, ignore_errors=True)
                result.acts[name].append(world.time("raw_write", url=str(folder), direct=direct))
            if direct:
                warm(folder)
                result.acts["raw_load"].append(world.time("raw_read", url=str(folder)))
            shutil.rmtree(folder)


def _everstep(cell: Cell, prefix: str, result: Measured) -> None:
    url = cell.place.url(prefix)
    with cell.start() as world:
        world.time("copy")
        world.time("everstep_open", url=url)
        result.acts["everstep_first"].append(world.time("everstep_save"))
        for _ in range(REPEATED):  # warm, as in a run that goes on for days
            result.acts["copy"].append(world.time("copy"))
            result.acts["everstep_save"].append(world.time("everstep_save"))
        world.time("everstep_close")
    _load(cell, "everstep_load", prefix, result)


def _dcp(cell: Cell, prefix: str, result: Measured) -> None:
    url = cell.place.url(prefix)
    with cell.start() as world:
        result.acts["dcp_save"].append(world.time("dcp_save", url=f"{url}/a"))
        _drop(cell.place, f"{prefix}/a")
        world.time("dcp_async_save", url=f"{url}/b")  # the first fills DCP's staging buffers
        _drop(cell.place, f"{prefix}/b")
        result.acts["dcp_async_save"].append(world.time("dcp_async_save", url=f"{url}/c"))
    _load(cell, "dcp_load", f"{prefix}/c", result)


def _torch(cell: Cell, prefix: str, result: Measured) -> None:
    with cell.start() as world:
        result.acts["torch_save"].append(world.time("torch_save", url=cell.place.url(prefix)))
    _load(cell, "torch_load", prefix, result)


def _load(cell: Cell, act: str, prefix: str, result: Measured) -> None:
    with cell.start() as world:
        warm(cell.place.files(prefix))
        result.acts[act].append(world.time(act, url=cell.place.url(prefix)))


def train(cell: Cell) -> TrainingCost:
    """The training figures of one rank on one store."""
    prefix, cores, place = uuid.uuid4().hex, os.cpu_count() or 1, cell.place
    url = place.url(prefix)
    bare: list[float] = []
    with cell.start() as world:
        world.time("everstep_open", url=url)
        world.time("everstep_save")
        slow = max(world.time("everstep_save").wall, world.time("dcp_async_save", url=f"{url}/dcp").wall)
        for _ in range(cell.rounds):
            bare.append(world.time("raw_write", url=str(place.files(prefix) / "raw"), direct=False).cpu)
            _drop(place, f"{prefix}/raw")
        arguments = {"url": f"{url}/dcp", "saves": SAVES if cell.full else 1}
        for attempt in range(1, ATTEMPTS + 1):
            runs = _runs(world, cell.rounds, cores, {**arguments, "seconds": 2**attempt * slow})
            if all(run is not None for series in runs.values() for run in series):
                break
        else:
            raise RuntimeError(f"a save took longer than {2**ATTEMPTS * slow:.1f} s: the machine does something else")
        world.time("everstep_close")
    _drop(place, prefix)
    return TrainingCost(bare, runs, cores)


def _runs(world: World, rounds: int, cores: int, arguments: dict[str, Any]) -> dict[str, list[Any]]:
    """The series of steps by subject and cores. With a None among them a save took longer than its steps."""
    runs: dict[str, list[Any]] = defaultdict(list)
    for _ in range(rounds):
        for subject in ("none", "everstep", "dcp"):
            for name, threads in (("all", cores), ("spare", max(1, cores - 1))):
                runs[f"{subject}.{name}"] += world.ask("train", subject=subject, threads=threads, **arguments)
    return runs


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """CPU seconds of the bare writes, and the runs by subject (none, everstep, dcp) and cores (all, spare)."""

    bare: list[float]
    runs: dict[str, list[Any]]
    cores: int

    def cost(self, subject: str) -> float:
        """Added wall time × cores of one save ÷ CPU seconds of a bare write of its bytes."""
        mine, none = self.runs[f"{subject}.all"], self.runs["none.all"]
        added = median(r.wall for r in mine) - median(r.wall for r in none)
        return float(added / mine[0].saved * self.cores / median(self.bare))

    def slower(self, subject: str) -> float:
        """How much longer a step takes while a save is in flight and a core is free, in percent.

        Than the others of its own series: a virtual machine's cores are faster one second than the next.
        """
        return float((median(r.slow / r.plain for r in self.runs[f"{subject}.spare"]) - 1) * 100)


def _drop(place: Place, prefix: str) -> None:
    shutil.rmtree(place.files(prefix), ignore_errors=True)


def seconds(measured: Measured) -> dict[str, Any]:
    """Every wall time, for the notes of a run."""
    return {act: [round(j.wall, 4) for j in joints] for act, joints in sorted(measured.acts.items())}
