"""Names of jobs: those of files, and what is asked of one."""

from __future__ import annotations

import re
from typing import Final

MAX_NAME: Final = 48
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
RULE: Final = f"name of at most {MAX_NAME} lower-case letters, digits and dashes that begins with a letter"


def valid(name: str) -> bool:
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def cut(text: str, length: int = MAX_NAME) -> str:
    """A job's name made from a file's or a function's. It may still begin with a digit, or be empty."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:length].rstrip("-")
