"""How long each test took last, `tests/durations.json`, and the order that follows from it: the longest file first.

The file maps a test's id to seconds: set-up, call and tear-down. It holds no test of less than `LISTED` seconds, so
that it stays readable; a file that has none longer is listed itself. `make durations` writes it from the records of the
lanes. Files of one group are played by one process where a lane is spread by file (`ByGroup`).
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from support import ROOT, TESTS

FILE = TESTS / "durations.json"
OPTION = "--longest-first"
LISTED = 0.1  # seconds
SHORT = 0.03  # seconds that a test counts which its file's others are listed without
# What a process of tests starts or imports once, and files whose tests need it.
GROUPS = {
    "control plane": ("apiserver/", "conformance/", "cluster/test_assets.py", "cluster/test_controlplane.py"),
    "libraries": ("adapters/",),  # Hugging Face's and Lightning's take ten seconds and more
}


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
    listed = {
        test: round(seconds, 1)
        for test, seconds in merged.items()
        if seconds >= LISTED and (root / file_of(test)).exists()
    }
    for file in {file_of(test) for test in measured} - {file_of(test) for test in listed if "::" in test}:
        listed[file] = LISTED
    return dict(sorted(listed.items()))


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


def group_of(test: str) -> str:
    """The name of its file's group; the file where it is in none."""
    file = file_of(test)
    names = (name for name, parts in GROUPS.items() if file.removeprefix("tests/").startswith(parts))
    return next(names, file)


class ByGroup(LoadFileScheduling):  # type: ignore[misc]  # it has no types
    """As xdist's `loadfile`, but a group of files goes to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


class LongestFirst:
    """A plugin of pytest's: groups and files of tests begin in the order of their seconds, so that no long one begins
    last.

    Within a file the order stays, because tests of one file share fixtures.
    """

    def __init__(self, durations: Mapping[str, float]) -> None:
        self._durations = durations

    @pytest.hookimpl(trylast=True)  # of the tests that are left
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seconds = of_files((item.nodeid for item in items), self._durations)
        groups: dict[str, float] = defaultdict(float)
        for file, taken in seconds.items():
            groups[group_of(file)] += taken

        def order(item: pytest.Item) -> tuple[float, str, float, str]:
            file, group = file_of(item.nodeid), group_of(item.nodeid)
            return -groups[group], group, -seconds[file], file

        items.sort(key=order)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> ByGroup | None:
        return ByGroup(config, log) if config.option.dist == "loadfile" else None
