"""Tests that an earlier run on the same commit passed: `--left-out FILE` leaves them out, a test's id a line.

A night on two cores takes hours, and a machine may be taken away before its end: `lanes.py --go-on` plays the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

OPTION = "--left-out"


class LeftOut:
    """A plugin of pytest's, in each process that collects."""

    def __init__(self, path: Path) -> None:
        self._tests = frozenset(path.read_text().splitlines())

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        out = [item for item in items if item.nodeid in self._tests]
        if out:
            items[:] = [item for item in items if item.nodeid not in self._tests]
            config.hook.pytest_deselected(items=out)


def write(tests: Iterable[str], path: Path) -> list[str]:
    """The arguments for pytest that leave these tests out."""
    path.write_text("".join(f"{test}\n" for test in sorted(tests)))
    return [OPTION, str(path.absolute())]
