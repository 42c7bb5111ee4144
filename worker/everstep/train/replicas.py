"""Refuses a loop whose ranks train apart: gradients that nobody averages raise no error, and each rank drifts away.

Parameters that `DistributedDataParallel`, `fully_shard` or FSDP look after are theirs. Of all others the ranks compare
the bytes after the 1st, 2nd, 4th, 8th, … step of a world: a learning rate that begins at zero, or a gradient scaler
that skips its first steps, hides a drift for a while only. A loop that averages its gradients itself stays equal, and
passes. Knows no process group: who asks says how ranks compare a number.

Invariant: ranks compare at the same steps, and raise together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from everstep.checkpoint.sharding import is_sharded
from everstep.train.step import LoopError

BYTES = 2**16  # of each tensor: what drifts, drifts everywhere
TENSORS = 256


class Replicas:
    """`state` is what is tracked, `parallel` the DDP objects of this process; once the script has built both."""

    def __init__(self, state: Mapping[str, Any], parallel: Iterable[DistributedDataParallel]) -> None:
        cared_for = {id(p) for ddp in parallel for p in _cared_for(ddp)}
        self._own = [(name, p) for name, p in _trainable(state) if id(p) not in cared_for][:TENSORS]
        self._steps = 0

    def moved(self) -> None:
        """The world is another one, whose members begin with equal parameters."""
        self._steps = 0

    def completed(self, world_size: int, same: Callable[[int], bool]) -> None:
        """A step is complete on all ranks. `same`: whether all ranks say this number of 63 bits; collective. Raises
        `LoopError` if they have other parameters than each other."""
        if not self._own or world_size == 1:
            return
        self._steps += 1
        if self._steps & (self._steps - 1) or same(self._digest()):
            return
        raise LoopError(
            f"after step {self._steps} of this world its {world_size} ranks hold different parameters, "
            f"{self._own[0][0]} among them: nobody averages their gradients. Wrap the module before steps(), "
            "`model = DistributedDataParallel(model)`, and call what it returns, also where the world is one process "
            "now and grows later; or average the gradients in each step"
        )

    def _digest(self) -> int:
        found = xxhash.xxh3_64()
        for _, p in self._own:
            if not is_lazy(p):
                part = p.detach().reshape(-1)[: BYTES // p.element_size()].contiguous().cpu()
                data: Any = part.view(torch.uint8).numpy()
                found.update(data)
        return found.intdigest() >> 1


def _cared_for(ddp: Any) -> Iterator[torch.nn.Parameter]:
    for name, p in ddp.module.named_parameters():
        if name not in ddp.parameters_to_ignore:
            yield p


def _trainable(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Those of the tracked modules that are whole on each rank."""
    for key, value in state.items():
        if isinstance(value, torch.nn.Module):
            for name, p in value.named_parameters():
                # FSDP's flat parameters are each rank's own part.
                if p.requires_grad and not is_sharded(p) and not getattr(p, "_is_flat_param", False):
                    yield f"{key}.{name}", p
