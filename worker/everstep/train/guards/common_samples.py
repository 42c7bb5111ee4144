"""Refuses a run whose ranks read other samples under the same index, and one that reads others than when it was saved.

The session divides one order of indices among the ranks. If a process has shuffled its data for itself, samples come
twice, others never, and some of them are those that were held out; nothing raises an error. So after the first step of
each world all ranks compare a few samples (`everstep.data.common`), before anything of that step is saved. A process
reads them once. Invariants: ranks compare at the same steps, and raise together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from everstep.data.common import facts_of
from everstep.data.sketches import Sketch, differ, stored
from everstep.recovery.errors import LoopError
from everstep.recovery.forming.same_calls import gather_texts
from everstep.recovery.state.randomness import Gather

SAMPLES: Final = "data_samples"  # the name in a commit

_REMEDY: Final = (
    "Let each process make the same dataset, in the same order: seed a split, `random_split(dataset, lengths, "
    "generator=torch.Generator().manual_seed(0))`; sort files, `sorted(glob(…))`, and what comes out of a set; leave "
    "it to the loader to give each rank its share"
)


OPTION: Final = "run.loader(dataset, …, compare_samples=False)"


@dataclass(frozen=True, slots=True)
class Source:
    """A `dataset` that is trained on. `read` gives the sketches by index. `may_change`: a restart may read other
    samples. `option`: what switches the comparison off."""

    words: str
    dataset: Any
    read: Callable[[], Mapping[int, Sketch]]
    may_change: bool = False
    option: str = OPTION


class CommonSamples:
    """Of the datasets that are trained on, by the names of their loaders. Make it when the loop begins."""

    everstep_optional = True  # commits of runs without a session lack it
    everstep_settles = True  # the last bits of floating-point values may differ between ranks

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources: Mapping[str, Source] = {}
        self._began: dict[str, dict[str, str]] = {}
        self._read: dict[str, dict[int, Sketch]] | None = None  # of this process
        self._facts: dict[str, dict[str, str]] = {}  # what `_read` was read under
        self._moving: dict[str, set[str]] = {}  # the facts that reading itself changes (a counter)
        self._saved: dict[str, dict[int, Sketch]] = {}
        self._compared = False
        self.trains_on(sources)

    def trains_on(self, sources: Mapping[str, Source]) -> None:
        """The loaders are made: when the loop begins, or by a framework later, or anew."""
        self._sources = sources
        for name, source in sources.items():
            self._began.setdefault(name, facts_of(source.dataset))

    def moved(self) -> None:
        """The world has changed: all its members compare anew."""
        self._compared = False

    def completed(self, gather: Gather) -> None:
        """All ranks call this after each step. They compare samples after the first step of a world, and after the
        first one that follows a restore. Raises `LoopError` on all ranks if their samples differ. Collective."""
        if self._compared:
            return
        knew = self._read is not None
        if not knew:
            self._look()
        difference = self._difference(gather)
        if difference is not None and any(again for (again,) in gather((int(knew),))):
            # A dataset that the loop changes reads otherwise now than when the older members read it.
            self._look()
            difference = self._difference(gather)
        if difference is not None:
            raise LoopError(difference)
        self._compared, self._saved = True, {}

    def _look(self) -> None:
        self._read = {}
        self._facts.clear()
        for name, source in self._sources.items():
            self._facts[name] = facts_of(source.dataset)
            self._read[name] = dict(source.read())
            now = facts_of(source.dataset)
            self._moving[name] = {
                path for path in now | self._facts[name] if self._facts[name].get(path) != now.get(path)
            }

    def _is_as(self, name: str, facts: Mapping[str, str]) -> bool:
        """Whether the loop has changed nothing in the dataset since it had these facts."""
        now, moving = facts_of(self._sources[name].dataset), self._moving.get(name, set())
        return all(path in moving or facts.get(path) == now.get(path) for path in facts.keys() | now.keys())

    def _difference(self, gather: Gather) -> str | None:
        assert self._read is not None
        mine = {
            name: [len(s.dataset), self._read.get(name, {}), self._changed(name)] for name, s in self._sources.items()
        }
        by_rank = [json.loads(read) for read in gather_texts(json.dumps(mine), gather)]
        for name, source in self._sources.items():
            words = f"{source.words}{f' of loader {name}' if name else ''}"
            difference = self._compare(words, source, [read[name] for read in by_rank if name in read])
            if difference is not None:
                return difference
        return None

    def _compare(self, words: str, source: Source, by_rank: list[Any]) -> str | None:
        """`told`: by rank, the length, the sketches, and the indices that read otherwise than when they were saved."""
        length = by_rank[0][0]
        first: dict[str, tuple[int, Sketch]] = {}  # by index, the lowest rank that could read it, and what it read
        for rank, (its_length, read, _) in enumerate(by_rank):
            its = {index: stored(sketch) for index, sketch in read.items()}
            if its_length != length:
                return (
                    f"rank 0 has {length} samples in {words}, and rank {rank} has {its_length}, so the ranks train on "
                    f"different data. {_REMEDY}"
                )
            others = {index: first[index][0] for index in its if index in first and differ(first[index][1], its[index])}
            if others:
                lowest = min(others.values())
                indices = ", ".join(index for index, other in others.items() if other == lowest)
                return (
                    f"rank {rank} reads another sample than rank {lowest} under index {indices} of {words}, so the "
                    "ranks train on different data: some samples twice, others never, or held-out ones. "
                    f"{_REMEDY}. If samples differ between ranks by intent: {source.option}"
                )
            for index, sketch in its.items():
                first.setdefault(index, (rank, sketch))
        changed = sorted({index for _, _, changed in by_rank for index in changed}, key=int)
        if changed:
            return (
                f"index {', '.join(changed)} of {words} reads otherwise than when the run was saved, so the rest of "
                f"the epoch would be of other samples. {_REMEDY}. If the data, or how it is prepared, was changed by "
                f"intent: {_allowing(source.option)}"
            )

        return None

    def _changed(self, name: str) -> list[str]:
        saved, read = self._saved.get(name, {}), (self._read or {}).get(name, {})
        if self._sources[name].may_change or not self._is_as(name, self._began[name]):
            return []
        return [str(index) for index, sketch in saved.items() if index in read and differ(sketch, read[index])]

    def state_dict(self) -> dict[str, str]:
        known = self._saved
        if self._read is not None:
            known = {n: r for n, r in self._read.items() if n in self._sources and self._is_as(n, self._facts[n])}
        return {"read": json.dumps(known)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        saved = json.loads(state["read"])
        self._saved = {name: {int(i): stored(s) for i, s in read.items()} for name, read in saved.items()}
        self._compared = False


def _allowing(option: str) -> str:
    if option != OPTION:
        return f"{option}, in one run"
    return "run.loader(dataset, …, allow_changes={'dataset'}), or compare_samples=False"
