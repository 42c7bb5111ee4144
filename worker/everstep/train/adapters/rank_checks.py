"""The session's comparisons of ranks, for a loop that belongs to a framework.

Under `everstep-run` the session's own world makes them. Under torchrun there is none, so `RankChecks` does: after steps
that all ranks have completed it compares the samples that they read, their parameters, the buffers that DDP does not
send, and tracked values; and it looks at what each optimizer moves. A framework makes its loaders late, so they are
named when they are there. Invariant: ranks compare at the same steps, and raise together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from everstep.data import ElasticLoader
from everstep.data.common import is_comparable, read_samples
from everstep.recovery.ddp.reducers import Reducers
from everstep.train.coordination.step_coordinator import StepCoordinator
from everstep.train.feeding.feed import Feed
from everstep.train.guards.common_samples import CommonSamples, Source
from everstep.train.guards.gradient_reduction import GradientReduction
from everstep.train.guards.replicas import Replicas


class RankChecks:
    """`samples` belongs into the run's state, under `SAMPLES`. `call`: how a script calls the adapter, for an error.
    `compares`: whether samples are compared."""

    def __init__(self, coordinator: StepCoordinator, call: str, *, compares: bool = True) -> None:
        self._coordinator = coordinator
        self._option = f"{call}(…, compare_samples=False)"
        self._compares = compares
        self._size = 1
        self._replicas: Replicas | None = None
        self._feed: Feed | None = None
        self.samples = CommonSamples({})
        self.in_step = True  # an optimizer of a framework steps in no other place

    def reads(self, loaders: Iterable[Any], *, changes: bool = False) -> None:
        """The framework has made its loaders. `changes`: it makes others later, perhaps of other data."""
        sources: dict[str, Source] = {}
        for number, loader in enumerate(loaders):
            source = self._source(loader, changes)
            if source is not None:
                sources[str(number or "")] = source
        self.samples.trains_on(sources)

    def begin(self, state: Mapping[str, Any], loader: ElasticLoader | None = None) -> None:
        """All objects are made and restored, in a world that does not change. `loader`: of ours, if one is trained on.
        Collective. Raises `LoopError`."""
        self._size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if self._size == 1:
            return
        made = {key: _inner(target) for key, target in state.items()}
        made = {key: target for key, target in made.items() if target is not None}
        reducers = Reducers(made)
        self._replicas = replicas = Replicas(made, reducers.alive(), kept=self._coordinator.saves, frees=False)
        same, gather = self._coordinator.same, self._coordinator.gather
        self._coordinator.compare_by(lambda: replicas.before_save(self._size, same, gather))
        GradientReduction(made, reducers, self, lasts=True)
        if loader is not None:
            coordinator, self._feed = self._coordinator, Feed({"": loader}, lambda batches: batches[0])
            self._feed.agree(None if coordinator.restored else coordinator.first, coordinator.same)

    def completed(self, *, last: bool = False) -> None:
        """A step is complete on all ranks. Collective. Raises `LoopError` on all ranks."""
        coordinator = self._coordinator
        self.samples.completed(coordinator.gather)
        if self._replicas is not None:
            self._replicas.completed(self._size, coordinator.same, coordinator.gather, last=last)
        if self._feed is not None:
            self._feed.completed(self._size, coordinator.same, coordinator.gather)

    def _source(self, loader: Any, changes: bool) -> Source | None:
        """None for what ranks divide in a way of their own, and for what is not read by index."""
        if not self._compares:
            return None
        if isinstance(loader, ElasticLoader):
            kind = loader.cursor.dataset.kind
            return Source(kind, loader.dataset, loader.sketches, loader.may_change or changes, self._option)
        if not isinstance(loader, DataLoader) or not is_comparable(dataset := loader.dataset):
            return None

        def read() -> Any:
            names = ("num_workers", "multiprocessing_context", "worker_init_fn")
            return read_samples(dataset, **{name: getattr(loader, name) for name in names})

        return Source(type(dataset).__qualname__, dataset, read, changes, self._option)


def _inner(target: Any) -> Any:
    """What a placeholder or Accelerate's wrapper of an optimizer stands for; None if that is not made."""
    target = getattr(target, "everstep_target", target)
    wrapped = getattr(target, "optimizer", None) if isinstance(target, Optimizer) else None
    return wrapped if isinstance(wrapped, Optimizer) else target


def divides(loader: Any) -> bool:
    """Whether ranks divide one order of indices among them: then an index means the same sample on all of them."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    world = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return not world or any(isinstance(sampler, DistributedSampler) for sampler in samplers)
