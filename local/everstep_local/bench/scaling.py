"""How well a job scales, from how fast it steps with each number of workers. Pure.

*Strong*: the global batch is the same at every size, as `run.loader(global_batch=…)` keeps it. Twice the workers would
ideally take twice as many steps a second. *Weak*: each worker has a batch of its own size, so twice the workers would
ideally take as many steps a second as before, of twice the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Scaling(StrEnum):
    STRONG = "strong"
    WEAK = "weak"


@dataclass(frozen=True, slots=True)
class Measured:
    """`steps_per_second`: of the job. `communication`, `exposed`: shares of a step, the mean of the ranks; None if
    they are not known."""

    workers: int
    steps_per_second: float
    steps: int
    seconds: float
    communication: float | None = None
    exposed: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """`speedup`: samples a second, as a multiple of the smallest size's. `ideal`: what it would be without losses."""

    measured: Measured
    speedup: float
    ideal: float

    @property
    def efficiency(self) -> float:
        return self.speedup / self.ideal


def rows(measurements: Sequence[Measured], scaling: Scaling) -> list[Row]:
    """By size; the smallest one is the measure of all."""
    ordered = sorted(measurements, key=lambda measured: measured.workers)
    first = ordered[0]
    made = []
    for measured in ordered:
        ideal = measured.workers / first.workers
        rate = measured.steps_per_second / first.steps_per_second
        made.append(Row(measured, rate if scaling is Scaling.STRONG else rate * ideal, ideal))
    return made
