"""Which source files are libraries, and not the script's: a refusal names the script's line, and the script's state.

A virtual environment may see packages of the machine or of another folder, so names of folders count, too. Standard
library only.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import FrameType, TracebackType

_FOLDERS = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parents[1]) + os.sep
# The last two are other packages of ours, which may be installed from a checkout.
_INSTALLED = ("/site-packages/", "/dist-packages/", "<frozen ", "/everstep_horovod/", "/everstep_sources/")


def is_library(file: str) -> bool:
    """Whether `file`, as a code object names it, is Python's own or an installed package's."""
    return file.startswith(_FOLDERS) or any(part in file for part in _INSTALLED)


def _is_of_the_script(file: str) -> bool:
    return not (file.startswith(_OURS) or is_library(file))


def line_of_the_script(frame: FrameType | None) -> str:
    """The innermost line of the script, searched upwards from `frame`: "train.py:31"; empty if only libraries run."""
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_of_the_script(file):
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def frames_of_the_script(trace: TracebackType | None) -> list[tuple[str, int, str]]:
    """File, line and function of each frame that is neither a library's nor ours, the innermost one last."""
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_of_the_script(code.co_filename):
            frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return frames
