"""Which source files are libraries, and not the script's: a refusal names the script's line, and the script's state.

A virtual environment may see packages of the machine or of another folder, so names of folders count, too. Standard
library only.
"""

from __future__ import annotations

import sysconfig

_FOLDERS = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/", "<frozen ")


def is_library(file: str) -> bool:
    """Whether `file`, as a code object names it, is Python's own or an installed package's."""
    return file.startswith(_FOLDERS) or any(part in file for part in _INSTALLED)
