"""Refuses a load with `cast=True` that would turn a number of the commit into another value.

Rounding is what a narrower type is for. A finite number that becomes infinite, a fraction that becomes whole, or an
integer that wraps around is another value. Invariant: such a load is refused on every rank, before the objects are
filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.load.fit_optimizer import tensors_of
from everstep.checkpoint.load.fitted import Fit
from everstep.checkpoint.ranks import Ranks
from everstep.checkpoint.state.capture import Captured, parameters_of
from everstep.checkpoint.state.sharding import local_of
from everstep.checkpoint.state.tree import DTYPES
from everstep.checkpoint.state.union import inside


def check_cast(
    state: Mapping[str, Any], captured: Captured, fitted: Fit, tensors: Mapping[str, torch.Tensor], ranks: Ranks
) -> None:
    """Raises `StateMismatch` naming the tensors of the commit that hold a number which the state's dtype does not have;
    on all ranks if one of them does. Collective."""
    odd = []
    for own, name, dtype in sorted(set(_conversions(state, captured, fitted)), key=lambda found: found[:2]):
        tensor = tensors.get(name)
        if tensor is not None and tensor.dtype != dtype and (what := _lost(local_of(tensor), dtype)) is not None:
            kinds = f"{DTYPES.get(tensor.dtype)} in the commit"
            odd.append(f"{own}: {kinds}, and {what} does not exist in {DTYPES.get(dtype)}, the state's")
    if ranks.maximum(int(bool(odd))):
        text = "; ".join(odd[:3]) or "a tensor cannot be converted on another rank, which names it"
        raise StateMismatch(f"cast: {text}. Give the state a type that has it, or leave this out with exclude=")


def _conversions(state: Mapping[str, Any], captured: Captured, fitted: Fit) -> Iterator[tuple[str, str, torch.dtype]]:
    """The path in the state, the commit's tensor, and the dtype that it is to have."""
    for name, owns in fitted.live.items():
        yield from ((own, name, captured.tensors[own].dtype) for own in owns)
    for key, body in fitted.bodies.items():
        if not isinstance(inside(state[key]), torch.optim.Optimizer):
            continue
        parameters = parameters_of(state, key, body)
        for number, names in tensors_of(body).items():
            parameter = parameters.get(number)
            if parameter is not None and parameter.is_floating_point():
                # The step is not brought to the parameter's type.
                yield from ((name, name, parameter.dtype) for name in names if not name.endswith("/step"))


def _lost(tensor: torch.Tensor, dtype: torch.dtype) -> str | None:
    """The first number of `tensor` that `dtype` does not have, as a text; None if it has all, rounded."""
    wide = tensor.flatten()
    if wide.is_complex() and not dtype.is_complex:
        bad = wide.imag != 0
    elif dtype.is_floating_point or dtype.is_complex:
        kind = torch.complex64 if dtype.is_complex else torch.float32 if dtype.itemsize < 4 else dtype
        bad = _comparable(wide).isfinite() & ~wide.to(dtype).to(kind).isfinite()
    else:
        bad = _comparable(wide) != _comparable(wide.to(dtype).to(wide.dtype))
    return str(wide[bad][0].item()) if bool(bad.any()) else None


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a type that torch can compare: it cannot compare all float8 and unsigned ones."""
    if tensor.is_floating_point() and tensor.element_size() < 4:
        return tensor.float()
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.to(torch.int64)
    return tensor
