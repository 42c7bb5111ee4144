"""Plain values and small tensors of an attribute: which are kept, how they are copied, compared and put back."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from everstep.recovery.rollback.snapshots import write

MOST = 2000  # values in an attribute
SCALARS = frozenset({bool, int, float, str, type(None)})
TENSOR, DEVICE = "everstep tensor", "device"  # the keys of an encoded tensor or numpy array
ARRAY, SCALAR = "numpy array", "numpy scalar"  # the devices of numpy's


def plain(value: Any) -> bool:
    return 0 <= _size(value) <= MOST


def _size(value: Any) -> int:
    """How many values it holds, or -1 if some is not plain."""
    if type(value) in SCALARS:
        return 1
    if type(value) is dict and not all(type(key) in (str, int) for key in value):
        return -1
    if type(value) not in (list, tuple, dict) or len(value) > MOST:
        return -1
    inside = value.values() if type(value) is dict else value
    if SCALARS.issuperset(map(type, inside)):
        return 1 + len(value)
    sizes = [_size(each) for each in inside]
    return -1 if -1 in sizes else 1 + sum(sizes)


def copied(value: Any) -> Any:
    inside = value.values() if type(value) is dict else value
    return copy.copy(value) if SCALARS.issuperset(map(type, inside)) else copy.deepcopy(value)


def differs(was: Any, value: Any) -> bool:
    """Copies of a tensor are the same object as long as it has not changed."""
    if was is value:
        return False
    if not (_is_tensor(was) and _is_tensor(value)):
        return _is_tensor(was) or _is_tensor(value) or bool(was != value)
    arrays = isinstance(was[TENSOR], np.ndarray) and isinstance(value[TENSOR], np.ndarray)
    return not (arrays and _same_bits(was[TENSOR], value[TENSOR]))


def _same_bits(was: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> bool:
    return (was.shape, was.dtype) == (value.shape, value.dtype) and was.tobytes() == value.tobytes()


def same_values(was: Any, tensor: torch.Tensor) -> bool:
    alike = isinstance(was, torch.Tensor) and (was.shape, was.dtype) == (tensor.shape, tensor.dtype)
    return alike and was.device == tensor.device and torch.equal(was, tensor.detach())


def _is_tensor(value: Any) -> bool:
    return type(value) is dict and TENSOR in value


def put(each: object, name: str, value: Any) -> None:
    """Into the list or dictionary that is there, because others may hold it too."""
    there = getattr(each, "__dict__", {}).get(name)
    if _is_tensor(value):
        _put_tensor(each, name, there, value)
        return
    if type(there) is type(value) and there == value:
        return
    value = copy.deepcopy(value)
    if type(there) is list and type(value) is list:
        there[:] = value
    elif type(there) is dict and type(value) is dict:
        there.clear()
        there.update(value)
    else:
        setattr(each, name, value)


def _put_tensor(each: object, name: str, there: Any, encoded: Mapping[str, Any]) -> None:
    value, device = encoded[TENSOR], encoded[DEVICE]
    if device == SCALAR:
        setattr(each, name, value[()])
    elif type(there) is not type(value) or (there.shape, there.dtype) != (value.shape, value.dtype):
        setattr(each, name, value.copy() if device == ARRAY else value.clone().to(device))
    elif device == ARRAY:
        there[...] = value
    elif there.requires_grad or there.is_inference():
        setattr(each, name, value.clone().to(device))
    else:
        write(there, value)
