"""The one position of a training run in its data: how many samples of which epoch are in the parameters.

Pure. Invariant: nothing here depends on the world size, so a position saved at one size is exact at any other. What a
position means depends on the order, the dataset and the global batch; they are saved with it, and `resume` refuses a
position that was saved under others, naming both sides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from everstep.data.errors import DataError, DatasetChanged, PositionMismatch
from everstep.data.fingerprints import Fingerprint, difference
from everstep.data.plan.order import MAX_SEED
from everstep.data.plan.permutation import MAX_N

VERSION: Final = 1
MAX_EPOCH: Final = 2**63 - 1
CHANGES: Final = frozenset({"dataset", "order", "global_batch"})


@dataclass(frozen=True, slots=True)
class Cursor:
    """`index` samples of `epoch` are consumed, over all ranks together.

    `order` is the label of the order, `global_batch` the samples of a step over all ranks (0 where the user's own loop
    decides it).
    """

    seed: int
    epoch: int
    index: int
    global_batch: int
    order: str
    dataset: Fingerprint

    def moved(self, epoch: int, index: int) -> Cursor:
        """The same run at another position."""
        if not 0 <= epoch <= MAX_EPOCH or not 0 <= index <= self.dataset.length:
            raise DataError(f"epoch {epoch}, index {index}: no position in a dataset of {self.dataset.length} samples")
        return Cursor(self.seed, epoch, index, self.global_batch, self.order, self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """JSON values only."""
        return {
            "version": VERSION,
            "seed": self.seed,
            "epoch": self.epoch,
            "index": self.index,
            "global_batch": self.global_batch,
            "order": self.order,
            "dataset": {
                "length": self.dataset.length,
                "kind": self.dataset.kind,
                "identity": self.dataset.identity,
            },
        }


def parse(state: Mapping[str, Any]) -> Cursor:
    """The cursor that `state_dict` wrote. Unknown fields are ignored. Raises PositionMismatch naming the field."""
    version = _number(state, "version", 0, 2**31)
    if version != VERSION:
        raise PositionMismatch(
            f"the data position has version {version}, this everstep reads version {VERSION}: use a newer everstep"
        )
    dataset = state.get("dataset")
    if not isinstance(dataset, Mapping):
        raise PositionMismatch(f"the data position holds dataset={dataset!r}: a mapping is expected")
    length = _number(dataset, "length", 1, MAX_N)
    return Cursor(
        seed=_number(state, "seed", 0, MAX_SEED - 1),
        epoch=_number(state, "epoch", 0, MAX_EPOCH),
        index=_number(state, "index", 0, length),
        global_batch=_number(state, "global_batch", 0, MAX_N),
        order=_text(state, "order"),
        dataset=Fingerprint(length, _text(dataset, "kind"), _text(dataset, "identity")),
    )


def check_changes(allowed: Collection[str]) -> frozenset[str]:
    """The names in an `allow_changes` argument. Raises DataError for one that does not exist."""
    names = {allowed} if isinstance(allowed, str) else set(allowed)
    if unknown := sorted(names - CHANGES):
        raise DataError(f"allow_changes={unknown}: only {sorted(CHANGES)} can be allowed")
    return frozenset(names)


def resume(saved: Cursor, own: Cursor, allowed: Collection[str] = ()) -> Cursor:
    """Where a run set up as `own` goes on after `saved`. The saved seed stays: the epoch's order hangs on it.

    A changed dataset or order makes the rest of the epoch another one: if allowed, the run goes on with the next
    epoch (or this one, if none of it is consumed). Another global batch, if allowed, goes on at the same sample.
    Raises DatasetChanged or PositionMismatch for what changed and is not allowed.
    """
    changed = difference(saved.dataset, own.dataset)
    if changed and "dataset" not in allowed:
        raise DatasetChanged(
            f"the position was saved with another dataset: {changed} (saved: {saved.dataset}; now: {own.dataset})."
            " Pass the dataset that the run began with, whole and alike on all ranks: the loader divides it, so it must"
            " not be cut by a rank before. Or give up the rest of this epoch with allow_changes={'dataset'}"
        )
    rebatched = saved.global_batch and own.global_batch and saved.global_batch != own.global_batch
    if rebatched and "global_batch" not in allowed:
        raise PositionMismatch(
            f"the position was saved with global_batch={saved.global_batch}, this run has {own.global_batch}: a"
            f" changed batch changes the training. Pass global_batch={saved.global_batch}, or"
            " allow_changes={'global_batch'}"
        )
    reordered = saved.order != own.order
    if reordered and saved.index and "order" not in allowed:
        raise PositionMismatch(
            f"the position is sample {saved.index} of an epoch in order {saved.order!r}, this run has {own.order!r}:"
            " samples would repeat. Pass the shuffle= that the run began with, or give up the rest of this epoch with"
            " allow_changes={'order'}"
        )
    if saved.index and (changed or reordered):
        return replace(own, seed=saved.seed, epoch=saved.epoch + 1, index=0)
    return replace(own, seed=saved.seed, epoch=saved.epoch, index=saved.index)


def _number(fields: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise PositionMismatch(f"the data position holds {name}={value!r}: a number from {least} to {most} is expected")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise PositionMismatch(f"the data position holds {name}={value!r}: a text is expected")
    return value
