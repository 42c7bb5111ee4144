"""`everstep rehearse --from`: a rehearsal that begins from a commit of a run, of which it changes no byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.processes.warm_python import warm
from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(360)

SCRIPT = """
import torch
import everstep

torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(60, WIDTH), torch.randn(60, 1))
with everstep.start("../real-commits", every_steps=10) as run:
    model = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = torch.nn.parallel.DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    late = 0
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(dataset, global_batch=6), until=UNTIL):
        with step as batch:
            given, target = batch.data
            batch.scale((model(given) - target).pow(2).mean() * (2.0 if late >= 8 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.completed and step.number >= 100:
            late += 1
"""
SHORT = ("--ranks", "2", "--steps", "12", "--limit", "100")


def text(until: int, *, width: int = 8) -> str:
    return SCRIPT.replace("WIDTH", str(width)).replace("UNTIL", str(until))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose run has made 100 steps."""
    project = tmp_path_factory.mktemp("trained") / "project"
    project.mkdir()
    (project / "train.py").write_text(text(100))
    warm().run("train.py", cwd=project, timeout=240).check_returncode()
    return project


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rehearse(project: Path, script: str, *options: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report if there is one, and what the terminal shows."""
    (project / "train.py").write_text(script)
    done = play(project, *SHORT, *options, seconds=300, report="../r.json", reports=False)
    return done.code, done.report, done.shown + done.errors


@pytest.mark.long
def test_state_that_begins_late_in_a_run_is_found_from_its_commit_and_the_run_keeps_each_byte(trained: Path) -> None:
    commits = trained.parent / "real-commits"
    before = content(commits)
    assert before
    code, report, shown = rehearse(trained, text(10_000), "--kill", "rank,all", "--from", f"{commits}@100")
    assert report["from"] == 100, shown
    assert [(run["steps"], run["killed"]) for run in report["runs"]] == [(12, 0), (12, 0), (12, 5), (12, 2)]
    (found,) = [one for one in report["findings"] if one["certain"]]
    assert (found["kind"], code) == ("tracked", 1)
    assert "late" in found["names"]
    assert found["step"] == 9, "steps are counted from the commit"
    assert content(commits) == before


@pytest.mark.long
def test_right_script_is_passed_from_its_newest_commit(trained: Path) -> None:
    commits = trained.parent / "real-commits"
    right = text(10_000).replace("late >= 8", "step.number >= 108").replace("late += 1", "pass")
    code, report, shown = rehearse(trained, right, "--kill", "rank,all", "--from", str(commits))
    assert (report["findings"], code) == ([], 0), shown
    assert {run["steps"] for run in report["runs"]} == {12}


@pytest.mark.long_but("{commits}@55-no commit of step 55; there are steps 100, ")
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("{commits}@55", "no commit of step 55; there are steps 100, "),
        ("{commits}-of-nobody@100", "there is no checkpoint log there"),
        ("s3:/bucket@100", "s3://bucket"),
    ],
)
def test_commit_that_is_not_there_is_refused_before_anything_runs(trained: Path, place: str, says: str) -> None:
    place = place.format(commits=trained.parent / "real-commits")
    code, report, shown = rehearse(trained, "raise SystemExit('it ran')", "--from", place)
    assert (code, report) == (2, {})
    assert f"--from {place}: " in shown
    assert says in shown


def test_commit_of_another_model_is_refused_with_what_to_name_instead(trained: Path) -> None:
    commits = trained.parent / "real-commits"
    code, report, _ = rehearse(trained, text(10_000, width=9), "--from", f"{commits}@100")
    assert code == 1
    (found,) = report["findings"]
    assert found["kind"] == "refused"
    assert "model" in found["text"]
    assert "If the commit of --from is of another model: name one that this script has saved" in found["text"]


@pytest.mark.long
def test_script_that_takes_no_step_behind_the_commit_is_told_why(trained: Path) -> None:
    code, report, _ = rehearse(trained, text(100), "--from", f"{trained.parent / 'real-commits'}@100")
    assert code == 1
    assert "The commit of --from has 100 steps: the script may take no more" in report["findings"][0]["text"]
