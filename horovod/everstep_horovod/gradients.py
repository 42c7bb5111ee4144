"""Averages gradients while the backward pass runs, and gives them back before the optimizer steps.

Gradients travel in buckets. The buckets and their order are fixed when the object is made, so they are the same on all
ranks whatever order gradients come in, and in a process that comes later: a run that lost processes computes the same
sums. Invariant: after `synchronize` each gradient is the reduced one, or an error was raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.recovery.errors import LoopError
from everstep_horovod.collectives import Op, begin_allreduce
from everstep_horovod.handles import Handle
from everstep_horovod.world import current

BUCKET_BYTES = 25 * 1024 * 1024  # as of DistributedDataParallel: large enough for the network, small enough to overlap


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are combined: see `DistributedOptimizer`."""

    op: Op
    compression: Any
    passes: int
    predivide: float
    sparse_as_dense: bool


@dataclass(slots=True)
class _InFlight:
    """A bucket that is being reduced. `context`: what its compression needs to decompress it."""

    parameters: Sequence[torch.Tensor]
    handle: Handle
    context: Any


class Gradients:
    """The gradients of an optimizer's parameters, by their names."""

    def __init__(self, names: Mapping[torch.Tensor, str], how: Reduction) -> None:
        self._names, self.how = names, how
        self.passes = how.passes
        trained = [p for p in names if p.requires_grad]
        # Those of the last layers are ready first.
        self._buckets = list(_buckets(reversed(trained)))
        self._left = dict.fromkeys(trained, self.passes)  # backward passes until the gradient may travel
        self._in_flight: list[_InFlight] = []
        parameter: Any  # torch has not typed its method
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    @property
    def travel(self) -> bool:
        """Whether gradients are under way."""
        return bool(self._in_flight)

    @property
    def begun(self) -> bool:
        """Whether a backward pass has left gradients that no step has used."""
        return any(left != self.passes for left in self._left.values())

    def forget(self) -> None:
        """The state was restored: the gradients are of another step."""
        self._in_flight = []
        self._left = dict.fromkeys(self._left, self.passes)

    def synchronize(self, of_optimizer: Iterable[torch.Tensor]) -> None:
        """Reduce what is left, and wait for all. A parameter without a gradient here gets the others', or zeros."""
        for parameter in of_optimizer:
            if parameter.grad is not None and parameter not in self._left:
                raise LoopError(
                    f"{self._names.get(parameter, 'a parameter that was added later')} has a gradient that is not "
                    "averaged: it did not require one when hvd.DistributedOptimizer was made. Make the optimizer when "
                    "all parameters that are ever trained require gradients"
                )
        self._launch(all_of_them=True)
        for bucket in self._in_flight:
            whole = self.how.compression.decompress(bucket.handle.result(), bucket.context)
            pieces = whole.split([p.numel() for p in bucket.parameters])
            for parameter, piece in zip(bucket.parameters, pieces, strict=True):
                _give(parameter, piece.view_as(parameter))
        self.forget()

    def _arrived(self, parameter: torch.Tensor) -> None:
        if self._left[parameter] <= 0:
            raise LoopError(
                f"a second backward pass has given {self._names[parameter]} a gradient before optimizer.step(): pass "
                "backward_passes_per_step= to hvd.DistributedOptimizer, as many as there are"
            )
        self._left[parameter] -= 1
        self._launch(all_of_them=False)

    def _launch(self, *, all_of_them: bool) -> None:
        """Let buckets travel in their order: those that are ready, or all."""
        if current().size == 1:
            return
        how = self.how
        while len(self._in_flight) < len(self._buckets):
            bucket = self._buckets[len(self._in_flight)]
            if not all_of_them and any(self._left[p] for p in bucket):
                return
            flat = torch.cat([self._read(p).reshape(-1) for p in bucket])
            sent, context = how.compression.compress(flat)
            before, after = (1 / how.predivide, how.predivide) if how.op is Op.Average else (1.0, 1.0)
            handle = begin_allreduce(sent, how.op, before, after, current().gradients)
            self._in_flight.append(_InFlight(bucket, handle, context))

    def _read(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros_like(parameter)
        if gradient.is_sparse:
            if not self.how.sparse_as_dense:
                raise LoopError(
                    f"{self._names[parameter]} has a sparse gradient: pass sparse_as_dense=True to "
                    "hvd.DistributedOptimizer"
                )
            return gradient.to_dense()
        return gradient


def _give(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    elif parameter.grad.is_sparse:
        parameter.grad = gradient.to_sparse()
    else:
        parameter.grad.copy_(gradient)


def _buckets(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one type and device, until they are large."""
    bucket: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        other = bucket and (parameter.dtype, parameter.device) != (bucket[0].dtype, bucket[0].device)
        if other or size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
