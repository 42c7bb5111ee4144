"""Tests that take turns: `@pytest.mark.turns(3)` lets a third of the tests of its folder run, another third next time.

Which time it is says EVERSTEP_TURN, a number, which `lanes.py` sets to that of the commits up to the present one: so a
commit has the same tests whenever it is tested, and each test runs once in three commits that land one by one. Without
the variable, and where tests are named one by one (`FILE::TEST`), all run; so they do in `make soak`.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

TURN = "EVERSTEP_TURN"


def of_commit(folder: Path) -> int:
    """The number of the commits up to the present one; 0 where there is no git repository."""
    command = ["git", "rev-list", "--count", "HEAD"]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return int(found.stdout) if found.returncode == 0 else 0


def chosen(count: int, parts: int, turn: int) -> set[int]:
    """Of `count` tests, the places of those whose turn it is."""
    return {place for place in range(count) if place % parts == turn % parts}


class Turns:
    """A plugin of pytest's."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        text = environ.get(TURN, "")
        if text and not text.isdigit():
            raise pytest.UsageError(f"{TURN}={text}: it has to be a number, or be left out to run all tests")
        self._turn = int(text) if text else None

    @pytest.hookimpl(trylast=True)  # of what `-m` has left
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._turn is None or any("::" in argument for argument in config.args):
            return
        groups: dict[tuple[Path, int], list[pytest.Item]] = defaultdict(list)
        for item in items:
            if (parts := _parts(item)) > 1:
                groups[item.path.parent, parts].append(item)
        waits: set[pytest.Item] = set()
        for (_, parts), group in groups.items():
            mine = chosen(len(group), parts, self._turn)
            waits.update(item for place, item in enumerate(group) if place not in mine)
        if waits:
            items[:] = [item for item in items if item not in waits]
            config.hook.pytest_deselected(items=_in_order(waits))


def _parts(item: pytest.Item) -> int:
    mark = item.get_closest_marker("turns")
    return int(mark.args[0]) if mark is not None else 1


def _in_order(items: set[pytest.Item]) -> Sequence[pytest.Item]:
    return sorted(items, key=lambda item: item.nodeid)
