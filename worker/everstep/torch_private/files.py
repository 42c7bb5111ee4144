"""Classes and functions that files of torch.save and of DCP name."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

PRIVATE_OF_DCP: dict[tuple[str, str], Any] = {
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
}
PRIVATE_OF_SAVE: dict[tuple[str, str], Any] = {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
