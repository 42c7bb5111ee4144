"""`everstep rehearse` on real scripts, with real kills: what it finds, and what it leaves as it was."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import TESTS
from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(360)

SCRIPT = """
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

{before}
dataset = torch.utils.data.TensorDataset(torch.randn(200, 8), torch.randn(200, 1))
with everstep.start("{commits}", every_steps=100) as run:
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model{tracked})
    for step in run.steps(run.loader(dataset, global_batch=12), until=10_000):
        with step as batch:
            data, target = batch.data
            loss = mse_loss(model(data), target) * {weight}
            batch.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.completed:
            {behind}
"""
# What no list of spellings holds: an object of the script's own class, bound anew in each step.
COUNTER = """
class Count:
    def __init__(self, n):
        self.n = n


torch.manual_seed(0)
k = Count(0)
"""
OPTIMIZER = ", optimizer=optimizer"


def rehearse(
    folder: Path, *options: str, before: str = "torch.manual_seed(0)", tracked: str = OPTIMIZER, weight: str = "1.0",
    behind: str = "pass",
) -> tuple[int, dict[str, Any], str]:  # fmt: skip
    """The exit code, the report, and what the terminal shows."""
    text = SCRIPT.format(
        before=before, tracked=tracked, weight=weight, behind=behind, commits=folder.parent / "real-commits"
    )
    (folder / "train.py").write_text(text)
    done = play(folder, *options, seconds=300, report="report.json")
    return done.code, done.report, done.shown


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


@pytest.mark.long
def test_counter_of_an_own_class_is_found_with_its_name_and_its_step(folder: Path) -> None:
    text = SCRIPT.format(
        before=COUNTER, tracked=OPTIMIZER, weight="(2.0 if k.n >= 20 else 1.0)", behind="k = Count(k.n + 1)",
        commits=folder.parent / "real-commits",
    )  # fmt: skip
    (folder / "train.py").write_text(text)
    done = play(folder, "--steps", "30", "--kill", "rank,all", seconds=300, report="report.json")
    report, shown = done.report, done.shown
    assert done.code == 1
    lines = [line for line in done.errors.splitlines() if line.startswith(("FOUND (one rank killed", "all ranks"))]
    assert [line.partition(" ")[0] for line in lines] == ["FOUND", "all"], "it is shown before the next run is over"
    refused, found = sorted((f for f in report["findings"] if f["certain"]), key=lambda f: str(f["kind"]))
    assert (refused["kind"], refused["runs"]) == ("refused", ["one rank killed, 5 times"])
    assert (found["kind"], found["step"]) == ("tracked", 21)
    assert {"k.n", "model", "optimizer"} <= set(found["names"])
    assert "k.n is" in shown.replace("\n", " ")
    assert "model, optimizer differ" in shown.replace("\n", " ")


@pytest.mark.long
def test_script_that_is_right_is_passed_and_nothing_of_the_users_is_touched(folder: Path) -> None:
    (folder / "log.txt").write_text("mine\n")
    code, report, shown = rehearse(folder, "--steps", "12", behind='open("log.txt", "a").write(f"{step.number}\\n")')
    assert {(one["kind"], *one["names"]) for one in report["findings"]} == {("written", "log.txt")}
    assert code == 0
    assert [(run["title"], run["steps"], run["killed"]) for run in report["runs"]] == [
        ("calm", 12, 0),
        ("calm, once more", 12, 0),
        ("one rank killed, 5 times", 12, 5),
        ("all ranks killed at once, and started again", 12, 3),
        ("one rank leaves, then one more", 12, 2),
        ("one rank joins, then one fewer", 12, 4),
    ]
    assert all("log.txt" in run["files"] for run in report["runs"])
    assert (folder / "log.txt").read_text() == "mine\n"
    assert not (folder.parent / "real-commits").exists()
    assert "0 found" in shown


SET = 'torch.manual_seed(0)\nNAMES = list({"ant", "bee", "cat", "dog", "eel", "fox", "gnu"})'


@pytest.mark.long
@pytest.mark.parametrize("seed", ["", "5"], ids=["none", "of the environment"])
def test_training_by_the_order_of_a_set_is_found_unless_the_hash_seed_is_fixed(
    folder: Path, seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    text = SCRIPT.format(before=SET, tracked=OPTIMIZER, weight='(NAMES.index("ant") + 1.0)', behind="pass",
                         commits=folder.parent / "real-commits")  # fmt: skip
    (folder / "train.py").write_text(text)
    done = play(folder, "--steps", "12", "--ranks", "2", "--kill", "all", seconds=300, cold=True)
    kinds = [(one["kind"], "the order of a set" in one["text"]) for one in done.findings]
    assert kinds == ([] if seed else [("chance", True)])


BY_NEXT = """
import torch
from torch.nn.parallel import DistributedDataParallel

