"""Counts by how many lines a recipe's train.py differs from before.py, the same script without Everstep."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path


def changed_lines(folder: Path) -> tuple[int, int]:
    """How many lines train.py adds to before.py or changes in it, and how many only get another indentation. Empty
    lines and the docstring, which says how to start each script, do not count."""
    before, after = (_code((folder / name).read_text()) for name in ("before.py", "train.py"))
    words = [[line.strip() for line in lines] for lines in (before, after)]
    changed = sum(later - earlier for tag, _, _, earlier, later in _blocks(*words) if tag != "equal")
    removed = sum(later - earlier for tag, earlier, later, _, _ in _blocks(*words) if tag != "equal")
    exact = sum(later - earlier for tag, _, _, earlier, later in _blocks(before, after) if tag != "equal")
    return max(changed, removed), exact - changed


def _code(text: str) -> list[str]:
    return [line for line in text.split('"""', 2)[2].splitlines() if line.strip()]


def _blocks(before: list[str], after: list[str]) -> Sequence[tuple[str, int, int, int, int]]:
    return difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
