"""examples/deepspeed: two lines are Everstep's, and a killed worker leaves no trace in DeepSpeed's last checkpoint.

DeepSpeed is no package of the development environment: where it is installed, Accelerate and Trainer import it in each
of their processes. So the long tests install it into a folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.recipes.changed import changed_lines
from support.recipes.recipes import BIN, EXAMPLES, PROGRAMS, disturbed, kill, undisturbed
from support.recipes.recorded import record

NAME = "deepspeed"
EPOCHS, STEPS = 2, 2 * 38  # 1,797 images, 48 a step, the last of an epoch with less
PACKAGES = ("deepspeed==0.19.8", "einops", "hjson", "msgpack", "ninja", "py-cpuinfo", "psutil", "pydantic")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    command: list[str | Path] = [
        BIN / "uv",
        "pip",
        "install",
        "-q",
        "--python",
        sys.executable,
        "--target",
        folder,
        "--no-deps",
    ]
    subprocess.run([*command, *PACKAGES], check=True, timeout=300, env={**os.environ, "DS_BUILD_OPS": "0"})
    return folder


@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_killed_worker_leaves_no_trace(tmp_path: Path, library: Path, stage: int) -> None:
    through = [PROGRAMS / "with_packages.py", library]
    arguments = ("--epochs", str(EPOCHS), "--stage", str(stage), "--save_dir")
    folders = tmp_path / "calm" / "checkpoints", tmp_path / "hit" / "checkpoints"
    undisturbed(NAME, folders[0].parent, (*arguments, str(folders[0])), through=through)
    at = [kill(NAME, 25, 55)]
    hit = disturbed(NAME, folders[1].parent, (*arguments, str(folders[1])), at=at, through=through)
    assert hit.status()["restarts"] >= 1, hit.output
    assert hit.status()["step"] == hit.status()["total_steps"] == STEPS

    printed = "".join(log.read_text() for log in (hit.folder / "out" / "logs").rglob("*") if log.is_file())
    began = sorted(int(step) for step in re.findall(r"begins with step (\d+)", printed))
    assert began[:3] == [1, 1, 1], printed
    assert [step % 20 for step in began[3:]] == [1, 1, 1], f"the steps behind a checkpoint: {began}"
    assert began[3] > 1, "not the first step again"

    script = [sys.executable, str(PROGRAMS / "deepspeed_checkpoints.py"), str(library), *map(str, folders)]
    paths = {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True, env={**os.environ, **paths})
    steps, files, tensors = re.findall(r"steps (.+), (\d+) files, (\d+) tensors", done.stdout)[0]
    assert steps == f"{STEPS} and {STEPS}", "the last checkpoint of each run"
    assert int(files) >= 3, "each rank has a part of the optimizer"
    assert int(tensors) > int(files), done.stdout
    changed = re.findall("differs: .*", done.stdout)
    record(NAME, f"values that a kill changes, ZeRO {stage}", len(changed), "")
    assert changed == []


def test_the_script_changes_by_few_lines() -> None:
    changed, moved = changed_lines(EXAMPLES / NAME)
    record(NAME, "lines that Everstep adds or changes", changed, "")
    assert changed <= 10
    assert moved == 0
