"""docs/how-to-compare.md: its commands, as they stand there, show what it says of a run that lost a rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.scenarios import document

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "how-to-compare.md"


def typed(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False
    )


def test_run_that_lost_a_rank_is_the_same_at_a_fixed_size_and_nearly_so_at_another(tmp_path: Path) -> None:
    text = PAGE.read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    blocks = [block.commands for block in document.read(PAGE)]
    shown = []
    for *commands, compared in blocks:
        for command in commands:
            done = typed(command, tmp_path)
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
            assert ("> kill train-w1-0" in done.stdout) == ("--at" in command), done.stdout
        shown.append(typed(compared, tmp_path))
    same, nearly = shown
    assert (same.returncode, same.stdout) == (0, "the same: step 60 and step 60\n"), same.stdout + same.stderr
    assert f"\n{same.stdout}```" in text, "as the page shows it"
    assert nearly.returncode == 1, nearly.stdout + nearly.stderr
    differences = nearly.stdout.splitlines()
    assert [line for line in differences if re.match(r"values   (model|optimizer)/", line) is None] == []
    assert all(float(re.search(r"by (\S+) at most", line)[1]) < 1e-5 for line in differences), differences  # type: ignore[index]
