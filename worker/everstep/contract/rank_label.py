"""The label of a rank before each line that its process prints of an error, as torch writes it: `[rank2]: `.

Standard library only. Invariant: the label is that of the rank that the process has now; a process that is alone, or
has no rank yet, has none.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

_LABEL = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
_TORCHS_HOOK = "_distributed_excepthook"  # it labels all that is printed inside of it


def added(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """The text with this process's label before each line."""
    if environ.get("WORLD_SIZE", "1") == "1" or not environ.get("RANK") or _is_inside_torchs_hook():
        return text
    label = f"[rank{environ['RANK']}]: "
    return "".join(f"{label}{line}" if line.strip() else line for line in text.splitlines(keepends=True))


def removed(text: str) -> str:
    """The text without labels of any rank."""
    return _LABEL.sub("", text)


def _is_inside_torchs_hook() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != _TORCHS_HOOK:
        frame = frame.f_back
    return frame.f_code.co_name == _TORCHS_HOOK
