"""Reads a few samples, the same ones in every process, so that processes can tell that they have the same data.

A split that each process shuffles for itself, or files in the order of `glob`, has the right length and the wrong
samples. A sample is read as a loader reads it, under a seed of its own, and twice: one that is not the same again is
not compared. Invariants: reading leaves the generators of this process alone; a dataset that is read by workers is read
by one here too, because a file that it opens in this process would be shared with workers that are forked later.

What is compared of a sample is a sketch of it (`everstep.data.sketches`).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from everstep.data.fetching import Fetching, Request
from everstep.data.shards import ShardedDataset
from everstep.data.sketches import Sketch, differ, sketch
from everstep.data.stream import Stream
from everstep.data.workers import WorkerStart, sigterm_held
from everstep.torch_private.loaders import stop_workers

log = logging.getLogger("everstep.data")

SECONDS: Final = 5.0  # for all samples; what is not read by then is not compared
PARTS: Final = 8  # of a dataset of several, from which one sample each is read
_FACTS_DEPTH, _FACTS, _FACTS_EACH = 4, 500, 64


def sampled_indices(dataset: Any, length: int) -> list[int]:
    """The indices to read: the first, the last, two that depend on the length, and one of each part."""
    indices = {0, length - 1}
    for k in range(2):
        drawn = hashlib.blake2b(f"{length}:{k}".encode(), digest_size=8).digest()
        indices.add(int.from_bytes(drawn, "little") % length)
    begin = 0
    for part in _parts(dataset):
        if begin + len(part) // 2 < length:
            indices.add(begin + len(part) // 2)
        begin += len(part)
    return sorted(indices)


def is_comparable(dataset: Any) -> bool:
    """Whether samples may be read by index at little cost. Streams compare what they read by themselves; to read from a
    shard may mean to fetch it whole, and the shards' names are compared."""
    if not _is_indexed(dataset):
        return False
    seen, inside = {id(dataset)}, [dataset]
    for outer in inside:
        if _reads_forward(outer):
            return False
        for part in (getattr(outer, "dataset", None), *_parts(outer)):
            if id(part) not in seen and len(inside) < _FACTS:
                seen.add(id(part))
                inside.append(part)
    return True


def _reads_forward(value: Any) -> bool:
    return isinstance(value, Stream | ShardedDataset) or any(
        c.__name__ == "IterableDataset" for c in type(value).__mro__
    )


def _is_indexed(value: Any) -> bool:
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


def _parts(dataset: Any) -> list[Any]:
    """The first parts of a dataset of several, as torch's `ConcatDataset` and `StackDataset` have them. A script's own
    dataset may have something else under that name."""
    parts = getattr(dataset, "datasets", None)
    if not isinstance(parts, list | tuple) or not all(_is_indexed(part) or _reads_forward(part) for part in parts):
        return []
    return list(parts[:PARTS])


def facts_of(dataset: Any) -> dict[str, str]:
    """The numbers, texts and flags among the attributes of a dataset and what it holds, by path. What changes them in
    the loop (a curriculum) may change the samples."""
    facts: dict[str, str] = {}
    seen: set[int] = set()
    level = [("", dataset)]
    for _ in range(_FACTS_DEPTH):
        below: list[tuple[str, Any]] = []
        for path, node in level:
            for name, value in _attributes(node):
                if value is None or isinstance(value, bool | int | float | str):
                    facts[f"{path}.{name}"] = _short(value)
                elif id(value) not in seen and len(seen) < _FACTS:
                    seen.add(id(value))
                    below.append((f"{path}.{name}", value))
        level = below
    return facts


def _short(value: object) -> str:
    if isinstance(value, str):
        return f"{len(value)} {value[:200]!r}"
    return hex(value) if isinstance(value, int) and value.bit_length() > 64 else repr(value)


def _attributes(owner: Any) -> list[tuple[Any, Any]]:
    if isinstance(owner, dict):
        return list(owner.items()) if len(owner) <= _FACTS_EACH else []
    if isinstance(owner, list | tuple):
        return list(enumerate(owner)) if len(owner) <= _FACTS_EACH else []
    if isinstance(owner, type | torch.Tensor | np.ndarray):
        return []
    return list(getattr(owner, "__dict__", {}).items())


def read_samples(
    dataset: Any, *, num_workers: int = 0, multiprocessing_context: Any = None, worker_init_fn: Any = None
) -> dict[int, Sketch]:
    """Sketches of the samples that could be read, and that were the same twice. Takes about `SECONDS` at most, but for
    the first sample where there are no workers."""
    probe = _Probe(dataset, sampled_indices(dataset, len(dataset)))
    if num_workers == 0:
        return dict(_taken(probe[k] for k in range(len(probe))))
    start = worker_init_fn if isinstance(worker_init_fn, WorkerStart) else WorkerStart(worker_init_fn)
    start.about_to_start()
    generator = torch.Generator()
    generator.manual_seed(0)  # else the worker's seed would be drawn from the global generator
    loader: DataLoader[Any] = DataLoader(
        probe, batch_size=None, num_workers=1, multiprocessing_context=multiprocessing_context, timeout=SECONDS,
        worker_init_fn=start, generator=generator,
    )  # fmt: skip
    with sigterm_held(multiprocessing_context):
        read = iter(loader)
    try:
        return dict(_taken(read))
    except RuntimeError as e:  # torch's error for a worker that is late, or has died
        log.warning("the ranks' samples are not compared with each other: %s", e)
        return {}
    finally:
        stop_workers(read)


def _taken(read: Iterable[Any]) -> Iterator[tuple[int, Sketch]]:
    began = time.monotonic()
    for index, sample, why in read:
        if sample is not None:
            yield index, sample
        if why:
            log.log(logging.DEBUG if sample is not None else logging.WARNING, "sample %d is %s", index, why)
        if time.monotonic() - began > SECONDS:
            log.warning("to read samples takes long: only some are compared with those of the other ranks")
            return


class _Probe(Dataset[Any]):
    """The sketches, as a dataset that a worker can read. An item: the index, its sketch, and what was left out."""

    def __init__(self, dataset: Any, indices: list[int]) -> None:
        self._read, self._indices = Fetching(dataset, True), indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, k: int) -> tuple[int, Sketch | None, str]:
        if k >= len(self._indices):
            raise IndexError(k)
        index, began = self._indices[k], time.monotonic()
        try:
            sketches = []
            for _ in range(2):
                (sample,) = self._read.__getitems__(Request(0, 0, [index]))
                sketches.append(sketch(sample))
                if time.monotonic() - began > SECONDS / 2:
                    break
        except Exception as e:  # what is wrong shows when training reads it
            return index, None, f"not compared with that of the other ranks: reading it raised {e!r}"
        if len(sketches) == 1:
            return index, None, "not compared with that of the other ranks: reading it takes long"
        (first, left_out), (other, _) = sketches
        if differ(first, other):
            why = "not the same when it is read twice under one seed, so it is not compared with that of other ranks"
            return index, None, why
        return index, first, f"compared without its {', '.join(sorted(left_out))}" if left_out else ""
