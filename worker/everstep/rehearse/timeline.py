"""What happened when in a run of a rehearsal: the steps of each rank, starts and deaths of processes, commits."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from everstep.rehearse import record
from everstep.rehearse.plan import Kill

MOST_STEPS = 5000  # steps of all ranks that are kept
_MARKER = re.compile(r"killed-(.+)-(\d+)")


@dataclass(frozen=True)
class Event:
    """`at`: seconds since the run began. `rank`: None for a commit, which is of all."""

    at: float
    text: str
    rank: int | None = None


@dataclass(frozen=True)
class Timeline:
    """`starts`: the first step of each process."""

    steps: tuple[Event, ...] = ()
    starts: tuple[Event, ...] = ()
    kills: tuple[Event, ...] = ()
    commits: tuple[Event, ...] = ()

    @property
    def ranks(self) -> int:
        return 1 + max((event.rank or 0 for event in (*self.steps, *self.kills)), default=-1)


def read(folder: Path, began: float) -> Timeline:
    """Of the run in `folder`, which began at a time since the epoch."""
    records = sorted(record.each(folder), key=lambda one: one.at)
    steps = [Event(one.at - began, f"rank {one.rank}, step {one.step}", one.rank) for one in records]
    first = {one.pid: one for one in reversed(records)}
    starts = [
        Event(one.at - began, f"rank {one.rank} in a new process, from step {one.step} on", one.rank)
        for one in sorted(first.values(), key=lambda one: one.at)
    ]
    kills = []
    for path in folder.glob(record.KILLS):
        if (found := _MARKER.fullmatch(path.name)) is not None:
            kill = Kill.parse(found[1])
            text = f"rank {found[2]} killed in step {kill.step} ({kill.point})"
            kills.append(Event(path.stat().st_mtime - began, text, int(found[2])))
    return Timeline(
        tuple(steps[:MOST_STEPS]), tuple(starts), tuple(sorted(kills, key=lambda one: one.at)),
        tuple(Event(at - began, f"commit of step {step}") for at, step in commits(folder, began)),
    )  # fmt: skip


def commits(folder: Path, began: float) -> list[tuple[float, int]]:
    """When each was made, and its step; but for that from which the run began."""
    found = []
    for path in folder.glob("commits*/log/*.json"):
        try:
            entry = json.loads(path.read_text().partition("\n")[0])  # a checksum follows
        except ValueError:
            continue
        at = path.stat().st_mtime
        if entry["kind"] == "commit" and at >= began:
            found.append((at, int(entry["step"])))
    return sorted(found)
