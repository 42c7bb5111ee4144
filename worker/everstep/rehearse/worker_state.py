"""In the workers of a rehearsed script's loaders: names what steps change there, which no comparison reads.

A dataset, and all that its methods reach, is a copy in each worker. What changes in the copy is lost with the worker: a
new process, and each new iterator, begins with new ones. Left out is what is the same in each worker where it is there
at all: what the first batch has made (a file that was opened), and entries of a dictionary that are only added.
Generators of random numbers are left out too, because a loader of ours sets them for each sample; another's give other
samples, which are compared.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from everstep.data.stream import Stream
from everstep.rehearse.elsewhere import elsewhere, set_on_objects
from everstep.rehearse.record import IN_WORKERS
from everstep.torch_private import loaders
from everstep.train.guards.contents import DIGEST, Contents
from everstep.train.guards.plain_values import Roots, plain_values
from everstep.train.guards.script_objects import is_open, walk

_GENERATORS = ("Generator", "RandomState", "Random", "PCG64", "MT19937", "Philox", "SFC64")
MOST_ENTRIES = 64  # of a dictionary whose entries are compared


class WorkerState:
    """Of one training process, and of the workers that are forked from it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fetched = 0
        self._first: dict[str, str] = {}
        self._entries: dict[str, dict[Any, str]] = {}
        self._named = set[str]()

    def install(self) -> None:
        """Look at the dataset behind its 1st, 2nd, 4th, 8th, … fetch in each worker."""
        loaders.behind_each_fetch(self._fetches)

    def _fetches(self, dataset: Any, collate: Any) -> None:
        if get_worker_info() is None:
            return
        self._fetched += 1
        if self._fetched & (self._fetched - 1):
            return
        source = getattr(dataset, "source", dataset)
        if isinstance(source, Stream) or not is_open(type(source)):
            return  # its position is saved; or it is of ours, and only counts samples
        if hasattr(source, "state_dict") and _saves_of_workers():
            return
        with contextlib.suppress(Exception):  # the script's own classes may raise anything
            self._look(source, getattr(collate, "_collate", collate))

    def _look(self, dataset: Any, collate: Any) -> None:
        frame, own = sys._getframe(2), [(type(dataset).__name__, dataset), (type(collate).__name__, collate)]
        roots = Roots(frame, {}, own, far=elsewhere(frame, []), sets=lambda: set_on_objects(frame))
        values, entries = plain_values(roots), dict(_entries(roots))
        if not self._first:
            self._first, self._entries = values, entries
            return
        added = {
            name for name, before in self._entries.items()
            if name in entries and before.items() <= entries[name].items()
        }  # fmt: skip
        changed = {
            name for name, text in values.items()
            if name in self._first and self._first[name] != text and name not in added
            and text.partition(DIGEST)[0] not in _GENERATORS
        } - self._named  # fmt: skip
        if changed:
            self._named |= changed
            with (self._folder / IN_WORKERS.replace("*", str(os.getpid()))).open("a") as out:
                out.writelines(f"{name}\n" for name in sorted(changed))


def _saves_of_workers() -> bool:
    """Whether the loader of this worker saves what its workers' datasets have, as torchdata's does and no other."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("torchdata."):
            return True
        frame = frame.f_back
    return False


def _entries(roots: Roots) -> Iterator[tuple[str, dict[Any, str]]]:
    """Of each dictionary the digests of its first entries, by their keys."""
    contents = Contents(tensors=True)
    for holder in walk(roots.all()):
        if type(holder.value) is dict:
            first = list(holder.value.items())[:MOST_ENTRIES]
            with contextlib.suppress(Exception):
                yield holder.name, {key: contents.digest(part) for key, part in first}
