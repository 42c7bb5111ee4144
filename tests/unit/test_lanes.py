"""A failed test is repeated once, alone; what was repeated is told; nothing that did not run counts as passed."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT, TESTS
from support.lanes import repeats
from testcluster import builds

PROGRAM = """
import sys
from pathlib import Path
from support.lanes import repeats
outcome = repeats.play("tried", ["."], sys.argv[1:], Path("records"), most=3, limit=100)
print(repeats.report(outcome.repeated, Path("repeated.txt")))
print("problem:", outcome.problem)
sys.exit(bool(outcome.problem))
"""
ONCE = """
import os, pytest, time
from pathlib import Path

def first(name):
    here = Path(__file__).with_name(name + ".seen")
    seen = here.exists()
    here.touch()
    return not seen
"""
GOOD = "def test_good(): pass\n"


def lane(folder: Path, *parallel: str, **files: str) -> subprocess.CompletedProcess[str]:
    """A small lane of its own, with these test files; what was printed is in `stdout`."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p xdist -p no:cacheprovider\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(ONCE + text)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *parallel],
        cwd=folder, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # a third of the time of each of these runs
    )  # fmt: skip


@pytest.mark.long
def test_a_test_that_catches_its_time_limit_and_hangs_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from support.lanes.hung import Hung\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'timeout: seconds')\n"
        "    config.pluginmanager.register(Hung(slack=0.5, limit=60))\n"
    )
    hangs = """
import threading

@pytest.mark.timeout(0.5)
def test_hangs():
    if first("hangs"):
        threading.Event().wait()
def test_after(): pass
"""
    done = lane(tmp_path, "-n", "2", "--dist", "loadfile", hangs=hangs, good=GOOD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed alone  test_hangs.py::test_hangs" in done.stdout
    assert "in test_hangs" in done.stderr  # where it hung


def test_a_failure_a_crash_and_a_fixtures_error_that_do_not_come_again_pass_and_are_listed(tmp_path: Path) -> None:
    shared = """
@pytest.fixture(scope="session")
def server():
    assert not first("server"), "the server does not answer"

@pytest.mark.parametrize("number", range(12))
def test_of_the_server(server, number): pass
"""
    # Not before the other worker runs: xdist ends with an error of its own where a worker dies while it is given tests.
    crash = """
def test_crash():
    until = time.monotonic() + 30
    while not Path(__file__).with_name("server.seen").exists() and time.monotonic() < until:
        time.sleep(0.01)
    if first("crash"):
        os._exit(7)
def test_after(): pass
"""
    fails = "def test_fails():\n    assert not first('fails'), 'it was the load'\n"
    done = lane(tmp_path, "-n", "2", "--dist", "loadfile", shared=shared, crash=crash, fails=fails, good=GOOD)
    assert done.returncode == 0, done.stdout + done.stderr
    told = (tmp_path / "repeated.txt").read_text()
    assert sorted(line for line in told.splitlines() if not line.startswith(" ")) == [
        "passed alone  test_crash.py::test_crash  (lane tried)",
        "passed alone  test_fails.py::test_fails  (lane tried)",
        "passed alone  test_shared.py::test_of_the_server[0] and 11 more with it  (lane tried)",
    ]
    assert "    first: AssertionError: it was the load" in told
    assert "the server does not answer" in told
    assert "crashed while running" in told
    assert told in done.stdout
    assert "2 failed, 3 passed, 12 errors" in done.stdout, "pytest's own closing line of the lane"


def test_what_fails_twice_fails_the_lane(tmp_path: Path) -> None:
    fails = "def test_fails(): assert 1 == 2\ndef test_once():\n    assert not first('once')\n"
    skips = "def test_skips():\n    assert not first('skips')\n    pytest.skip('not now')\n"
    done = lane(tmp_path, "-n", "2", fails=fails, skips=skips, good=GOOD)
    assert done.returncode == 1
    told = (tmp_path / "repeated.txt").read_text()
    assert "FAILED TWICE  test_fails.py::test_fails" in told
    assert "FAILED TWICE  test_skips.py::test_skips" in told, "a test that was skipped did not pass"
    assert "passed alone  test_fails.py::test_once" in told
    assert "failed twice: test_fails.py::test_fails, test_skips.py::test_skips" in done.stdout


@pytest.mark.long
def test_more_failures_than_accidents_stop_the_lane_and_none_is_repeated(tmp_path: Path) -> None:
    many = '@pytest.mark.parametrize("number", range(50))\ndef test_fails(number): assert number < 0\n'
    for parallel in ((), ("-n", "2")):
        done = lane(tmp_path, *parallel, many=many)
        assert done.returncode == 1
        assert "problem: lane tried: more than 3 failures of different causes; none is repeated" in done.stdout
        assert (tmp_path / "repeated.txt").read_text() == ""


@pytest.mark.parametrize(
    ("text", "parallel", "problem"),
    [
        ("import nothing_like_that", (), "could not be collected: ModuleNotFoundError"),
        ("def test_crash(): os._exit(7)\ndef test_after(): pass", (), "pytest ended with 7, 3 tests did not run"),
        (
            "def test_crash(): os._exit(7)\ndef test_after(): pass",
            ("-n", "1", "--max-worker-restart", "0"),
            "2 tests did not run: test_broken.py::test_after, test_good.py::test_good",
        ),
        ("def test_interrupts(): raise KeyboardInterrupt", (), "pytest ended with 2, "),
    ],
)
def test_a_run_that_breaks_is_no_pass_whatever_it_had_passed(
    text: str, parallel: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    done = lane(tmp_path, *parallel, broken=text, good=GOOD)
    assert done.returncode == 1
    assert problem in done.stdout.partition("problem: ")[2], done.stdout


def test_a_lane_without_tests_is_no_pass(tmp_path: Path) -> None:
    done = lane(tmp_path)
    assert done.returncode == 1
    assert "problem: lane tried: pytest ended with 5" in done.stdout


@pytest.mark.long
def test_a_run_over_its_limit_is_ended_and_is_no_pass(tmp_path: Path) -> None:
    hangs = tmp_path / "test_hangs.py"
    hangs.write_text("import threading\ndef test_hangs(): threading.Event().wait()\n")
    record = repeats.run([str(hangs), "-p", "no:cacheprovider"], tmp_path / "record", 3, 3.0)
    assert repeats.judge(record, 3) == "it ran longer than 3 s"


def of_make(variable: str) -> list[str]:
    """The words of a variable of the Makefile."""
    (line,) = [x for x in (ROOT / "Makefile").read_text().splitlines() if x.startswith(f"{variable} :=")]
    return line.partition(":=")[2].split()


def test_make_plays_every_lane() -> None:
    assert set(runpy.run_path(str(TESTS / "lanes" / "lanes.py"))["LANES"]) == {
        *of_make("LANES"),
        *of_make("NIGHTLY"),
    }


def test_processes_that_make_starts_keep_the_modules_that_they_compile(tmp_path: Path) -> None:
    asks = tmp_path / "Makefile"
    asks.write_text(f"include {ROOT / 'Makefile'}\nenvironment:\n\t@env\n")
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "7"}
    command = ["make", "-s", "-f", str(asks), "environment"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    names = {line.partition("=")[0] for line in done.stdout.splitlines()}
    assert "PYTHONHASHSEED" in names, "other variables are handed on"
    assert "PYTHONDONTWRITEBYTECODE" not in names


LANES = """
import runpy, sys
from pathlib import Path
program = runpy.run_path(sys.argv[1])
main, Lane = program["main"], program["Lane"]
class Bare(Lane):
    def parallel(self):
        return []
lanes = {
    name: Bare((), ("-p", "no:cacheprovider", f"test_{name}.py"), 1, (), 0.0 if name == "three" else 100.0)
    for name in ("one", "two", "three")
}
here = Path.cwd()
files = {name: here / name for name in ("STATE", "REPEATED", "LEDGER")}
main.__globals__.update(LANES=lanes, ROOT=here, **files)
sys.argv = ["lanes.py", *sys.argv[2:]]
sys.exit(main())
"""


def lanes(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`lanes.py` with three lanes of one file each; the third has no budget."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, "-c", LANES, str(TESTS / "lanes" / "lanes.py"), *arguments],
        cwd=folder, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environ},
    )  # fmt: skip


@pytest.mark.long
def test_failures_of_all_lanes_are_counted_together(tmp_path: Path) -> None:
    """Three in each of two lanes are six, although each of them would pass alone."""
    fails = "".join(f"def test_{n}(): assert not first('{{name}}{n}')\n" for n in range(3))
    for name in ("one", "two", "three"):
        (tmp_path / f"test_{name}.py").write_text(ONCE + fails.replace("{name}", name))
    done = lanes(tmp_path, "one", "two", "three")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED: lane two: more than 5 failures of different causes" in done.stdout
    assert not (tmp_path / "three0.seen").exists()
    assert (tmp_path / "REPEATED").read_text().count("passed alone") == 3


@pytest.mark.long
def test_whole_run_goes_on_after_a_lane_that_failed_and_writes_what_each_test_came_to(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_fails(): assert 1 == 2\n" + GOOD)
    (tmp_path / "test_two.py").write_text(ONCE + "def test_skips(): pytest.skip('not here')\n" + GOOD)
    (tmp_path / "test_three.py").write_text(ONCE + "def test_once(): assert not first('once')\n")
    done = lanes(tmp_path, "--whole", "--results", "results.json", "one", "two", "three")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED: lane one: failed twice: test_one.py::test_fails" in done.stdout
    found = json.loads((tmp_path / "results.json").read_text())
    assert {one["test"]: one["outcome"] for one in found} == {
        "test_one.py::test_fails": "failed",
        "test_one.py::test_good": "passed",
        "test_two.py::test_skips": "skipped",
        "test_two.py::test_good": "passed",
        "test_three.py::test_once": "passed alone",
    }
    keys = {"test", "lane", "outcome", "seconds", "commit"}
    assert all(set(one) == keys and one["seconds"] >= 0 and f"test_{one['lane']}.py" in one["test"] for one in found)


def test_run_that_goes_on_plays_what_the_one_before_did_not_pass(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\nfrom support.lanes import left_out\n"
        "def pytest_addoption(parser): parser.addoption(left_out.OPTION, type=Path)\n"
        "def pytest_configure(config):\n"
        "    if config.getoption(left_out.OPTION):\n"
        "        config.pluginmanager.register(left_out.LeftOut(config.getoption(left_out.OPTION)))\n"
    )
    plays = "def test_{0}():\n    with open('{0}.played', 'a') as played: played.write('x')\n"
    (tmp_path / "test_one.py").write_text(plays.format("passes") + "def test_fails(): assert Path('mended').exists()\n")
    (tmp_path / "test_one.py").write_text("from pathlib import Path\n" + (tmp_path / "test_one.py").read_text())
    (tmp_path / "test_two.py").write_text(plays.format("two"))
    arguments = ("--whole", "--go-on", "--results", "results.json", "one", "two")
    assert lanes(tmp_path, *arguments).returncode == 1
    (tmp_path / "mended").touch()
    (tmp_path / "test_one.py").touch()
    done = lanes(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "passes.played").read_text() == (tmp_path / "two.played").read_text() == "x"
    found = json.loads((tmp_path / "results.json").read_text())
    tests = ["test_one.py::test_fails", "test_one.py::test_passes", "test_two.py::test_two"]
    assert [(one["test"], one["outcome"]) for one in found] == [(test, "passed") for test in tests]
    assert lanes(tmp_path, "two").returncode == 0  # without --go-on all is played again
    assert (tmp_path / "two.played").read_text() == "xx"


@pytest.mark.parametrize(("strict", "code"), [("", 0), ("1", 1)])
def test_lane_over_its_budget_is_named_at_the_end_and_fails_the_run_where_that_is_wanted(
    strict: str, code: int, tmp_path: Path
) -> None:
    for name in ("one", "three"):
        (tmp_path / f"test_{name}.py").write_text(GOOD)
    done = lanes(tmp_path, "one", "three", EVERSTEP_BUDGET=strict)
    assert done.returncode == code, done.stdout + done.stderr
    assert "##### over budget: lane three took " in done.stdout
    assert "lane one took" not in done.stdout


@pytest.mark.long
def test_third_time_that_a_test_is_repeated_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(ONCE + "def test_once(): assert not first('once')\n")
    codes = []
    for _ in range(3):
        done = lanes(tmp_path, "one")
        codes.append(done.returncode)
        (tmp_path / "once.seen").unlink()
    assert codes == [0, 0, 1], done.stdout + done.stderr
    assert "FAILED: lane one: repeated in more than 2 of its last 10 runs: test_one.py::test_once" in done.stdout


def test_every_build_of_a_lane_is_known_and_each_fixture_of_its_tests_has_its_builds() -> None:
    """One that the lane does not name would be built before its first test, and not beside the lanes before it."""
    lanes = runpy.run_path(str(TESTS / "lanes" / "lanes.py"))["LANES"]
    by_name = {**builds.OF_FIXTURE, "etcd_endpoint": ("etcd",), "crd": builds.OF_FIXTURE["control_plane"]}
    asks = re.compile(rf"^(?:async )?def \w+\([^)]*\b({'|'.join(by_name)})\b", re.MULTILINE)
    for name, lane in lanes.items():
        assert set(lane.builds) <= set(builds.BUILDS), name
        files = [path for folder in lane.folders for path in (TESTS / folder).rglob("*.py")]
        wanted = {build for path in files for fixture in asks.findall(path.read_text()) for build in by_name[fixture]}
        if name not in ("nodes", "alone", "long-nodes", "long-alone"):  # the lane of servers has their folders
            assert wanted <= set(lane.builds), name
