"""The stamp of a rehearsal, in real runs: which comparisons it leaves out, and when it does not count."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from everstep.contract.stamp import WRITTEN, Program, Stamp
from everstep.rehearse import stamp as stamps
from everstep.train.guards.comparison.rehearsed import program_of_process
from everstep.train.guards.contents import ELEMENTS
from support.processes import warm_agent
from support.processes.warm_python import warm
from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(360)

NET = """
import torch


def make():
    return torch.nn.Linear(8, 1)
"""
SCRIPT = """
import logging
import os
import sys
import time

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep
import net

logging.basicConfig(level=logging.INFO)
torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(200, 8), torch.randn(200, 1))
seen = []


def is_late():
    return len(seen) >= LATE


with everstep.start(every_steps=5) as run:
    model = DDP(net.make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=12), until=int(sys.argv[1])):
        with step as batch:
            with open(os.environ.get("DIARY", os.devnull), "a") as diary:
                diary.write(f"{os.getpid()} {step.number}\\n")
            data, target = batch.data
            loss = mse_loss(model(data), target) * (2.0 if is_late() else 1.0)
            batch.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.completed:
            time.sleep(float(os.environ.get("PAUSE", "0")))
            if run.rank == 0:
                with open(sys.argv[2], "w") as file:
                    file.write(f"{step.number}\\n")
            COUNTS
"""
RIGHT = SCRIPT.replace("COUNTS", "pass").replace("LATE", "10**9")
STEPS = "60"
ARGUMENTS = (STEPS, "newest.txt")  # the second one is a file that the script writes itself
STAMP = Path(".everstep", "rehearsed", "train.py.json")
SHORT = ("--ranks", "2", "--steps", "12", "--limit", "100")


def project(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text(RIGHT)
    (folder / "net.py").write_text(NET)
    return folder


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A project that was rehearsed, the report, and what the terminal has shown."""
    folder = project(tmp_path_factory.mktemp("rehearsed") / "project")
    code, report, shown = rehearse(folder, "--kill", "rank,all")
    assert (report["findings"], code) == ([], 0)
    return folder, report, shown


@pytest.fixture
def folder(rehearsed: tuple[Path, dict[str, Any], str], tmp_path: Path) -> Path:
    """A copy of it, with its stamp."""
    return shutil.copytree(rehearsed[0], tmp_path / "project")


def rehearse(folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report, and what the terminal shows."""
    done = play(folder, *SHORT, *options, seconds=300, report="../r.json", arguments=ARGUMENTS)
    return done.code, done.report, done.shown + done.errors


@dataclass(frozen=True)
class Run:
    code: int
    log: str
    blocks: list[int]  # how often the new process has run the block of each of its first steps


def run_with_a_loss(folder: Path, *, at: int = 10) -> Run:
    """`everstep-run` with two processes, of which one is killed in its step `at`, or soon after."""
    place = folder.parent / f"run-{time.monotonic_ns()}"
    place.mkdir()
    diary, log = place / "diary", place / "log"
    diary.touch()
    environ = {
        **os.environ, "DIARY": str(diary), "PAUSE": "0.03", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "EVERSTEP_CHECKPOINT_URL": str(folder.parent / "commits"),
    }  # fmt: skip
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=3")
    with log.open("wb") as out:
        agent = warm().popen(
            warm_agent.__file__, *flags, "train.py", *ARGUMENTS, cwd=folder, env=environ, stdout=out, stderr=out
        )
    killed: set[int] = set()
    try:
        until = time.monotonic() + 120
        while agent.poll() is None:
            assert time.monotonic() < until, log.read_text()[-3000:]
            lines = [tuple(map(int, line.split())) for line in diary.read_text().splitlines(keepends=True)[:-1]]
            late = [pid for pid, step in lines if step >= at]
            if late and not killed:
                killed = {pid for pid, _ in lines}
                os.kill(late[0], signal.SIGKILL)
            time.sleep(0.005)
    finally:
        if agent.poll() is None:
            agent.terminate()
            agent.wait(30)
    assert killed, log.read_text()[-3000:]
    lines = [tuple(map(int, line.split())) for line in diary.read_text().splitlines()]
    counts = Counter(step for pid, step in lines if pid not in killed)
    return Run(agent.wait(), log.read_text(), [counts[step] for step in sorted(counts)])


@pytest.mark.long
def test_rehearsal_that_found_nothing_leaves_a_stamp_and_says_where(
    rehearsed: tuple[Path, dict[str, Any], str],
) -> None:
    folder, report, shown = rehearsed
    stamp = folder / STAMP
    assert report["stamp"] == str(stamp)
    assert f"stamp: {stamp}" in shown.splitlines()
    body = json.loads(stamp.read_text())
    assert (set(body["program"]["modules"]), body["ranks"], body["steps"]) == ({"__main__", "net"}, 2, 12)
    assert body["program"]["files"] == {"2": WRITTEN}


def test_new_process_of_a_rehearsed_program_computes_its_first_steps_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stamp is written as a rehearsal of 60 steps would, which takes half a minute."""
    folder = project(tmp_path / "project")
    monkeypatch.setattr(sys, "argv", ["train.py", *ARGUMENTS])
    modules = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in (("__main__", RIGHT), ("net", NET))}
    program = replace(program_of_process(Program({}, "", {"torch": ""}, "", {})), modules=modules, files={"2": WRITTEN})
    stamps.write(None, folder / "train.py", Stamp(program, 2, 60, "2026-11-29T20:01:02Z"))
    (folder / ARGUMENTS[1]).write_text("of an earlier run")
    run = run_with_a_loss(folder)
    assert run.code == 0
    assert run.blocks[:12] == [1] * 12
    assert "this program was rehearsed" in run.log


