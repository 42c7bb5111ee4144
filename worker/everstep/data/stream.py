"""`Stream`: what can only be read from front to back, as a dataset whose samples have numbers.

Every reader reads all of it and keeps its own samples, so that none depends on what another has read. Where the source
can say its position, that is noted at marks: multiples of `every` samples, the same for all readers. A mark carries a
digest of the samples behind it. Invariant: a sample has one number in an epoch; a position that does not give the
samples again that were read behind it is not used, and the source is read from the front instead.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from everstep.data.errors import DataError, DatasetUnusable, PositionMismatch
from everstep.data.plan.assignment import whole
from everstep.data.plan.cursor import Cursor
from everstep.data.randomness.seeding import generator_states, put_back, sample_seed, seed_generators
from everstep.data.sketches import digest_of
from everstep.torch_private.loaders import as_only_reader

log = logging.getLogger("everstep.data")

PROBED: Final = 16  # samples behind a mark that have to be the same again
_KEPT: Final = 8  # marks, for steps that come again
_END: Final = object()
_STREAM: Final = 2**64 - 2  # no sample has this index


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the source is before sample `index` of `epoch`: its `state` as JSON, "" for the front. `digest`: of the
    samples behind it; "" where none was taken."""

    epoch: int
    index: int
    state: str
    digest: str


class Marks:
    """A rank's newest marks by the steps that came with them. What is said for a position is the same on all ranks that
    took the same steps, whichever of them has another step in hand."""

    def __init__(self) -> None:
        self._by_step: deque[tuple[int, int, Mark | None]] = deque(maxlen=_KEPT)

    def add(self, epoch: int, first: int, mark: Mark | None) -> None:
        """A step is handed out; `first`: its first sample."""
        if not self._by_step or self._by_step[-1][:2] != (epoch, first):
            self._by_step.append((epoch, first, mark))

    def at(self, epoch: int, index: int) -> Mark | None:
        """That of the step before this position."""
        before = [mark for e, first, mark in self._by_step if (e, first) < (epoch, index)]
        return before[-1] if before and before[-1] is not None and before[-1].epoch == epoch else None

    def restart(self, epoch: int, index: int, mark: Mark | None) -> None:
        """The stream is read anew from this mark, for that position."""
        self._by_step.clear()
        self._by_step.append((epoch, index - 1, mark))

    @property
    def newest(self) -> Mark | None:
        return self._by_step[-1][2] if self._by_step else None


def mark_of(saved: Any, cursor: Cursor) -> Mark | None:
    """The mark of a stream in a saved position; None if it is of no use. Raises PositionMismatch."""
    if saved is None:
        return None
    names = {"epoch": int, "index": int, "state": str, "digest": str}
    if not isinstance(saved, Mapping) or not all(isinstance(saved.get(n), kind) for n, kind in names.items()):
        raise PositionMismatch(f"the data position holds stream={saved!r}: epoch, index, state and digest are expected")
    mark = Mark(**{name: saved[name] for name in names})
    return mark if mark.epoch == cursor.epoch and mark.index + PROBED <= cursor.index else None


