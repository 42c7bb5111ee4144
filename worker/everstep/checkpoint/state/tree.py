"""A state's tree of values as JSON plus named tensors, and back, with nothing lost and nothing executed.

Types that JSON lacks are tagged objects (`{"$tuple": […]}`), so tuples, non-string keys, NaN and bytes come back as
they were. Whatever has no tag here is refused by name: there is no fallback to pickle.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from everstep.checkpoint.errors import StateMismatch
from everstep.checkpoint.format.wire import Json
from everstep.checkpoint.state import layouts
from everstep.checkpoint.state.sharding import check_placements, is_sharded, local_of
from everstep.torch_private.tensors import is_wrapper, storage_of

DTYPES: Final[dict[torch.dtype, str]] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32", torch.int64: "I64",
    torch.uint64: "U64", torch.float64: "F64", torch.complex64: "C64",
}  # fmt: skip
TORCH: Final = {name: dtype for dtype, name in DTYPES.items()}

_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
MAX_PATH: Final = 4000  # characters; the record's own bound is 4,096, and a box may follow the path
_MAX_DEPTH = 50  # levels in the record, whose own bound is 64: a tuple is two of them, a `$dict` three
_MAX_BITS = 14_000  # of an integer: Python itself neither writes nor reads decimals of more than 4,300 digits
_TORN = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # two halves of a character, which JSON reads as one character


class Flattener:
    """Collects the tensors of one or more trees under unique names; `tensors` is filled by `flatten`.

    A tensor that appears twice in a tree (tied weights) is collected once, and both references have the same name. Not
    while `ties` is False: if ranks hold different parts of a tree, no name may depend on the other parts.
    """

    def __init__(self) -> None:
        self.ties = True
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[object, ...], str] = {}

    def flatten(self, value: object, path: str, depth: int = 0) -> Json:
        """The JSON of `value`; `path` names it in errors and its tensors. Raises `StateMismatch`."""
        if depth > _MAX_DEPTH:
            raise StateMismatch(
                f"{path[:80]}: the state is nested deeper than {_MAX_DEPTH} levels, of which a tuple takes two and a "
                "mapping three if not all of its keys are texts"
            )
        match value:
            case None | bool():
                return value
            case str():
                return _text(value, path)
            case int():
                if value.bit_length() > _MAX_BITS:
                    raise StateMismatch(
                        f"{path}: an integer of {value.bit_length()} bits; at most {_MAX_BITS} are kept"
                    )
                return int(value)
            case float():
                return float(value) if math.isfinite(value) else {"$float": str(float(value))}
            case torch.Tensor():
                return {"$tensor": self._add(value, path)}
            case bytes() | bytearray():
                return {"$bytes": base64.b64encode(value).decode()}
            case list():
                return [self.flatten(v, join(path, i), depth + 1) for i, v in enumerate(value)]
            case tuple():
                return {"$tuple": [self.flatten(v, join(path, i), depth + 2) for i, v in enumerate(value)]}
            case Mapping():
                return self._mapping(value, path, depth)
        return self._numpy(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Json:
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {_text(k, path): self.flatten(v, join(path, k), depth + 1) for k, v in value.items()}
        for key in value:
            if not isinstance(key, str | int | float | tuple) and key is not None:
                raise StateMismatch(f"{path}: key {key!r} of type {type(key).__name__} cannot be in a checkpoint")
        pairs: list[Json] = [
            [self.flatten(k, f"{path} (key)", depth + 3), self.flatten(v, join(path, k), depth + 3)]
            for k, v in value.items()
        ]
        seen = set[str]()
        for key in (key for key in value if isinstance(key, float | tuple)):  # other equal keys are one already
            if (encoded := json.dumps(self.flatten(key, path))) in seen:
                raise StateMismatch(f"{path}: two of its keys are {key!r}, and would be one when they are read")
            seen.add(encoded)
        return {"$dict": pairs}

    def _numpy(self, value: object, path: str) -> Json:
        if type(value).__module__ == "numpy":
            import numpy as np  # noqa: PLC0415  only states that hold numpy values need it

            if isinstance(value, np.generic | np.ndarray) and value.dtype in (np.longdouble, np.clongdouble):
                raise StateMismatch(
                    f"{path}: a numpy.{value.dtype} is as wide as the machine that made it says, and no checkpoint "
                    "format holds it; convert it to numpy.float64"
                )
            if isinstance(value, np.generic) and value.dtype.names:
                raise StateMismatch(
                    f"{path}: a row of a structured numpy array would come back as a tuple; give its fields"
                )
            if isinstance(value, np.generic):
                return self.flatten(value.item(), path)
            if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
                raise StateMismatch(
                    f"{path}: a numpy.{type(value).__name__} would come back as a plain array; give numpy.asarray of it"
                )
            if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
                native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
                return {"$ndarray": self._add(torch.from_numpy(native), path)}
        raise StateMismatch(
            f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be in a checkpoint. Give tensors, "
            "numbers, texts, lists, tuples, mappings, or an object with state_dict() and load_state_dict()"
        )

    def _add(self, tensor: torch.Tensor, path: str) -> str:
        if hasattr(tensor, "sharding_spec"):
            raise StateMismatch(f"{path}: a ShardedTensor (FSDP1) cannot be in a checkpoint; use fully_shard (FSDP2)")
        if not layouts.is_dense(tensor):
            raise StateMismatch(
                f"{path}: {layouts.kind_of(tensor)} is not supported in a checkpoint. {layouts.advice(tensor)}"
            )
        if tensor.dtype not in DTYPES:
            raise StateMismatch(f"{path}: a {tensor.dtype} tensor ({tensor.layout}, {tensor.device}) is not supported")
        if torch.nn.parameter.is_lazy(tensor):
            raise StateMismatch(f"{path}: a lazy module's parameter that has no shape yet; run a forward pass before")
        if len(path) > MAX_PATH:
            raise StateMismatch(f"{path[:80]}…: a path of {len(path)} characters; at most {MAX_PATH} are allowed")
        if is_sharded(tensor):
            check_placements(path, tensor)
        _check_memory(tensor, path)
        tensor = tensor.detach()
        same = identity(tensor)
        if self.ties and tensor.numel() and same in self._names:
            return self._names[same]
        name, copy = path, 1
        while name in self.tensors:  # the keys 1 and "1" of one mapping
            copy += 1
            name = f"{path}~~{copy}"
        self.tensors[name] = tensor
        if self.ties:
            self._names[same] = name
        return name


def references(value: Json) -> Iterator[str]:
    """The names of the tensors that a tree refers to."""
    if isinstance(value, list):
        for v in value:
            yield from references(v)
    elif isinstance(value, dict):
        for key, v in value.items():
            if key in ("$tensor", "$ndarray") and len(value) == 1 and isinstance(v, str):
                yield v
            else:
                yield from references(v)


def unflatten(value: Json, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    """The tree that `Flattener.flatten` encoded. Raises `StateMismatch` for a tag or tensor that is not known."""
    if isinstance(value, list):
        return [unflatten(v, tensors, where) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, body),) = value.items()
        if tag.startswith("$"):
            return _tagged(tag, body, tensors, where)
    return {k: unflatten(v, tensors, where) for k, v in value.items()}


def _tagged(tag: str, body: Json, tensors: Mapping[str, torch.Tensor], where: str) -> Any:
    match tag, body:
        case "$float", str() if body in _FLOATS:
            return _FLOATS[body]
        case "$tensor", str() if body in tensors:
            return tensors[body]
        case "$ndarray", str() if body in tensors:
            return tensors[body].numpy()
        case "$bytes", str():
            return base64.b64decode(body, validate=True)
        case "$tuple", list():
            return tuple(unflatten(v, tensors, where) for v in body)
        case "$dict", list():
            pairs = (v for v in body if isinstance(v, list) and len(v) == 2)
            return {unflatten(k, tensors, where): unflatten(v, tensors, where) for k, v in pairs}
    raise StateMismatch(f"{where}: {tag} {str(body)[:80]!r} cannot be decoded")


def _text(value: str, path: str) -> str:
    """The text as a plain `str`; an enumeration's member may be one. Raises `StateMismatch` if JSON would change it."""
    if _TORN.search(value):
        raise StateMismatch(f"{path}: {value[:80]!r} has a character in two halves (surrogates), which are read as one")
    return str.__str__(value)


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that is equal for tensors that are one: the same elements in the same memory, in the same order."""
    view = (tensor.is_conj(), tensor.is_neg())
    return (memory_of(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device), view)


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that identifies the memory of a tensor's elements. All ranks must find the same tensors tied. A rank whose
    part of a sharded tensor is empty has no address for it, but its storage has an identity."""
    if not is_sharded(tensor):
        return (tensor.data_ptr(),)
    local = tensor.to_local()  # type: ignore[attr-defined]
    return (storage_of(local), local.storage_offset(), tensor.placements)  # type: ignore[attr-defined]


def _check_memory(tensor: torch.Tensor, path: str) -> None:
    """Raises `StateMismatch` for a tensor whose elements do not lie in memory of its own: it has no bytes to save."""
    whole = local_of(tensor)
    if not whole.numel():
        return
    if is_wrapper(whole) or _address(whole) == 0:
        kind = type(whole)
        if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            raise StateMismatch(f"{path}: the tensor's memory was freed (its storage was resized); it cannot be saved")
        raise StateMismatch(
            f"{path}: a {kind.__module__}.{kind.__qualname__} computes its elements from other tensors, and cannot be "
            "in a checkpoint. Give the tensors that it holds, or its dequantized value"
        )
    last = sum((size - 1) * stride for size, stride in zip(whole.shape, whole.stride(), strict=True))
    if whole.untyped_storage().nbytes() < (whole.storage_offset() + last + 1) * whole.element_size():
        raise StateMismatch(f"{path}: the tensor's memory was cut (its storage was resized); it cannot be saved")


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # the tensor has no memory
        return 0


def join(path: str, key: object) -> str:
    """Path components as in JSON pointers (RFC 6901): `~` is `~0` and `/` is `~1`."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"
