"""What `everstep rehearse` finds does not depend on how long a save takes. A script that makes its commits slow stands
for a busy machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(500)

SCRIPT = """
import time
from pathlib import Path

import torch
import torch.distributed as dist

import everstep
from everstep.checkpoint.log.commitlog import CommitLog

commit = CommitLog.commit


def commit_slowly(*arguments):
    time.sleep(SECONDS)
    return commit(*arguments)


CommitLog.commit = commit_slowly
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
taken = 0
"""
OWN_LOOP = """
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
state = {"model": net, "optimizer": optimizer}
checkpointer = everstep.Checkpointer("commits")
for step in range(checkpointer.restore(state) or 0, 1000):
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).sum() * (1 + FACTOR)).backward()
    optimizer.step()
    taken += 1
    if checkpointer.should_save(step + 1):
        checkpointer.save(step + 1, state)
"""
SESSION = """
with everstep.start() as run:
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=1000):
        with step:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def rehearse(folder: Path, loop: str, seconds: str, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the report."""
    (folder / "train.py").write_text(SCRIPT.replace("SECONDS", seconds) + loop)
    done = play(folder, "--ranks", "2", "--steps", "12", *options, seconds=480)
    return done.code, done.report


@pytest.mark.long
def test_kill_of_one_rank_waits_for_the_save_from_which_all_go_on(tmp_path: Path) -> None:
    """Without its commit all would begin from nothing, as the calm run did, and nothing would be lost."""
    loop = OWN_LOOP.replace("FACTOR", "taken")
    code, report = rehearse(tmp_path, loop, "1.5", "--at", "1@8:backward")
    (certain,) = [one for one in report["findings"] if one["certain"]]
    assert (certain["kind"], certain["step"], code) == ("tracked", 6, 1), "the commit is of step 5"
    assert "taken" in certain["names"]


@pytest.mark.long
@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(OWN_LOOP.replace("FACTOR", "step").replace("    taken += 1\n", ""), id="own loop"),
        pytest.param(SESSION, id="session"),
    ],
)
def test_run_goes_on_with_another_size_only_when_its_save_is_a_commit(tmp_path: Path, loop: str) -> None:
    code, report = rehearse(tmp_path, loop, "3", "--kill", "size")
    assert (report["findings"], code) == ([], 0)
    assert [(run["steps"], run["killed"]) for run in report["runs"]] == [(12, 0), (12, 0), (12, 2), (12, 2)]


@pytest.mark.long
def test_kill_before_a_save_that_takes_too_long_is_not_judged(tmp_path: Path) -> None:
    """Each run is in a folder of its name, where the kills are noted."""
    late = '40 if Path.cwd().parent.name in ("at", "at-repeated") and not any(Path("..").glob("killed-*")) else 0'
    loop = OWN_LOOP.replace("FACTOR", "taken")
    code, report = rehearse(tmp_path, loop, late, "--at", "1@8:backward", "--limit", "60")
    (found,) = report["findings"]
    assert (found["kind"], found["certain"], code) == ("slow", False, 3)
    assert "such as a save that had begun" in found["text"]
    assert [(run["name"], run["played"]) for run in report["runs"]] == [("calm", 1), ("again", 1), ("at", 2)]
