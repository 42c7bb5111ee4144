"""One cell of the benchmark: one store, one world size, one state size; every subject once a round, interleaved.

Each round writes, reads and deletes one subject's files before the next begins, so that the store never holds more
than two checkpoints, and what disturbs the machine for a while disturbs all subjects alike.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint_parts.meter import Joint
from checkpoint_parts.world import World, warm


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

    bytes: int
    acts: dict[str, list[Joint]] = field(default_factory=lambda: defaultdict(list))


def measure(world: World, place: Place, rounds: int, quick: bool) -> Measured:
    """All rounds of one cell."""
    result = Measured(world.ask("size")[0])
    world.time("copy")  # the first touches the pages
    for _ in range(rounds):
        for part in (_raw, _everstep, _dcp, _torch):
            if not (quick and part is _torch):
                prefix = uuid.uuid4().hex
                part(world, place, prefix, result)
                shutil.rmtree(place.files(prefix), ignore_errors=True)
    return result


def _raw(world: World, place: Place, prefix: str, result: Measured) -> None:
    if place.bucket:
        result.acts["raw_save"].append(world.time("raw_upload", bucket=place.bucket, prefix=prefix))
        result.acts["raw_load"].append(world.time("raw_download", bucket=place.bucket, prefix=prefix))
        return
    for name, direct in (("raw_buffered", False), ("raw_direct", True)):
        folder = place.files(prefix) / name
        result.acts[name].append(world.time("raw_write", url=str(folder), direct=direct))
        shutil.rmtree(folder)


def _everstep(world: World, place: Place, prefix: str, result: Measured) -> None:
    world.time("everstep_open", url=place.url(prefix))
    result.acts["everstep_first"].append(world.time("everstep_save"))
    # Three in a row: the state was staged twice already when the last begins, as in a run that goes on for days.
    for _ in range(2):
        result.acts["copy"].append(world.time("copy"))
        result.acts["everstep_save"].append(world.time("everstep_save"))
    world.time("everstep_close")
    _load(world, "everstep_load", place, prefix, result)


def _dcp(world: World, place: Place, prefix: str, result: Measured) -> None:
    _save(world, "dcp_save", place, f"{prefix}/a", result)
    for name in ("b", "c"):  # the first fills DCP's staging buffers
        _drop(place, f"{prefix}/a")
        _drop(place, f"{prefix}/b")
        joint = world.time("dcp_async_save", url=place.url(f"{prefix}/{name}"))
    result.acts["dcp_async_save"].append(joint)
    world.time("dcp_end")
    _load(world, "dcp_load", place, f"{prefix}/c", result)


def _torch(world: World, place: Place, prefix: str, result: Measured) -> None:
    _save(world, "torch_save", place, prefix, result)
    _load(world, "torch_load", place, prefix, result)


def train(world: World, place: Place, rounds: int) -> Trained:
    """The training figures of one rank on one store."""
    prefix, cores = uuid.uuid4().hex, os.cpu_count() or 1
    url = place.url(prefix)
    world.time("everstep_open", url=url)
    world.time("everstep_save")
    slow = max(world.time("everstep_save").wall, world.time("dcp_async_save", url=f"{url}/dcp").wall)
    runs: dict[str, list[Any]] = defaultdict(list)
    bare: list[float] = []
    for _ in range(rounds):
        bare.append(world.time("raw_write", url=str(place.files(prefix) / "raw"), direct=False).cpu)
        _drop(place, f"{prefix}/raw")
        for subject in ("none", "everstep", "dcp"):
            for name, threads in (("all", cores), ("spare", max(1, cores - 1))):
                arguments = {"subject": subject, "url": f"{url}/dcp", "seconds": 2 * slow, "threads": threads}
                runs[f"{subject}.{name}"] += world.ask("train", **arguments)
    world.time("everstep_close")
    world.time("dcp_end")
    _drop(place, prefix)
    return Trained(bare, runs, cores)


@dataclass(frozen=True, slots=True)
class Trained:
    """CPU seconds of the bare writes, and the runs by subject (none, everstep, dcp) and cores (all, spare)."""

    bare: list[float]
    runs: dict[str, list[Any]]
    cores: int

    def cost(self, subject: str) -> float:
        """Added wall time × cores of one save ÷ CPU seconds of a bare write of its bytes."""
        mine, none = self.runs[f"{subject}.all"], self.runs["none.all"]
        added = median(r.wall for r in mine) - median(r.wall for r in none)
        return added / mine[0].saved * self.cores / median(self.bare)

    def slower(self, subject: str) -> float:
        """How much longer a step takes while a save is in flight and a core is free, in percent."""
        plain = median(r.plain for r in self.runs["none.spare"])
        return (median(r.slow for r in self.runs[f"{subject}.spare"]) / plain - 1) * 100


def _save(world: World, act: str, place: Place, prefix: str, result: Measured) -> None:
    result.acts[act].append(world.time(act, url=place.url(prefix)))


def _load(world: World, act: str, place: Place, prefix: str, result: Measured) -> None:
    warm(place.files(prefix))
    result.acts[act].append(world.time(act, url=place.url(prefix)))


def _drop(place: Place, prefix: str) -> None:
    shutil.rmtree(place.files(prefix), ignore_errors=True)


def seconds(measured: Measured) -> dict[str, Any]:
    """Every wall time, for the notes of a run."""
    return {act: [round(j.wall, 4) for j in joints] for act, joints in sorted(measured.acts.items())}
