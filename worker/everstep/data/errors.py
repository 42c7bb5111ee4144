"""Errors of the data package. All are terminal: they say that a setting, a dataset or a saved position is wrong."""

from __future__ import annotations

from everstep.contract.refusal import Refusal


class DataError(Refusal):
    """Base of every error that the data package raises itself. The text names what is wrong, where, and the fix."""


class DatasetUnusable(DataError):
    """The dataset has no length, cannot be read by index, or a shard does not hold what it declares."""


class BatchUnusable(DataError):
    """The global batch, the micro-batch or the world cannot be used, alone or together."""


class DatasetChanged(DataError):
    """The position was saved with another dataset: going on would repeat or leave out samples."""


class PositionMismatch(DataError):
    """The position was saved under other settings (order, global batch), or is not one that this version can read."""


class Unacknowledged(DataError):
    """A step was handed out, and nobody has said whether its optimizer step is done: its samples may count or not."""


class LoaderUnusable(DataError):
    """A DataLoader, or its sampler, decides something that cannot be cut again for another world or found again."""
