"""What the lanes need is built in the background; a lane waits for its own builds, and reports why one failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.lanes.background import Background
from testcluster import builds

# Builds `slow` once the file `go` is there, `bad` never.
BUILDER = """
import sys, time
from pathlib import Path
from testcluster import builds
from testcluster.proc import ClusterError
def slow():
    while not Path("go").exists():
        time.sleep(0.01)
def bad():
    with Path("tries").open("a") as out:
        out.write("x")
    raise ClusterError("`go build` returned 1\\nthe last line of its log")
def ends():
    import os
    os._exit(9)
builds.BUILDS.update(slow=slow, bad=bad, quick=lambda: None, ends=ends)
sys.exit(builds.main())
"""
PROGRAM = (sys.executable, "-c", BUILDER)


@pytest.fixture
def background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Background]]:
    monkeypatch.chdir(tmp_path)
    started: list[Background] = []
    yield started
    for one in started:
        one.stop()


def start(background: list[Background], *names: str) -> Background:
    background.append(Background(names, Path("state"), PROGRAM))
    return background[-1]


def test_lane_waits_for_its_own_builds_alone(background: list[Background]) -> None:
    said: list[str] = []
    built = start(background, "quick", "slow")
    assert built.wait(["quick"], said.append) == ""
    assert "slow was not built within 0 s\nlog: state/builds.log" in built.wait(["quick", "slow"], said.append, 0.3)
    assert said[-1] == "waits for slow"
    Path("go").touch()
    assert built.wait(["slow"], said.append) == ""
    assert built.wait([], said.append) == ""


def test_build_that_fails_is_tried_twice_and_told_by_those_who_need_it(background: list[Background]) -> None:
    built = start(background, "bad", "quick")
    problem = built.wait(["bad"], print)
    assert problem == ("bad could not be built: `go build` returned 1\nthe last line of its log\nlog: state/builds.log")
    assert built.wait(["quick"], print) == "", "the next one was built all the same"
    assert Path("tries").read_text() == "xx"


def test_builds_that_end_without_a_word_are_left_to_the_lane(background: list[Background]) -> None:
    said: list[str] = []
    built = start(background, "ends", "quick")
    assert built.wait(["ends", "quick"], said.append) == ""
    assert "the builds ended without ends, quick" in said[-1]


def test_stop_ends_the_builds_and_what_they_started(background: list[Background], tmp_path: Path) -> None:
    child = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(100)"
    program = (sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    background.append(Background(["any"], tmp_path / "state", program))
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    background[-1].stop()
    pid = int((tmp_path / "pid").read_text())
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_nothing_to_build_starts_no_process(tmp_path: Path) -> None:
    built = Background([], tmp_path, ("/there/is/none",))
    assert built.wait([], print) == ""
    built.stop()


def test_builder_runs_behind_everything_else(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys\n"
        "from testcluster import builds\n"
        "shows = [sys.executable, '-c', 'import os; print(os.sched_getscheduler(0), os.nice(0))']\n"
        "builds.BUILDS['x'] = lambda: subprocess.run(shows)\n"
        "builds.main()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "record"), "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(os.SCHED_IDLE), "19"]
    line = json.loads((tmp_path / "record").read_text())
    assert (line["build"], line["problem"]) == ("x", "")


def test_builds_are_in_the_order_of_their_seconds() -> None:
    assert builds.in_order(["s3rver", "helm", "control plane", "helm"]) == ["control plane", "helm", "s3rver"]
