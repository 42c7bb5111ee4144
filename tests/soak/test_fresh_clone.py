"""A newcomer's first minutes: clone, `make demo`, and once more."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from support import ROOT


@pytest.mark.timeout(1800)
def test_demo_in_a_fresh_clone_installs_itself_and_the_second_run_installs_nothing(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True, timeout=60)
    wheels = ROOT.parent / "shared" / "wheels"
    # As a newcomer has it: no virtual environment is active, and nothing of this one is on the path.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "MAKE"))}
    environment["PATH"] = os.pathsep.join(p for p in environment["PATH"].split(os.pathsep) if ".venv" not in p)
    seconds = []
    for _ in range(2):
        began = time.monotonic()
        done = subprocess.run(
            ["make", "demo", *([f"WHEELS={wheels}"] if wheels.is_dir() else [])],
            cwd=tmp_path / "clone",
            env=environment,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        seconds.append(time.monotonic() - began)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (accuracy,) = re.findall(r"final step=700 test_accuracy=([\d.]+) world=\d$", done.stdout, re.M)
        assert float(accuracy) >= 0.95
        assert (tmp_path / "clone" / ".everstep" / "demo" / "timeline.svg").stat().st_size > 1000
    print(f"first run {seconds[0]:.0f} s with the installation, second {seconds[1]:.0f} s")
    assert seconds[1] < seconds[0]
