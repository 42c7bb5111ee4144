"""Tensors: how often each was changed, its storage, and operations below its class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch


def raw(tensor: Any) -> Any:
    """The tensor that counts changes: for a DTensor, this process's part."""
    return getattr(tensor, "_local_tensor", tensor)


def version(tensor: Any) -> int:
    """How often the tensor was changed in place; 0 if it was made in inference mode, where torch does not count."""
    plain = raw(tensor)
    return 0 if plain.is_inference() else plain._version


def versions(tensors: Iterable[Any]) -> list[int]:
    """How often each was changed in place; of DTensors the tensor's own count, which is not that of its local part.
    Raises `RuntimeError` for a tensor that was made in inference mode."""
    return [t._version for t in tensors]


def marks(tensors: Iterable[Any]) -> list[tuple[int, int] | None]:
    """For each tensor a value that differs once it has changed in place, or another has taken its place; None for
    None. Raises `RuntimeError` for a tensor that was made in inference mode."""
    return [None if t is None else (id(t), t._version) for t in tensors]


def sum_of_versions(tensors: Iterable[Any]) -> int:
    """How often all of them together were changed in place."""
    try:
        return sum([t._version for t in tensors])  # a list is faster
    except RuntimeError:  # tensors made in inference mode have no version
        return sum(map(version, tensors))


def hooks_of(parameter: Any) -> list[Mapping[int, Any]]:
    """The tables of a parameter's hooks on its gradient, by their numbers."""
    return [parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}]


def copy_each(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    """Copy each tensor of `source` to that of `to`, in one operation for all."""
    torch._foreach_copy_(to, source)


def storage_of(tensor: Any) -> int:
    """Identifies the tensor's storage, also an empty one, which has no address."""
    return int(tensor.untyped_storage()._cdata)


def below_subclasses() -> AbstractContextManager[Any]:
    """A context in which no subclass of `Tensor` has a part in an operation."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return context


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it computes its elements from other tensors, which it wraps."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # noqa: PLC0415  it is imported with torch

    return bool(is_traceable_wrapper_subclass(tensor))
