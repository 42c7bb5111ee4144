"""The label of a rank before each line that its process prints of an error, as torch writes it: `[rank2]: `.

Standard library only. Invariant: the label is that of the rank that the process has now; a process that is alone, or
has no rank yet, has none.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from types import TracebackType

from everstep.contract import env

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_LABEL = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
_HOOKS = (
    "_distributed_excepthook",
    "_labelled_excepthook",
)  # torch's and ours label all that is printed inside of them


def labelled(hook: Hook) -> Hook:
    """An excepthook that labels what `hook` prints. It takes the place of torch's, whose label is for ever the rank
    that the process had when its group was made."""

    def _labelled_excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stderr(printed):
                hook(kind, error, trace)
        finally:
            sys.stderr.write(_prefixed(printed.getvalue()))
            sys.stderr.flush()

    return _labelled_excepthook


def added(text: str) -> str:
    """The text with this process's label before each line, unless a hook labels it."""
    return text if _is_inside_a_hook() else _prefixed(text)


def removed(text: str) -> str:
    """The text without labels of any rank."""
    return _LABEL.sub("", text)


def _prefixed(text: str) -> str:
    environ = os.environ
    alone = environ.get("WORLD_SIZE", "1") == "1" or not environ.get("RANK")
    if alone or (env.AGENT_SOCKET in environ and env.ROUND not in environ):  # an adapter may set WORLD_SIZE before
        return text
    label = f"[rank{environ['RANK']}]: "
    return "".join(f"{label}{line}" if line.strip() else line for line in text.splitlines(keepends=True))


def _is_inside_a_hook() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name not in _HOOKS:
        frame = frame.f_back
    return frame.f_code.co_name in _HOOKS
