"""Computes the sizes at which a job may train, and the size that its spec asks for now."""

from __future__ import annotations

from everstep.contract.document import Sizes
from everstep_operator.api.types import TrainingJobSpec


def bounds(spec: TrainingJobSpec) -> Sizes:
    """Every size that the job may have while its `elastic` stays as it is. A job of a fixed size has one."""
    elastic = spec.elastic
    if elastic is None:
        return Sizes(spec.replicas, spec.replicas)
    allowed = tuple(sorted(set(elastic.sizes)))
    if not allowed and elastic.group_size > 1:
        allowed = tuple(range(elastic.min_replicas, elastic.max_replicas + 1, elastic.group_size))
    return Sizes(allowed[0] if allowed else elastic.min_replicas, elastic.max_replicas, allowed)


def wanted(spec: TrainingJobSpec, granted: int | None = None) -> int:
    """Workers that should exist now: the largest allowed size that `replicas` reaches; 0 while suspended. `granted`:
    how many pods a queue allows, if one decides."""
    most = spec.replicas if granted is None else min(spec.replicas, granted)
    return 0 if spec.suspend else bounds(spec).largest(most)


def spares(spec: TrainingJobSpec, granted: int | None = None) -> int:
    """Workers that should exist beside the wanted ones, as far as a queue allows them; 0 while suspended."""
    if spec.suspend or spec.elastic is None:
        return 0
    return spec.elastic.spares if granted is None else max(0, min(spec.elastic.spares, granted - wanted(spec, granted)))


def present(spec: TrainingJobSpec, admissible: int) -> Sizes:
    """The sizes that a round may have now, if so many workers may be in it. None exceeds the wanted size:
    agents would wait for workers that are never created.

    The round store gives these to the agents, because running agents were started with the sizes of an older spec.
    """
    all_ = bounds(spec)
    most = all_.largest(min(spec.replicas, max(admissible, all_.minimum)))
    return Sizes(all_.minimum, most, tuple(size for size in all_.allowed if size <= most))
