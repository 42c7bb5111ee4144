"""Sums up in a few numbers what one step of this rank has computed: for each parameter the sums of its own gradient,
before it is averaged with those of other ranks.

Invariant: two processes that run the same block on the same samples, state and random numbers have the same sums,
except for the rounding of their kernels. So gradients count only until values of other ranks arrive: those of the
backward pass in which the averaging begins, and of earlier ones.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from everstep.recovery.ddp import uneven_inputs
from everstep.recovery.group.script_location import script_call_site
from everstep.torch_private.autograd import backward_pass

log = logging.getLogger("everstep.train")

COLUMNS = 16
# How far sums may be apart, as a part of the gradient's norm. The first is for the CPU, whose kernels give the same
# bits on the same kind of machine. The second is for an accelerator, whose sums by atomic additions do not.
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
CLOSE_ON_DEVICE = 2e-2
SMALL = 1e-3  # of the norm of all gradients: see `smallest`


class LocalGradients:
    """The sums for the parameters of all tracked modules and optimizers, from `begin` to `end`."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        parameters: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for key, target in state.items():
            if isinstance(target, torch.nn.Module):
                for name, parameter in target.named_parameters():
                    parameters.setdefault(id(parameter), (f"{key}.{name}", parameter))
        for key, target in state.items():
            if isinstance(target, torch.optim.Optimizer):
                of_groups = [p for group in target.param_groups for p in group["params"]]
                for i, parameter in enumerate(of_groups):
                    parameters.setdefault(id(parameter), (f"parameter {i} of {key}", parameter))
        self.names = [name for name, _ in parameters.values()]
        self.name_of = {key: name for key, (name, _) in parameters.items()}  # by a parameter's identity
        self._parameters = [parameter for _, parameter in parameters.values()]
        self._sums: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._counts = [0] * len(self._parameters)
        self._hooks: list[Any] = []
        self._pass: int | None = None  # the backward pass in which a collective has begun
        self._closed = False

    def begin(self) -> None:
        """Begin a step."""
        for i, parameter in enumerate(self._parameters):
            if parameter.requires_grad and not torch.nn.parameter.is_lazy(parameter):
                self._hooks.append(parameter.register_hook(self._adder(i)))  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Stop counting."""
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def collective(self, name: str) -> bool:
        """A collective of the program begins. Return whether the step's gradients stay this rank's own, whatever the
        collective brings. If they do not, counting stops."""
        if (now := backward_pass()) >= 0:
            self._pass = now
        own = is_own(name)
        self._closed = self._closed or not own
        return own

    def totals(self) -> torch.Tensor:
        """For each parameter the number of its gradients, their norm and their sums: [parameters, 2 + COLUMNS + 1]."""
        totals = torch.zeros(len(self.names), 3 + COLUMNS, dtype=torch.float64)
        for i, (count, sums) in enumerate(zip(self._counts, self._sums, strict=True)):
            if sums is not None:
                totals[i, 0], totals[i, 1:] = count, sums.cpu()
        return totals

    def _adder(self, i: int) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            if self._pass is not None and backward_pass() != self._pass:
                self._closed = True  # the values from which this pass begins may be averaged
            if self._closed:
                return
            try:
                sums = sums_of(gradient.detach())
            except Exception:  # an unforeseen error must not stop the script's step
                log.warning("gradients of %s cannot be summed up", self.names[i], exc_info=True)
                self._closed = True
                return
            before = self._sums[i]
            self._sums[i] = sums if before is None else before + sums
            self._counts[i] += 1

        return hook

    def first_difference(self, mine: torch.Tensor, theirs: torch.Tensor, *, alike: bool = True) -> str | None:
        """The name of the first parameter whose gradients differ. `alike`: both were computed on machines of the same
        kind."""
        if mine.shape != theirs.shape:
            return "the tracked parameters"
        a, b = mine.numpy(), theirs.numpy()
        small = smallest(b[:, 1])
        for i, name in enumerate(self.names):
            if a[i, 0] != b[i, 0]:
                if not small or max(abs(a[i, 1]), abs(b[i, 1])) > small:
                    return name
            elif are_apart(a[i, 1:], b[i, 1:], closeness(self._parameters[i], alike=alike), small):
                return name
        return None


def smallest(norms: Any) -> float:
    """The norm below which a gradient may be rounding alone (a bias before a BatchNorm), by those of all."""
    norms = np.asarray(norms, dtype=np.float64)
    return SMALL * float(np.sqrt(np.sum(np.where(np.isfinite(norms), norms, 0.0) ** 2)))


def are_apart(mine: Any, theirs: Any, close: float, small: float) -> bool:
    """Whether these are the norm and the sums of different gradients. `close`: see `closeness`; `small`: `smallest`."""
    finite = np.isfinite(mine), np.isfinite(theirs)
    if not (finite[0].all() and finite[1].all()):
        return not np.array_equal(*finite)
    return bool(np.any(np.abs(mine - theirs) > close * max(abs(mine[0]), abs(theirs[0]), small)))


def closeness(parameter: torch.Tensor, *, alike: bool) -> float:
    """How far the sums of its gradients may be apart, as a part of their norm. `alike`: see `first_difference`."""
    exact = alike and parameter.device.type == "cpu"
    return CLOSE.get(parameter.dtype, CLOSE_ON_DEVICE) if exact else CLOSE_ON_DEVICE


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """The tensor's real numbers, in one dimension."""
    if gradient.layout is not torch.strided:
        gradient = gradient.coalesce().values()
    gradient = gradient.resolve_conj().resolve_neg()
    return (torch.view_as_real(gradient) if gradient.is_complex() else gradient).reshape(-1)


def pack(sums: torch.Tensor | None, head: Mapping[str, Any]) -> bytes:
    """Pack `sums` (from `LocalGradients.told`) and `head` (JSON values)."""
    shape = list(sums.shape) if sums is not None else None
    text = json.dumps({**head, "shape": shape}).encode()
    return len(text).to_bytes(8, "little") + text + (sums.numpy().tobytes() if sums is not None else b"")


def unpack(data: bytes) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """The arguments of `pack`. Raises ValueError."""
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    if not isinstance(head, dict) or (shape := head.get("shape")) is None:
        return None, head
    sums = np.frombuffer(data[8 + size :], dtype=np.float64).reshape(shape)
    return torch.from_numpy(sums.copy()), head


def is_own(name: str) -> bool:
    """Whether the step goes on with this rank's own values after the collective that begins. That holds for a barrier,
    for DDP's average of gradients, and for its broadcasts of buffers and of the order of its buckets, which a new
    process gets too. Call it from this package alone: `script_call_site` goes up to the first frame outside of it."""
    if backward_pass() >= 0:
        return name == "allreduce"
    looked_up = name == "broadcast" or (name == "allreduce" and uneven_inputs.is_entered())
    caller = script_call_site(sys._getframe(1)) if looked_up else None
    return name == "barrier" or (caller is not None and not caller.own)


def sums_of(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient's norm, its sums by columns, and the sum of the remaining elements."""
    values = _flat(gradient)
    whole = values.numel() // COLUMNS * COLUMNS
    norm = torch.linalg.vector_norm(values, dtype=torch.float64).reshape(1)
    columns = values[:whole].view(-1, COLUMNS).sum(0, dtype=torch.float64)
    return torch.cat([norm, columns, values[whole:].sum(dtype=torch.float64).reshape(1)])
