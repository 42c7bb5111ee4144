"""The longest file of tests begins first; how long each test took is kept from run to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.lanes import durations
from support.lanes.repeats import Record

CONFTEST = """
from pathlib import Path
from support.lanes.durations import LongestFirst, read
def pytest_configure(config):
    config.pluginmanager.register(LongestFirst(read(Path("durations.json"))))
"""


GROUPED = """
import os
import pytest
@pytest.mark.parametrize("n", range(5))
def test_process(n): open(r"{folder}/" + os.environ["PYTEST_XDIST_WORKER"], "a").write(__file__ + "\\n")
"""


def order(folder: Path, known: dict[str, float], *arguments: str) -> list[str]:
    """The tests of `folder` in the order in which they ran."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "durations.json").write_text(json.dumps(known))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "xdist", "-p", "no:cacheprovider", *arguments]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (line.replace("PASSED", "").split() for line in done.stdout.splitlines() if "PASSED" in line)
    return [next(word for word in words if "::" in word) for words in lines]


def test_files_run_from_the_longest_to_the_shortest_and_keep_the_order_of_their_tests(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text("def test_short(): pass\ndef test_long(): pass\n")
    (tmp_path / "test_new.py").write_text("def test_unknown(): pass\n")
    known = {"test_a.py::test_long": 1.0, "test_b.py::test_long": 3.0, "test_c.py::test_long": 9.0}
    files = ["test_c.py", "test_b.py", "test_new.py", "test_a.py"]  # the new one counts 3.0, and its name comes later
    expected = [f"{file}::{test}" for file in files for test in ("test_short", "test_long")]
    expected[4:6] = ["test_new.py::test_unknown"]
    assert order(tmp_path, known) == expected
    spread = order(tmp_path, known, "-n", "1", "--dist", "loadfile", "--no-loadscope-reorder")
    assert spread == expected


def test_files_of_a_group_are_played_by_one_process_and_begin_by_their_seconds_together(tmp_path: Path) -> None:
    for name in ("adapters/test_a.py", "adapters/test_b.py", "other/test_c.py", "other/test_d.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(GROUPED.format(folder=tmp_path))
    known = {"tests/adapters/test_a.py": 1.0, "tests/adapters/test_b.py": 2.5, "tests/other/test_c.py": 3.0}
    first = order(tmp_path, known, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    assert len(first) == 20
    played = [(tmp_path / name).read_text().splitlines() for name in ("gw0", "gw1")]
    # Who has ended its files first takes the last one.
    of_group = max([["adapters" in line for line in lines] for lines in played], key=sum)
    assert of_group[:10] == [True] * 10
    assert sum(of_group) == 10


def test_seconds_of_a_test_are_those_of_its_phases(tmp_path: Path) -> None:
    lines = [
        {"test": "t.py::t", "when": when, "outcome": "passed", "seconds": seconds, "cause": "", "why": ""}
        for when, seconds in (("setup", 1.5), ("call", 2.0), ("teardown", 0.25))
    ]
    (tmp_path / "record").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Record.read(tmp_path / "record", 0).seconds == {"t.py::t": 3.75}


def test_what_is_kept_is_the_newest_of_each_test_that_is_there_and_not_short(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    old = {"t.py::nightly": 4.0, "t.py::slow": 9.0, "t.py::was_slow": 7.0, "gone.py::test": 3.0}
    (tmp_path / "short.py").touch()
    measured = {"t.py::slow": 2.04, "t.py::was_slow": 0.01, "t.py::quick": 0.02, "short.py::quick": 0.02}
    merged = durations.merge(old, measured, tmp_path)
    assert merged == {"short.py": 0.1, "t.py::slow": 2.0, "t.py::nightly": 4.0}
    durations.write(merged, tmp_path / "durations.json")
    assert durations.read(tmp_path / "durations.json") == merged


@pytest.mark.parametrize("text", ["", "[1]", '{"t.py::t": "long"}'])
def test_file_that_holds_something_else_is_refused_by_its_name(text: str, tmp_path: Path) -> None:
    (tmp_path / "durations.json").write_text(text)
    with pytest.raises(pytest.UsageError, match=r"durations\.json: .* run `make durations`"):
        durations.read(tmp_path / "durations.json")


def test_committed_seconds_are_of_files_that_exist() -> None:
    known = durations.read()
    assert known
    assert {file for file in map(durations.file_of, known) if not (ROOT / file).exists()} == set()