class Stream:
    """An iterable as a dataset of `length` samples: for `run.loader(…, shuffle=False)` and `ElasticLoader`.

    `source`: gives the same samples in the same order each time it is iterated, on every rank (after
    `set_epoch(epoch)`, if it has that): `load_dataset(…, streaming=True)`, torchdata's `StatefulDataLoader` of single
    samples (`batch_size=None`), an `IterableDataset` of your own. Every rank, and each of its workers, reads all of it:
    do what is expensive in `transform`, which is called only for the samples of a rank, under the sample's own seed.

    `length`: the samples of an epoch, all that the source has; where it is not known or has no end, cut the source
    (`dataset.take(1_000_000)`). `every`: if the source has `state_dict` and `load_state_dict`, its position is noted
    after so many samples, and a new process goes on from there; otherwise it reads from the front again.

    Raises DataError, and DatasetUnusable while reading for a source that does not have `length` samples.
    """

    def __init__(
        self, source: Any, length: int, *, transform: Callable[[Any], Any] | None = None, every: int = 1000
    ) -> None:
        if not hasattr(source, "__iter__"):
            raise DataError(f"Stream({type(source).__name__}): something that can be iterated is expected")
        if isinstance(source, Iterator):
            raise DataError(
                f"Stream({type(source).__name__}): an iterator can be read once, and a stream is read again in each"
                " epoch and after a loss: pass an object whose __iter__ begins from the front"
            )
        if whole("Stream(length)", length) < 1 or whole("Stream(every)", every) < PROBED:
            raise DataError(f"Stream(length={length}, every={every}): at least 1 and {PROBED} are expected")
        self._source, self._length, self._transform, self._every = source, length, transform, every
        self._described = f"Stream({type(source).__name__}, length={length})"
        self._says = all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))
        self._epoch = 0
        self._marks: list[Mark] = []
        self._rest: Iterator[Any] | None = None
        self._reading: Any = None
        self._first = -1
        self._filler: tuple[int, Any] | None = None  # a step's first sample: what a rank gets that has none of its own
        self._next = 0  # the number of the sample that `_rest` gives next
        self._probe: tuple[Mark, Any] | None = None  # a mark whose digest is not complete
        self._expected: Mark | None = None
        self._saved: Mark | None = None  # what was true when the run was saved
        self._generators: Any = None  # the states of the global ones, as the source left them

    def __len__(self) -> int:
        return self._length

    @property
    def every(self) -> int:
        """Samples from one mark to the next."""
        return self._every

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """The function that is called on each of a rank's own samples."""
        return self._transform

    def fingerprint(self) -> str:
        """The class of the source; what it gives is compared at the marks."""
        return f"stream:{type(self._source).__qualname__}"

    def move(self, epoch: int, first: int = -1) -> None:
        """The next samples are of this epoch, and of the step that begins with sample `first`."""
        self._first = first
        if epoch != self._epoch:
            self._epoch, self._marks, self._filler = epoch, [], None
            self._stop()

    def restore(self, mark: Mark | None) -> None:
        """Begin to read anew: from a mark that another process made, or from the front."""
        self._stop()
        self._marks, self._saved, self._filler = [], mark, None
        if mark is not None:
            self._epoch, self._marks = mark.epoch, [mark]

    def mark(self, index: int) -> Mark | None:
        """The last mark whose samples were all read before sample `index`."""
        passed = [m for m in self._marks if m.index + PROBED <= index and m.digest]
        return passed[-1] if passed else None

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of a stream of {self._length}")
        if self._filler is not None and self._filler[0] == index:
            sample = copy.deepcopy(self._filler[1])
        else:
            with self._alone():
                sample = self._read(index)
        return sample if self._transform is None else self._transform(sample)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rest": None, "_reading": None, "_probe": None, "_expected": None, "_next": 0}

    def _read(self, index: int) -> Any:
        if self._rest is None or index < self._next:
            # Samples that are given out must come after those that prove a mark.
            before = [m for m in self._marks if m.index + PROBED <= index and m.state]
            self._begin(before[-1] if before else None)
        while True:
            at, sample = self._next, self._advance()
            if self._checked(at, sample):
                if at == self._first:
                    self._filler = at, copy.deepcopy(sample)
                if at == index:
                    return sample
            else:  # the state of a mark was of no use: from the front
                self._begin(None)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While the source is read it sees neither that this is one of several workers, of which it would give each a
        part, nor the generators that are set for a rank's samples: it draws from states of its own."""
        before = generator_states()
        if self._generators is not None:
            put_back(self._generators)
        try:
            with as_only_reader():
                yield
        finally:
            self._generators = generator_states()
            put_back(before)

    def _begin(self, mark: Mark | None) -> None:
        self._stop()
        self._reading = copy.deepcopy(self._source) if self._says else self._source
        if callable(move := getattr(self._reading, "set_epoch", None)):
            move(self._epoch)
        if mark is not None and mark.state:
            self._reading.load_state_dict(json.loads(mark.state))
        else:
            seed_generators(sample_seed(0, self._epoch, _STREAM))
        self._marks = [m for m in self._marks if mark is not None and m.index <= mark.index]
        self._rest = iter(self._reading)
        self._next = mark.index if mark is not None else 0
        self._expected = mark

    def _stop(self) -> None:
        self._rest = self._reading = self._probe = self._expected = None
        self._next = 0

    def _advance(self) -> Any:
        assert self._rest is not None
        at = self._next
        if at % self._every == 0 and self._expected is None:
            self._probe = Mark(self._epoch, at, self._state(), ""), hashlib.blake2b(digest_size=8)
        elif self._expected is not None and at == self._expected.index:
            self._probe = self._expected, hashlib.blake2b(digest_size=8)
        try:
            sample = next(self._rest, _END)
        except Exception as e:
            e.add_note(f"raised by the source of {self._described}, for its sample {at} of epoch {self._epoch}")
            raise
        if sample is _END:
            self._stop()
            raise self._wrong(f"ended after {at}")
        self._next = at + 1
        if self._next == self._length and next(self._rest, _END) is not _END:
            self._stop()
            raise self._wrong("has more")
        return sample

    def _wrong(self, what: str) -> DatasetUnusable:
        return DatasetUnusable(
            f"{self._described}: the source {what} in epoch {self._epoch}:"
            " declare its true length, the same in each epoch, or cut it to that (dataset.take(length)). If other ranks"
            " found another length, the source gives each rank a part of its own: let it give all of them everything"
        )

    def _state(self) -> str:
        """The source's state as JSON, if JSON can hold it; otherwise ""."""
        if not self._says or self._next == 0:
            return ""
        state = self._reading.state_dict()
        try:
            text = json.dumps(state, sort_keys=True)
            if json.loads(text) == state:
                return text
        except (TypeError, ValueError):
            pass
        self._says = False
        log.warning(
            "%s.state_dict() holds what JSON cannot, so a new process reads the stream from the front",
            type(self._source).__name__,
        )
        return ""

    def _check_saved(self, mark: Mark, digest: str) -> None:
        saved = self._saved
        if saved and (saved.epoch, saved.index) == (mark.epoch, mark.index) and saved.digest != digest:
            self._stop()
            raise DatasetUnusable(
                f"Stream({type(self._source).__name__}): samples {mark.index} to {mark.index + PROBED} of epoch"
                f" {mark.epoch} are not those that were trained on when the run was saved: let the source give the same"
                " in the same order each time, by set_epoch(epoch) and a seed alone"
            )

    def _checked(self, at: int, sample: Any) -> bool:
        """Count a sample into the digest of the present mark. False if a mark that was restored does not hold."""
        if self._probe is None:
            return True
        mark, digest = self._probe
        digest.update(digest_of(sample))
        if at + 1 < mark.index + PROBED and at + 1 < self._length:
            return True
        value, self._probe = digest.hexdigest(), None
        if self._expected is None:
            self._check_saved(mark, value)
            self._marks = [*self._marks[-_KEPT + 1 :], Mark(mark.epoch, mark.index, mark.state, value)]
            return True
        self._expected = None
        if value == mark.digest:
            return True
        log.warning(
            "%s.load_state_dict() does not lead back to the samples that were read there (a shuffle buffer is not part"
            " of a position): the stream is read from the front",
            type(self._source).__name__,
        )
        return False
