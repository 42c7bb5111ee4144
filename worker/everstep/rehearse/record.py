"""What a rehearsal notes of one rank behind each of its steps: short digests and texts, one line of JSON a step.

Pure but for reading and writing files. Invariant: equal digests mean equal bits.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

RECORDS, KILLS = "records-*.jsonl", "killed-*"
AWAY = "away-"  # and a process: it has sent a request to the store of commits while that was away
# A training process wants the agent to be stopped; it is; it goes on.
ROUNDS_WANTED, ROUNDS_AWAY, ROUNDS_BACK = "rounds-wanted", "rounds-away", "rounds-back"
MARKS = "marks/*"  # each of a save that a loop of the script's own has begun, or of its commit
COMMITS = "by-commits"  # the script's loop is a function of hvd.elastic.run
OWN = "own"  # a rank was killed in a loop of the script's own, whose ranks all start again
LIBRARY = "library"  # a library has the loop, and an adapter of ours trains by it
DIGEST = " with digest "  # in `held`, as `train.guards.contents` writes it: between what a value is and its digest
NUMBER = "number "  # in `tracked`: before a number, which has a name of its own (`meter['seconds']`)
BUFFERS = "the buffers of "  # in `tracked`: before the name of a module, which is that of its other state
MOST_BYTES = 64 * 2**20  # of the script's own tensors together: they are read behind each step
OVER = "over-"  # and the id of a save: it is a commit, or has failed
LATE = "late"  # a training process has waited in vain, for a save or for the process of the rehearsal
EVALUATED = "evaluated-"  # and how many steps were complete when the script evaluated, and its forward passes
IN_WORKERS, IN_FILES = "workers-*", "kept-in-files-*"  # what `worker_state` and `file_state` name
UNCONVERTED = "unconverted"  # no file of the script's that a process had loaded at its end names Everstep or Horovod
CHANGE_WANTED = "change-wanted"  # a training process waits for the change of size in which processes go on
_STEP = re.compile(rb'^{"step":(\d+),', re.MULTILINE)  # as `Record.line` begins
GONE = "gone"  # a process began in place of one that was killed, in a run that ends there


@dataclass(frozen=True)
class Record:
    """`step`: how many steps are complete. `tracked`: a digest of each tracked object's state, one of a module's
    buffers, and the numbers in what is plain. `held`: the script's own plain values, as text, and others, as what they
    are and a digest. `samples`: a digest of each sample that this rank has read for the step, sorted. `position`: how
    many batches a loader has given since its loop began, where the script's loop is its own. `indices`: the names that
    count them by `enumerate`. `beyond`: the names of what is too much. `unread`: one of each class whose objects cannot
    be read. `drawn`, `losses`: see `Draws`; of steps without a loader."""

    step: int
    rank: int
    world: int
    pid: int
    at: float  # seconds since the epoch
    tracked: dict[str, str] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)
    position: int = 0
    indices: list[str] = field(default_factory=list)
    untracked: list[str] = field(default_factory=list)  # the names that the script has declared by `run.untracked`
    unread: list[str] = field(default_factory=list)
    drawn: dict[str, str] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)

    def line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"


Steps = dict[tuple[int, int], Record]  # (rank, completed steps) → what was noted last


def read(folder: Path, *, size: int | None = None, but: int | None = None) -> Steps:
    """Of a step that was taken again, the last: that is what the run has gone on from. `size`: steps with so many ranks
    alone; `but`: all others. The last line of a process that was killed may be cut off."""
    found: Steps = {}
    for record in each(folder):
        if size not in (None, record.world) or record.world == but:
            continue
        known = found.get((record.rank, record.step))
        if known is None or record.at >= known.at:
            found[record.rank, record.step] = record
    return found


def began_again(folder: Path) -> bool:
    """Whether the first step was taken anew after several ranks had been killed at once in a later one: then nothing
    had been saved, and no rank that was left had the state. In a loop of the script's own all start again behind each
    kill: whether it was so behind the last one."""
    kills = {path.name: path.stat().st_mtime for path in folder.glob(KILLS)}
    several = [at for name, at in kills.items() if "+" in name and "@0:" not in name]
    since = min(several, default=max(kills.values()) if kills and (folder / OWN).exists() else None)
    return since is not None and any(record.step == 1 and record.at > since for record in each(folder))


def note_unconverted(folder: Path, files: Collection[str]) -> None:
    """Of a script whose `files` name neither Everstep nor Horovod. Raises `OSError`."""
    texts = (Path(file).read_bytes() for file in files if Path(file).is_file())  # torch has modules without files
    if not any(b"everstep" in text or b"horovod" in text for text in texts):
        (folder / UNCONVERTED).touch()


def write_whole(path: Path, text: str) -> None:
    """The file is there with all of the text, or not at all, wherever the process is killed."""
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def evaluated(folder: Path) -> dict[int, int]:
    """Behind how many steps the script has evaluated, each with the forward passes of tracked modules in that."""
    found = [path.name.removeprefix(EVALUATED).partition("-") for path in folder.glob(f"{EVALUATED}*")]
    return dict(
        sorted(((int(step), int(passes)) for step, _, passes in found), reverse=True)
    )  # the fewest of all ranks


def noted(folder: Path, pattern: str) -> tuple[str, ...]:
    """The lines of these files of the run's processes, each once, sorted."""
    return tuple(sorted({line for path in folder.glob(pattern) for line in path.read_text().splitlines()}))


class Progress:
    """Of a run that is in progress: the newest step, read from what its records have grown by."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read = folder, dict[Path, int]()
        self.step = 0

    def look(self) -> int:
        """The newest step that is complete."""
        for path in self._folder.glob(RECORDS):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, end, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole + end)
            self.step = max(self.step, *(int(found) for found in _STEP.findall(whole)), 0)
        return self.step


def each(folder: Path) -> Iterator[Record]:
    """All of them, of steps that were taken again too."""
    for path in sorted(folder.glob(RECORDS)):
        for line in path.read_text().splitlines():
            try:
                yield Record(**json.loads(line))
            except ValueError:
                continue