import everstep

torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(200, 8))
run = everstep.start("{commits}", every_steps=100)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
run.track(model=model, optimizer=optimizer)
steps = run.steps(run.loader(dataset, global_batch=12), until={until})
while run.step < 300:
    with next(steps) as batch:
        batch.scale(model(batch.data[0]).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("until", "code"),
    [
        pytest.param(300, 0, id="as-many-as-it-takes"),
        pytest.param(12, 1, id="fewer-than-it-takes", marks=pytest.mark.long),
    ],
)
def test_loop_that_takes_its_steps_by_next_ends_where_the_rehearsal_does(folder: Path, until: int, code: int) -> None:
    """It asks for more steps than are rehearsed. One that asks for more than it has itself is wrong."""
    (folder / "train.py").write_text(BY_NEXT.format(until=until, commits=folder.parent / "real-commits"))
    done = play(folder, "--steps", "12", "--kill", "all", seconds=200, report="report.json")
    assert done.code == code, done.shown
    assert ("StopIteration" in done.shown) == bool(code)


@pytest.mark.long
def test_script_whose_calm_runs_differ_can_be_judged_by_no_kill(folder: Path) -> None:
    draws = "import os\ntorch.manual_seed(0)\nnoise = int.from_bytes(os.urandom(2), 'big')"
    code, report, shown = rehearse(folder, "--steps", "12", "--kill", "rank", before=draws, weight="(1 + noise / 1000)")
    assert code == 1
    assert next(f["kind"] for f in report["findings"] if f["certain"]) in ("chance", "refused")
    assert [run["name"] for run in report["runs"]] in (["calm"], ["calm", "again"]), "the others would prove nothing"
    if len(report["runs"]) == 2:
        assert "no run with a loss was made, because two calm ones differ already: mend that first" in shown


@pytest.mark.long
def test_limit_counts_from_the_first_step_and_what_was_before_it_apart(folder: Path) -> None:
    """Together both take longer than --limit."""
    before = "import time\ntime.sleep(24)\ntorch.manual_seed(0)"
    code, report, _ = rehearse(
        folder, "--ranks", "2", "--steps", "12", "--kill", "", "--limit", "35", before=before, behind="time.sleep(1.3)"
    )
    assert (code, report["findings"]) == (0, [])
    assert all(run["seconds"] > 35 for run in report["runs"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("len(hidden)", "TypeError: object of type 'NoneType' has no len(); the next start ended with it too"),
        ('exit("nothing was kept")', "exit code 1, behind the line: nothing was kept; the next start ended with it"),
        ("os._exit(5)", "exit code 5, behind the line: "),
    ],
    ids=["error", "exit", "at once"],
)
def test_error_of_each_new_process_ends_the_run_and_names_what_nothing_tracks(
    folder: Path, fails: str, says: str
) -> None:
    """The usual form of a hidden state: made in the first step, and used in the others."""
    before = "import os\ntorch.manual_seed(0)\nhidden = None"
    changed = f"torch.ones(2) if batch.step == 0 else {fails} if hidden is None else hidden + 1"
    weight = f"1.0\n            hidden = {changed}"
    code, report, shown = rehearse(
        folder, "--ranks", "2", "--steps", "12", "--at", "1@3:begin", before=before, weight=weight
    )
    (found,) = report["findings"]
    assert (code, found["kind"]) == (1, "ended"), shown
    assert says in found["text"]
    assert "nothing tracks them: hidden (train.py:" in found["text"], found["text"]
    assert "carried by the loop and not tracked: hidden (train.py:" in shown
    assert report["runs"][-1]["steps"] < 12, "it ended at the second start"


