"""Tests that take turns: each has one of every few commits, and a test that is named runs whatever the turn is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.lanes.turns import chosen, of_commit

CONFTEST = (
    "from support.lanes.turns import Turns\n"
    "def pytest_configure(config):\n"
    "    config.addinivalue_line('markers', 'turns(n): see there')\n"
    "    config.pluginmanager.register(Turns())\n"
)
TESTS = """
import pytest
@pytest.mark.turns(3)
@pytest.mark.parametrize("row", range(7))
def test_row(row): pass
def test_each_time(): pass
"""


@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 10**6))
def test_each_test_runs_once_in_as_many_turns_as_there_are_parts(count: int, parts: int, first: int) -> None:
    runs = [chosen(count, parts, first + turn) for turn in range(parts)]
    assert sorted(place for run in runs for place in run) == list(range(count))


def ran(folder: Path, turn: str | None, *arguments: str) -> set[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_rows.py").write_text(TESTS)
    environ = {k: v for k, v in os.environ.items() if k != "EVERSTEP_TURN"}
    environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | ({} if turn is None else {"EVERSTEP_TURN": turn})
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode in (0, 4), done.stdout + done.stderr
    if done.returncode:
        return {done.stderr.strip()}
    return {line.split()[0].partition("::")[2] for line in done.stdout.splitlines() if " PASSED" in line}


ROWS = {f"test_row[{n}]" for n in range(7)}


@pytest.mark.parametrize(
    ("turn", "arguments", "expected"),
    [
        (None, (), ROWS | {"test_each_time"}),
        ("7", (), {"test_row[1]", "test_row[4]", "test_each_time"}),
        ("7", ("test_rows.py::test_row[3]",), {"test_row[3]"}),
        ("7", ("-k", "not 1"), {"test_row[2]", "test_row[5]", "test_each_time"}),  # of what is left, every third
    ],
)
def test_rows_run_in_turn_and_all_of_them_where_they_are_named(
    tmp_path: Path, turn: str | None, arguments: tuple[str, ...], expected: set[str]
) -> None:
    assert ran(tmp_path, turn, *arguments) == expected


def test_turn_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    (said,) = ran(tmp_path, "all")
    assert "EVERSTEP_TURN=all: it has to be a number" in said


def test_commits_that_follow_each_other_have_turns_that_do(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=n", "-c", "user.email=n@example.com"]
    assert of_commit(tmp_path) == 0
    subprocess.run([*git, "init", "-q", "."], cwd=tmp_path, check=True)
    for count in (1, 2):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "c"], cwd=tmp_path, check=True)
        assert of_commit(tmp_path) == count
