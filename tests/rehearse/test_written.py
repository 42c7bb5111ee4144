"""`everstep rehearse` warns of what a script has written and printed otherwise; and writes a page of HTML."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from support.rehearse import rehearse as play

pytestmark = pytest.mark.timeout(360)

SCRIPT = """
import os
import time

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

import everstep

torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(200, 8), torch.randn(200, 1))
with everstep.start("commits", every_steps=100) as run:
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    print("begins in", os.getcwd(), os.getpid())
    with open(f"pid-{os.getpid()}", "w") as out:
        out.write("a name of its own in each run")
    for step in run.steps(run.loader(dataset, global_batch=12), until=10_000):
        with step as batch:
            data, target = batch.data
            loss = mse_loss(model(data), target)
            batch.scale(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.completed and run.rank == 0:
            print("step", step.number, "at", time.time(), "best" if STARTED + 2 <= step.number else "")
            with open("metrics.csv", "a") as out:
                if step.number == 0:
                    out.write("step,seconds\\n")
                out.write(f"{step.number},{time.time()}\\n")
"""


def rehearse(folder: Path, script: str, *options: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report, and what the terminal shows."""
    (folder / "train.py").write_text(script)
    own = ("--html", "r.html", "--ranks", "2", "--steps", "12", "--limit", "200", *options)
    done = play(folder, *own, seconds=300, environ={"COLUMNS": "160"})
    return done.code, done.report, done.shown


class Parsed(HTMLParser):
    """The tags of a page with their attributes, and whether each that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def count(self, name: str) -> int:
        return sum(attrs.get("class") == name for _, attrs in self.tags)


@pytest.mark.long
def test_rows_that_are_doubled_and_lines_that_are_others_are_warnings_and_stand_in_the_page(tmp_path: Path) -> None:
    script = SCRIPT.replace("    for step in", '    started = [0]\n    run.untracked("started")\n    for step in')
    script = script.replace(
        "        with step as", "        started[0] = started[0] or step.number\n        with step as"
    )
    code, report, shown = rehearse(tmp_path, script.replace("STARTED", "started[0]"), "--at", "0+1@8:backward")
    written = {tuple(one["names"]): one for one in report["findings"] if one["kind"] == "written"}
    assert [one for one in report["findings"] if one["certain"]] == []
    assert code == 0
    assert sorted(written) == [("metrics.csv",), ("stdout",)]
    assert "metrics.csv has step 5 twice, step 6 twice, step 7 twice" in written["metrics.csv",]["text"]
    assert "in step 5 rank 0 printed 'step 5 at" in written["stdout",]["text"]
    assert "as calm, but written" in shown, "the script declares `started`, so it is not said to be held"

    text = (tmp_path / "r.html").read_text()
    parsed = Parsed(text)
    assert parsed.open == []
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"script", "link", "img", "iframe", "base", "form", "object"})
    assert not [attrs for _, attrs in parsed.tags if {"href", "src", "style", "onclick"} & attrs.keys()]
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert parsed.count("kill") == 2
    assert parsed.count("step") == 12 * 2 * 2 + 12 * 2 + 3 * 2, "the steps behind the commit are taken twice"
    assert parsed.count("start") == 2 + 2 + 4
    assert parsed.count("commit") >= 3
    assert "metrics.csv has step 5 twice" in text


@pytest.mark.long
def test_script_whose_output_differs_in_times_alone_is_passed(tmp_path: Path) -> None:
    script = SCRIPT.replace("STARTED", "0")
    code, report, _ = rehearse(tmp_path, script, "--at", "1@8:backward")
    assert (report["findings"], code) == ([], 0)
    assert {name for name in report["runs"][2]["files"] if not name.startswith("pid-")} == {"metrics.csv"}


def test_page_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it ran')")
    done = play(tmp_path, "--html", "no/r.html", seconds=60, reports=False)
    assert (done.code, re.sub(r"\s+", " ", done.errors)) == (2, "everstep: --html no/r.html: there is no folder no ")
