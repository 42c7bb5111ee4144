"""How long each test took last, `tests/durations.json`, and the order that follows from it: the longest file first.

The file maps a test's id to seconds: set-up, call and tear-down. It holds no test of less than `LISTED` seconds, so
that it stays readable. `make durations` writes it from the records of the lanes.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from support import ROOT, TESTS

FILE = TESTS / "durations.json"
OPTION = "--longest-first"
LISTED = 0.1  # seconds
SHORT = 0.03  # seconds that a test counts which its file's others are listed without


def read(path: Path = FILE) -> dict[str, float]:
    """Seconds of each test; nothing where there is no file. Raises `pytest.UsageError` that names the file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        return {str(test): float(seconds) for test, seconds in found.items()}
    except (ValueError, TypeError, AttributeError) as e:
        raise pytest.UsageError(f"{path}: it has to be one object, test → seconds ({e}): run `make durations`") from e


def merge(old: Mapping[str, float], measured: Mapping[str, float], root: Path = ROOT) -> dict[str, float]:
    """`old` with what was measured now, without the tests whose file is gone."""
    merged = {**old, **measured}
    return {
        test: round(seconds, 1)
        for test, seconds in sorted(merged.items())
        if seconds >= LISTED and (root / file_of(test)).exists()
    }


def write(durations: Mapping[str, float], path: Path = FILE) -> None:
    """Sorted, a test a line: what changed shows line by line."""
    path.write_text(json.dumps(durations, indent=0, sort_keys=True, ensure_ascii=False) + "\n")


def file_of(test: str) -> str:
    return test.partition("::")[0]


def of_files(tests: Iterable[str], durations: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each file's `tests`. One that is not listed is short if others of its file are, else it is the median
    of all that are: its file is new."""
    known = {file_of(test) for test in durations}
    median = statistics.median(durations.values()) if durations else 1.0
    seconds: dict[str, float] = defaultdict(float)
    for test in tests:
        file = file_of(test)
        seconds[file] += durations.get(test, SHORT if file in known else median)
    return dict(seconds)


class LongestFirst:
    """A plugin of pytest's: files of tests begin in the order of their seconds, so that no long one begins last.

    Within a file the order stays, because tests of one file share fixtures.
    """

    def __init__(self, durations: Mapping[str, float]) -> None:
        self._durations = durations

    @pytest.hookimpl(trylast=True)  # of the tests that are left
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seconds = of_files((item.nodeid for item in items), self._durations)
        items.sort(key=lambda item: (-seconds[file_of(item.nodeid)], file_of(item.nodeid)))