@pytest.mark.long
def test_interrupted_rehearsal_shows_what_its_runs_have_found(folder: Path) -> None:
    """With interpreters of its own, as users have it."""
    script = SCRIPT.format(
        before="torch.manual_seed(0)", tracked=OPTIMIZER, weight="1.0", behind="pass", commits=folder / "none"
    )
    (folder / "train.py").write_text(script)
    command = [sys.executable, "-m", "everstep.cli.main", "rehearse", "--ranks", "2", "--steps", "12", "train.py"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if line.startswith("calm: 12 steps in "):
                running.send_signal(signal.SIGINT)
                break
        shown, _ = running.communicate(timeout=60)
    assert "interrupted, and more runs were to come" in shown
    assert running.returncode not in (0, 1)


def test_script_that_is_refused_calm_is_not_killed(folder: Path) -> None:
    code, report, shown = rehearse(folder, "--steps", "12", tracked="")
    assert code == 1
    assert [run["name"] for run in report["runs"]] == ["calm"]
    (found,) = report["findings"]
    assert found["kind"] == "refused"
    assert "optimizer" in found["text"]
    assert "\n" not in found["text"], "the sentence of one rank, and no line of a launcher's"
    assert "no other run was made" in shown


PLAIN = """
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

WARM = 0


def main():
    global WARM
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    x = torch.randn(240, 8)
    net = torch.nn.Linear(8, 1)
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    state = {"model": net, "optimizer": optimizer}
    checkpointer = everstep.Checkpointer("commits")
    start = checkpointer.restore(state) or 0
    for step in range(start, 1000):
        order = torch.randperm(240, generator=torch.Generator().manual_seed(step))[:24]
        mine = order[dist.get_rank() :: dist.get_world_size()]
        WARM += 1
        loss = mse_loss(model(x[mine]), x[mine].sum(1, keepdim=True))
        optimizer.zero_grad()
        (loss * min(1.0, COUNT / 40)).backward()
        optimizer.step()
        if checkpointer.should_save(step + 1):
            checkpointer.save(step + 1, state)


main()
"""


@pytest.mark.long
@pytest.mark.parametrize(("count", "right"), [("WARM", False), ("(step + 1)", True)])
def test_loop_of_the_scripts_own_with_a_checkpointer_is_rehearsed_too(folder: Path, count: str, right: bool) -> None:
    (folder / "train.py").write_text(PLAIN.replace("COUNT", count))
    done = play(folder, "--steps", "20", "--limit", "60", seconds=300)
    certain = [f for f in done.findings if f["certain"]]
    assert [run["steps"] for run in done.report["runs"]] == [20] * 6
    assert not (folder / "commits").exists()
    if right:
        assert (certain, done.code) == ([], 0)
    else:
        assert done.code == 1
        assert {"WARM", "model"} <= set(certain[0]["names"])


@pytest.mark.long
def test_loop_of_the_scripts_own_that_had_saved_nothing_before_its_kill_is_a_warning(folder: Path) -> None:
    (folder / "train.py").write_text(PLAIN.replace("COUNT", "(step + 1)"))
    done = play(folder, "--ranks", "2", "--steps", "12", "--at", "1@2:backward", seconds=300)
    (found,) = done.findings
    assert (found["kind"], done.code) == ("unsaved", 0)
    assert "nothing had been saved when rank 1 was killed" in found["text"]


BY_HAND = """
import torch
import torch.distributed as dist

import everstep

torch.manual_seed(0)
x = torch.randn(240, 8)
weight = torch.zeros(8, 1, requires_grad=True)


def train(mine, scale):
    loss = torch.nn.functional.mse_loss(mine @ weight, mine.sum(1, keepdim=True)) * scale
    DIFFERENTIATE
    dist.all_reduce(gradient)
    with torch.no_grad():
        weight.sub_(0.01 * gradient)


"""
IN_SESSION = """
with everstep.start() as run:
    run.track(weight=weight)
    for step in run.steps(run.loader(torch.utils.data.TensorDataset(x), global_batch=12), until=10_000):
        with step as batch:
            train(batch.data[0], batch.scale(1.0))
"""
OF_ITS_OWN = """
dist.init_process_group("gloo")
state = {"weight": weight}
checkpointer = everstep.Checkpointer("commits")
for step in range(checkpointer.restore(state) or 0, 1000):
    order = torch.randperm(240, generator=torch.Generator().manual_seed(step))[:12]
    train(x[order[dist.get_rank() :: dist.get_world_size()]], 1.0)
    if checkpointer.should_save(step + 1):
        checkpointer.save(step + 1, state)
"""
GRADIENT = "(gradient,) = torch.autograd.grad(loss, [weight])"
BACKWARD = "torch.autograd.backward([loss])\n    gradient, weight.grad = weight.grad, None"


@pytest.mark.long_but("own loop")
@pytest.mark.parametrize(
    ("loop", "differentiate"),
    [
        pytest.param(OF_ITS_OWN, GRADIENT, id="own loop"),
        pytest.param(OF_ITS_OWN, BACKWARD, id="own loop, all losses"),
        pytest.param(IN_SESSION, GRADIENT, id="session"),
    ],
)
def test_script_without_an_optimizer_and_without_backward_is_killed_too(
    folder: Path, loop: str, differentiate: str
) -> None:
    (folder / "train.py").write_text(BY_HAND.replace("DIFFERENTIATE", differentiate) + loop)
    at = "1@2:backward,0@4:optimizer,0+1@9:backward"
    done = play(folder, "--ranks", "2", "--steps", "12", "--at", at, seconds=300)
    assert (done.findings, done.code) == ([], 0)
    assert [(run["steps"], run["killed"]) for run in done.report["runs"]] == [(12, 0), (12, 0), (12, 4)]


@pytest.mark.long
def test_loop_over_what_accelerate_prepared_is_rehearsed_with_its_commits(folder: Path) -> None:
    shutil.copy(TESTS.parent / "examples" / "accelerate" / "train.py", folder)
    done = play(folder, "--kill", "rank,all", "--limit", "100", seconds=300, arguments=["--cpu"])
    assert [f for f in done.findings if f["certain"] or f["kind"] == "unsaved"] == []
    assert [(run["steps"], run["killed"]) for run in done.report["runs"]] == [(40, 0), (40, 0), (40, 7), (40, 3)], (
        "the example evaluates, and a rank is killed in one of them, and at the end of the other"
    )
    assert done.code == 0


@pytest.mark.long
def test_schedule_that_accelerate_prepared_moves_alike_with_another_number_of_ranks(folder: Path) -> None:
    shutil.copy(TESTS.parent / "examples" / "accelerate" / "train.py", folder)
    own = ("--kill", "size", "--steps", "20", "--limit", "100")
    done = play(folder, *own, arguments=("--cpu",), seconds=300, report="report.json")
    assert (done.findings, done.code) == ([], 0), done.shown


@pytest.mark.long_but("options4---at 1@3: write RANK@STEP:POINT")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps", "5"], "--steps 5: at least 12"),
        (["--ranks", "1"], "--ranks 1: at least 2"),
        (["--kill", "rank,disk"], "--kill disk: it takes rank, all, size, store"),
        (["--json", "no/such/report.json"], "--json no/such/report.json: there is no folder no/such"),
        (["--at", "1@3"], "--at 1@3: write RANK@STEP:POINT"),
        (["--at", "7@3:begin"], "--at 7@3:begin: there are steps 0 to 39 and ranks 0 to 2"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_before_anything_runs(folder: Path, options: list[str], says: str) -> None:
    (folder / "train.py").write_text("raise SystemExit('it ran')")
    done = play(folder, *options, seconds=60, reports=False)
    assert done.code == 2
    assert says in done.errors


LEAVES_OUT = """
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import everstep

torch.manual_seed(0)
x = torch.randn(48, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
with everstep.start("commits", every_steps=4) as run:
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(data, global_batch=12)

    def evaluate():
        with torch.no_grad():
            model.module(x[:8]); model.module(x[8:16])

    for epoch in run.epochs(loader, 5):
        for step in run.steps():
            with step as batch:
                inputs, targets = batch.data
                optimizer.zero_grad()
                batch.scale(mse_loss(model(inputs), targets)).backward()
                if step.number % 4 != 3:
                    optimizer.step()
                else:
                    optimizer.zero_grad()
        run.evaluate(evaluate)
"""


@pytest.mark.long
def test_step_that_all_left_out_is_none_that_a_new_process_has_made(tmp_path: Path) -> None:
    """A rank is lost in the evaluation behind it. The new one has made no step yet, so it has left none out."""
    (tmp_path / "train.py").write_text(LEAVES_OUT)
    done = play(tmp_path, "--steps", "12", "--kill", "rank", "--at", "1@8:evaluate", "--limit", "100", seconds=200)
    assert (done.findings, done.code) == ([], 0), done.shown
