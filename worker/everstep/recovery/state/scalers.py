"""Finds the gradient scalers of a run, also those inside the script's own classes.

Libraries such as timm track an object whose `state_dict` is that of its scaler. Torch's scaler also keeps notes within
a step (for example that an optimizer's gradients were unscaled). They are in no `state_dict`, so the scaler has to be
found to put them back.

If a script divides a replica itself, each rank looks for infinities in its own gradients. A rank that finds some leaves
its optimizer's step out, while the others make theirs. That is found after the same step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import xxhash

from everstep.recovery.errors import LoopError
from everstep.recovery.state.optimizers import before_step
from everstep.recovery.state.randomness import Gather
from everstep.torch_private.optimizers import growth_in


def scalers(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.amp.GradScaler]]:
    """The enabled scalers among the tracked objects and their attributes, each once, by name."""
    seen: set[int] = set()
    for name, scaler in _all(state):
        if scaler.is_enabled() and id(scaler) not in seen:
            seen.add(id(scaler))
            yield name, scaler


def _all(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.amp.GradScaler]]:
    for name, target in state.items():
        if isinstance(target, torch.amp.GradScaler):
            yield name, target
        elif not isinstance(target, torch.nn.Module | torch.optim.Optimizer):
            for key, value in _attributes(target).items():
                if isinstance(value, torch.amp.GradScaler):
                    yield f"{name}.{key}", value


def _attributes(target: Any) -> Mapping[str, Any]:
    try:
        return dict(vars(target))
    except TypeError:  # a dictionary, a list, or a class with slots
        return target if isinstance(target, dict) and all(isinstance(k, str) for k in target) else {}


def hear_skips(state: Mapping[str, Any], skipped: Callable[[], None]) -> None:
    """Call `skipped` in each step of a scaler that leaves its optimizer's step out."""
    for _, scaler in scalers(state):
        scaler.step = partial(_step, scaler.step, skipped)  # type: ignore[method-assign]


def _step(original: Any, skipped: Callable[[], None], optimizer: Any, *arguments: Any, **named: Any) -> Any:
    made = list[Any]()
    hook = before_step(optimizer, lambda *_: made.append(True))
    try:
        result = original(optimizer, *arguments, **named)
    finally:
        hook.remove()
    if not made:
        skipped()
    return result


class Scales:
    """Compares the scalers of `state` on the ranks of each replica, of `model_size` ranks, after each of their steps. A
    scaler that has left a step out differs from one that has made it in its scale, or in its count of good steps."""

    def __init__(self, state: Mapping[str, Any], model_size: int) -> None:
        self._scalers = sorted(scalers(state), key=lambda named: named[0]) if model_size > 1 else []
        self._model_size = model_size
        self._compared = model_size > 1
        self._due = False

    def moved(self) -> None:
        """Tell of a new world: its members may have scalers although those of the last one had none."""
        self._compared, self._due = self._model_size > 1, False

    def ended(self) -> None:
        """Tell that a step has ended well."""
        self._due = self._compared

    def check(self, step: int, gather: Gather) -> None:
        """Compare between two steps, on all ranks. `gather`: the values of each rank; collective. Raises `LoopError` on
        all ranks if the scalers of a replica differ after so many steps."""
        due, self._due = self._due, False
        if not due:
            return
        gathered = gather(self._tell())
        if not any(count for count, *_ in gathered):
            self._compared = False  # no rank of this world has one
            return
        for first in range(0, len(gathered), self._model_size):
            replica = {rank: gathered[rank] for rank in range(first, min(first + self._model_size, len(gathered)))}
            with_scalers = {rank: row for rank, row in replica.items() if row[0]}
            alike = {row[:2] for row in with_scalers.values()}
            if len(alike) == 1 and len({row[2] for row in with_scalers.values()}) > 1:
                raise LoopError(_differ(step, {rank: row[3] for rank, row in with_scalers.items()}))

    def _tell(self) -> tuple[int, int, int, int]:
        """The number of scalers, and in 63 bits each: their names, all their counts, and the smallest scale."""
        states = [(name, scaler.state_dict()) for name, scaler in self._scalers]
        scales = [(name, float(state["scale"]), growth_in(state)) for name, state in states]
        # Positive floats have the same order as their bits.
        smallest = min((struct.unpack("<q", struct.pack("<d", scale))[0] for _, scale, _ in scales), default=0)
        return len(scales), _digest([name for name, *_ in scales]), _digest(scales), smallest


def _digest(value: object) -> int:
    return xxhash.xxh3_64_intdigest(repr(value).encode()) >> 1


def _differ(step: int, smallest: Mapping[int, int]) -> str:
    scales = {rank: struct.unpack("<d", struct.pack("<q", bits))[0] for rank, bits in smallest.items()}
    listed = ", ".join(f"rank {rank}: {scale:g}" for rank, scale in scales.items())
    return (
        f"after step {step} the gradient scalers of one replica differ (scale of {listed}): some of its ranks have "
        "found infinite gradients in their part of the model and left the optimizer's step out, and the others have "
        "made it. Make what they find the same on all ranks of a replica: in place of GradScaler(…) write `mesh = "
        "run.mesh(model=N)` and `ShardedGradScaler(run.device.type, process_group=mesh.get_group('model'))`, from "
        "torch.distributed.fsdp.sharded_grad_scaler"
    )
