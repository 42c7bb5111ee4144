"""Records what was seen during a local run, in order, one JSON object a line. The timeline is drawn from it.

Everything but `History.save` is pure. Invariant: entries contain only what was seen. Their time is when the run itself
saw it, in seconds since its beginning. Two sources of one event stay two entries.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

READY = "Ready"  # a pod's phase where nobody hears the steps of each worker: it has joined the world
MAX_ENTRIES = 200_000  # enough for days; after that step reports are dropped, but never changes


@dataclass(frozen=True, slots=True)
class PodSeen:
    """A pod changed. `phase` is Kubernetes' word, "Deleted" when the object is gone, or `READY`."""

    kind: ClassVar[str] = "pod"
    at: float
    pod: str
    worker: int
    round: int
    node: str
    phase: str


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A progress report of a training process that has completed `step`."""

    kind: ClassVar[str] = "step"
    at: float
    pod: str
    worker: int
    rank: int
    world_size: int
    step: int
    loss: float | None = None
    round: int = 0  # the round in which the process trained; 0: unknown


@dataclass(frozen=True, slots=True)
class StatusSeen:
    """The job's status changed: `reason` is that of its Ready condition."""

    kind: ClassVar[str] = "status"
    at: float
    reason: str
    message: str
    round: int
    size: int
    committed: int | None = None


@dataclass(frozen=True, slots=True)
class EventSeen:
    """A Kubernetes event about the job. `time`: its own, RFC 3339."""

    kind: ClassVar[str] = "event"
    at: float
    type: str
    reason: str
    message: str
    time: str = ""


@dataclass(frozen=True, slots=True)
class ActionTaken:
    """An action of a person through the command line. `worker`: the worker that it affected, if any."""

    kind: ClassVar[str] = "action"
    at: float
    text: str
    worker: int | None = None


Entry = PodSeen | StepSeen | StatusSeen | EventSeen | ActionTaken
_KINDS: dict[str, type[Entry]] = {t.kind: t for t in (PodSeen, StepSeen, StatusSeen, EventSeen, ActionTaken)}


class HistoryError(ValueError):
    """A line is not an entry; the text names the line."""


class History:
    """The entries so far. Step reports that repeat a step of the same pod are dropped."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries = list(entries)
        self._steps: dict[str, int] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def since(self, index: int) -> list[Entry]:
        """The entries from the `index`-th on."""
        return self._entries[index:]

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        if isinstance(entry, StepSeen):
            if self._steps.get(entry.pod) == entry.step or len(self._entries) >= MAX_ENTRIES:
                return
            self._steps[entry.pod] = entry.step
        self._entries.append(entry)

    def save(self, path: Path) -> None:
        path.write_text("".join(encode(e) + "\n" for e in self._entries), "utf-8")

    @classmethod
    def load(cls, path: Path) -> History:
        """Raises `HistoryError` for a line that is no entry, `OSError` where the file cannot be read."""
        return cls(decode(line, f"{path}:{n}") for n, line in enumerate(path.read_text("utf-8").splitlines(), 1))


def thinned(entries: Iterable[Entry], most: int) -> list[Entry]:
    """The entries with about `most` of the step reports. Those from which a timeline takes its lanes and spans stay: of
    each pod and round the last one, and the first two after a change of the status."""
    every = list(entries)
    steps = sum(isinstance(e, StepSeen) for e in every)
    if steps <= most:
        return every
    kept: set[int] = set()
    last: dict[tuple[str, int], int] = {}
    after: Counter[tuple[str, int]] = Counter()  # reports since the status changed
    for index, entry in enumerate(every):
        if isinstance(entry, StepSeen):
            member = entry.pod, entry.round
            last[member] = index
            after[member] += 1
            if after[member] > 2 and index % math.ceil(steps / most):
                continue
        elif isinstance(entry, StatusSeen):
            after.clear()
        kept.add(index)
    return [every[index] for index in sorted(kept.union(last.values()))]


def encode(entry: Entry) -> str:
    """One line, without the newline."""
    return json.dumps({"kind": entry.kind, **asdict(entry)}, separators=(",", ":"))


def decode(line: str, where: str = "line") -> Entry:
    """The entry that `encode` wrote."""
    try:
        body: dict[str, Any] = json.loads(line)
        return _KINDS[body.pop("kind")](**body)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise HistoryError(f"{where}: not an entry of a run's history: {e}") from e
