"""The lines for CI in docs/reference/rehearse.md rehearse a script as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support import TESTS

pytestmark = pytest.mark.timeout(360)

PAGE = TESTS.parent / "docs" / "reference" / "rehearse.md"
SCRIPT = """
import argparse
import torch
import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
given = parser.parse_args()
weight = torch.zeros(1)
with everstep.start() as run:
    run.track(weight=weight)
    loader = run.loader(torch.utils.data.TensorDataset(torch.ones(200, 1)), global_batch=4)
    for step in run.steps(loader, epochs=given.epochs):
        with step as batch:
            weight += batch.data[0].mean()
"""


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def ends_well(folder: Path, command: str) -> None:
    (folder / "train.py").write_text(SCRIPT)
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 found, 0 warnings" in done.stdout


@pytest.mark.long
def test_target_for_make_rehearses(tmp_path: Path) -> None:
    head, command = block("make").splitlines()
    assert (head.partition(":")[0], command[0]) == ("rehearse", "\t")
    ends_well(tmp_path, command)
    assert (tmp_path / "rehearsal.json").exists()


@pytest.mark.long
def test_job_for_actions_rehearses_and_keeps_the_page(tmp_path: Path) -> None:
    steps = yaml.safe_load(block("yaml"))["jobs"]["rehearse"]["steps"]
    (command,) = [step["run"] for step in steps if step.get("run", "").startswith("everstep")]
    (kept,) = [step["with"]["path"] for step in steps if "upload-artifact" in step.get("uses", "")]
    ends_well(tmp_path, command)
    assert (tmp_path / kept).read_text().startswith("<!doctype html>")