@pytest.mark.long
def test_stamp_below_the_checkpoint_url_counts_too(folder: Path) -> None:
    below = folder.parent / "commits" / "rehearsed"
    below.mkdir(parents=True)
    (folder / STAMP).rename(below / "train.py.json")
    run = run_with_a_loss(folder)
    assert (run.code, run.blocks[0]) == (0, 1)
    assert "this program was rehearsed" in run.log


@pytest.mark.long
def test_program_that_has_changed_since_is_compared_and_the_log_says_what_has(folder: Path) -> None:
    (folder / "net.py").write_text(NET + "# another text\n")
    run = run_with_a_loss(folder)
    assert (run.code, run.blocks[0]) == (0, 2)
    assert "new processes are compared: the module net has another text" in run.log


def stamp_script_that_counts(folder: Path, late: int) -> None:
    """Its steps have another loss from its `late`th on, as each process counts them. No rehearsal would leave this
    stamp: that of the right script is made to name this one."""
    text = SCRIPT.replace("COUNTS", "seen.append(0)").replace("LATE", str(late))
    (folder / "train.py").write_text(text)
    body = json.loads((folder / STAMP).read_text())
    body["program"]["modules"]["__main__"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / STAMP).write_text(json.dumps(body))


@pytest.mark.long
def test_what_begins_to_matter_behind_the_rehearsed_steps_is_still_refused(folder: Path) -> None:
    stamp_script_that_counts(folder, 30)
    run = run_with_a_loss(folder, at=20)
    assert run.code != 0, run.log
    assert run.blocks[:3] == [1, 2, 1], "the others did not wait for a second computation of its first step"
    assert "of the values that the script's steps change these are not those of rank" in run.log


@pytest.mark.long
def test_process_that_joins_behind_the_rehearsed_steps_is_refused_in_its_second_step(folder: Path) -> None:
    stamp_script_that_counts(folder, 15)
    run = run_with_a_loss(folder, at=20)
    assert run.code != 0, f"a launcher's restart does not make it right: {run.log}"
    assert "It came 1 step ago, and its gradients were not compared until now" in run.log


@pytest.mark.long
def test_program_of_a_process_that_no_agent_has_forked_is_the_same(tmp_path: Path) -> None:
    """As under torchrun: there multiprocessing gives the script a second name."""
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing\n"
        "from everstep.train.guards.comparison.rehearsed import program_of_process\n"
        "print(*program_of_process().modules)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["__main__"]


@pytest.mark.long
def test_rehearsal_that_finds_something_takes_an_earlier_stamp_away(folder: Path) -> None:
    (folder / "train.py").write_text(
        RIGHT.replace("run.track(model=model, optimizer=optimizer)", "run.track(model=model)")
    )
    code, report, _ = rehearse(folder)
    assert (code, report["stamp"]) == (1, None)
    assert not (folder / STAMP).exists()


@pytest.mark.long
def test_rehearsal_that_could_not_compare_a_value_leaves_no_stamp_and_says_which(tmp_path: Path) -> None:
    folder = project(tmp_path / "project")
    (folder / "train.py").write_text(RIGHT.replace("seen = []", f"seen, files = [], [0] * {ELEMENTS + 1}"))
    code, report, shown = rehearse(folder, "--kill", "rank,all")
    assert (report["findings"], report["stamp"], code) == ([], None, 0)
    assert f"no stamp: a run would trust it, and these were not compared: files (more than {ELEMENTS}" in shown
    assert not (folder / STAMP).exists()


@pytest.mark.long_but("options0")
@pytest.mark.parametrize("options", [["--kill", "rank"], ["--at", "1@5:begin"]])
def test_stamp_is_refused_where_the_rehearsal_does_not_prove_enough(tmp_path: Path, options: list[str]) -> None:
    folder = project(tmp_path / "project")
    done = play(folder, *options, "--stamp", "commits", seconds=60, reports=False)
    assert done.code == 2
    assert "--stamp: a stamp is left where --kill has rank and all, and --at is auto" in done.errors
