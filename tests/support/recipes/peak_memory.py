"""The most bytes that tensors made in a `with Peak()` block occupy at one time, on the CPU too.

torch counts its memory for accelerators only. Here each operation's results are noted, and forgotten when torch has
freed them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`peak` is in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        freed = [key for key, (storage, _) in self._alive.items() if storage.expired()]  # type: ignore[no-untyped-call]
        for key in freed:
            del self._alive[key]
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                noted = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._alive.setdefault(storage._cdata, (noted, storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return found
