"""Compares the newest checkpoints that DeepSpeed has written: deepspeed_checkpoints.py LIBRARY FOLDER OTHER_FOLDER

LIBRARY: where DeepSpeed is installed, because its files hold objects of its classes. Prints the step of each, and each
place at which they differ, bit by bit.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from support.recipes.compared import compare


def newest(folder: Path) -> dict[str, Any]:
    """What the newest checkpoint holds, by file, and its weights whole, because a rank's part of them in ZeRO 3 ends
    with padding that nobody has written."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # noqa: PLC0415

    tag = folder / (folder / "latest").read_text().strip()
    files = {file.name: plain(torch.load(file, weights_only=False)) for file in sorted(tag.glob("*.pt"))}
    for held in files.values():
        held.get("optimizer_state_dict", {}).pop("fp32_flat_groups", None)
    return files | {"weights": dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)))}


def plain(value: Any) -> Any:
    """The value with what its objects hold in their places: two equal objects of DeepSpeed's are not `==`."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    own = type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__")
    return plain(vars(value)) if own else value


def tensors(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return torch.is_tensor(value) + sum(map(tensors, inside))


sys.path.insert(1, sys.argv[1])
one, other = (newest(Path(folder)) for folder in sys.argv[2:])
found: list[str] = []
compare("", one, other, found)
steps = [max(file.get("global_steps", 0) for file in files.values()) for files in (one, other)]
print(f"steps {steps[0]} and {steps[1]}, {len(one) - 1} files, {tensors(one)} tensors")
print(*(f"differs: {place}" for place in found), sep="\n")
